"""Generations on the engines of a mesh: checked, and continued on another engine if one is lost.

Gateways and routers share it. May import `mesh.leasing`.
"""
