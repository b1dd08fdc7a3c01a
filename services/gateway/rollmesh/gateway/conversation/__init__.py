"""The state of a session: its conversation tree, its turns, and what its branches are.

No I/O: a caller stores what changes. May import only `chat` and the runtime.
"""
