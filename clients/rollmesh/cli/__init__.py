"""The `rollmesh` command. `__main__` imports the standard library only.

May import everything, and does so when a command is called.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
