"""Who is in the mesh: the registered replicas, and the gateway that a new session is placed on.

May import nothing else of the router.
"""
