"""The scorer: a process that serves a Python function as a `ScorerService`.

Modules, each importing only those below it:

    __main__
    service               the scorer as a service, its RPC, and worker processes
    config

`worker` is the program that a worker process runs. It is never imported.

Outside itself it may import `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
