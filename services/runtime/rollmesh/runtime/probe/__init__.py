"""`rollmesh probe`: asks a service of this host whether it serves.

May import plain modules of `runtime` and `access`.
"""
