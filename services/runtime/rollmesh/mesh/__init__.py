"""Clients of the router: membership, leases and generations, and where the other members are.

May import `runtime`.
"""
