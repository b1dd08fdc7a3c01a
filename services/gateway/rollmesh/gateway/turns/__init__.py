"""One turn: prompt, lease, generation, checks, commit.

May import `storage`, `export` and `conversation`.
"""
