"""Decisions of delivery, as plain functions over plain state: no I/O, and time is an argument.

Both stores call them, so that a session is grouped, filtered and removed alike in either. May
import nothing else of the collector.
"""
