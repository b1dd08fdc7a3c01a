"""Black-box checks of servers that agents call: the known habits of agents, over HTTP.

A check states its requirement, and the clients that break without it. It never depends on the
samples of a model. Imports nothing else of rollmesh, so that it runs against any server.
"""
