"""Clients of the router: registration of members, leases of engines, and the gateways of sessions.

May import `runtime`.
"""
