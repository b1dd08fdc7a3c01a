"""What members of a mesh share: registration with the router, and leases of engines.

May import `runtime`.
"""
