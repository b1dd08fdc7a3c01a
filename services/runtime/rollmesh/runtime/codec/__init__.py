"""The wire forms that services share: token arrays, enums, session records and nested messages.

May import `runtime.errors`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
