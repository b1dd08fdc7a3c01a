"""A service as a process: its entry point, signals, memory and fault points.

May import the rest of `runtime`.
"""
