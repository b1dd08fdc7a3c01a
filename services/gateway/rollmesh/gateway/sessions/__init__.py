"""Session lifecycle from creation to close: keys, replies, idle timeouts and ending turns.

May import `turns`, `storage`, `export` and `conversation`.
"""
