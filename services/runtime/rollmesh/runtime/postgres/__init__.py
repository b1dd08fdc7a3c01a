"""PostgreSQL: a connection in a thread of its own, and its tables.

Only a service whose settings name a database imports it.
"""
