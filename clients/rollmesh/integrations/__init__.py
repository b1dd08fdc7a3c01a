"""Trainers that know nothing of rollmesh: verl, TRL, and vLLM's weight transfer.

Each module is imported by name, because each needs packages of its own. They build on
`rollmesh.client` and `rollmesh.batches`, and not on each other.
"""
