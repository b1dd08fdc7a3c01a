"""Delivery decisions as pure functions over plain state: no I/O, and time is an argument.

Both stores call them, so sessions are grouped, filtered and removed identically in either. This
package imports nothing else from the collector.
"""
