"""PostgreSQL: a connection in a thread of its own, and its tables.

May import the plain modules of `runtime`. Only a service whose settings name a database imports it.
"""
