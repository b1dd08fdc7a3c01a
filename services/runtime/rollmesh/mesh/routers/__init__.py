"""The routers of a mesh: which one is used, calls that any may answer, and registration with all.

May import nothing else of `mesh`.
"""
