"""Clients of the router: members, leases of engines and generations on them, gateways of sessions.

May import `runtime`.
"""
