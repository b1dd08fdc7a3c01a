"""The PostgreSQL store, which several collectors may share.

A writing transaction takes a lock for all collectors, so that the statements of `storage.sql`
decide as they do in SQLite. Reading transactions take no lock, and have their own connection.

May import `storage.sql`, `storage.store` and `delivery`.
"""
