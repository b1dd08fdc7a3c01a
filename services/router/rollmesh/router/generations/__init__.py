"""Generations that a router runs itself, for clients of engines that are pointed at it.

May import all other rooms of the router, and `mesh`.
"""
