"""Where the other members are: the gateway of a session, and a collector or sidecar that is up.

May import `mesh.routers`.
"""
