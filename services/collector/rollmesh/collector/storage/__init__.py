"""The session store: the `Store` Protocol, and its implementations in SQLite and in Redis.

A store keeps records and returns them; decisions about them are made in `delivery`, the only other
package that this one may import. The two implementations do not depend on each other.
"""
