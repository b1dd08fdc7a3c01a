"""The Redis store, which several collectors may share.

Lua scripts in `scripts` make the atomic changes; all other decisions are made in `delivery`.
"""
