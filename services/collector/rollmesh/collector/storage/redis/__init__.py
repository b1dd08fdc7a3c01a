"""The store in Redis, which several collectors may share.

What must happen at once is a Lua script in `scripts`; everything else is decided in `delivery`.
"""
