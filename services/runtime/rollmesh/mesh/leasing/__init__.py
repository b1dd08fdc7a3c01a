"""Leases of engines, over one stream to each router, and what a router must be told or tells.

May import `mesh.routers`. The router has the other end in `rollmesh.router.leasing`.
"""
