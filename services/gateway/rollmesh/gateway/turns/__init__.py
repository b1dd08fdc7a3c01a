"""One turn: prompt, lease, generation, checks, commit.

May import `storage`, `conversation` and `chat`.
"""
