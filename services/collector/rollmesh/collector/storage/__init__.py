"""The store: the Protocol in `store`, and its implementations in SQLite and in Redis.

A store keeps records and returns them; what becomes of them is decided in `delivery`, the only
other package that this one may import. The two implementations do not know each other.
"""
