"""Logs, metrics and traces, the same in every service.

May import `runtime.access`, `codec`, `config`, `errors` and `runs`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
