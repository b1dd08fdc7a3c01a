"""Sessions from creation to close: keys, retries, idle time, and what ends them.

May import `turns`, `export`, `storage` and `conversation`.
"""
