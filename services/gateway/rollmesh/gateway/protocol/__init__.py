"""Converts between the messages of `rollmesh.v1` and the gateway's own types.

May import `conversation`.
"""
