"""The session store: the `Store` Protocol, and its implementations.

A store keeps records and returns them; decisions about them are made in `delivery`, the only other
package that this one may import. SQLite and PostgreSQL are two dialects of `sql`.
"""
