"""Black-box checks of servers that agents call: what is known of agents, asked over HTTP.

A check says what it requires and what breaks for whom without it. It never depends on what a model
samples. Imports nothing else of rollmesh, so that it runs against any server.
"""
