"""`rollmesh up`: a complete mesh on this machine, planned and supervised.

May import `runtime`.
"""
