"""The processes of a mesh: planned from its file, started, and started again when they die.

`rollmesh up` runs all of them on one machine. `rollmesh.integrations.ray` runs each where Ray
places it. It imports the runtime only.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
