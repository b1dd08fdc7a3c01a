"""The store: what it must do, and its two implementations, SQLite and Redis.

May import `delivery`.
"""
