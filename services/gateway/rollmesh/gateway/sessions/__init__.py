"""Sessions from creation to close: keys, replies, idle time, and what ends them.

May import `turns`, `storage`, `export` and `conversation`.
"""
