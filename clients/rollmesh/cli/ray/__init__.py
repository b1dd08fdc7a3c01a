"""`rollmesh ray`: brings a mesh up on a Ray cluster, shows it, scales it, takes it down.

May import `integrations`, `launch` and `runtime`.
"""
