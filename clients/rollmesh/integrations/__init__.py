"""Trainers that know nothing of rollmesh: verl, TRL, and vLLM's weight transfer.

Each module is imported by name, because each needs packages of its own. They may import `client`,
`batches`, `runtime` and `v1`, and not each other.
"""
