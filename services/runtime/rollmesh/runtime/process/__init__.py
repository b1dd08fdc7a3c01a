"""A service as a process: its entry point, signals, memory and fault points.

May import the rest of `runtime`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
