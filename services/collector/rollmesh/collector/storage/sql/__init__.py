"""What the SQLite and the PostgreSQL store have in common: tables, statements and their order.

The functions work on a `Transaction`, which each dialect implements. They make every decision while
nobody else writes: SQLite has one writer, and PostgreSQL's writers take a lock.

May import `storage.store` and `delivery`.
"""
