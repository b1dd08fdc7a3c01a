"""Delivery decisions as pure functions over plain state: no I/O, and time is an argument.

Both stores call them, so sessions are grouped, filtered and removed identically in either.

May import nothing else of the collector.
"""
