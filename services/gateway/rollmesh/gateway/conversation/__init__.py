"""The state of a session: its conversation tree, its turns, and the lineage of its branches.

It does no I/O: the caller stores the changes. May import only `chat` and the runtime.
"""
