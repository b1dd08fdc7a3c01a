"""Clients of the router for the members of a mesh: registration, and leases of engines.

May import `runtime`.
"""
