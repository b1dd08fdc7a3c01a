"""The conversation tree of a session and what its branches are: plain state, no I/O.

May import `chat`.
"""
