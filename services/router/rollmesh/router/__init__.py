"""The router: membership of the mesh, leases of engines, control of engines, and their weights.

Modules, each of which imports only those below it:

    __main__
    service | commands    RPCs, and control calls to all engines of a model. `forget-weights`
    dispatch | pushes     streams of leases. Pushes of weights and adapters
    updates               what engines lack, and how they get it
    peers                 weights held equal between routers
    models                the models, their engines and kept weights
    metrics | kept | pins kept weights on disk. Evaluations for which pushes wait
    config
    leases                streams, sessions, the queue: every step of a lease
    engines | membership  which engine a turn gets. Members, and which gateway a session gets
    circuits              whether turns reach an engine

Read first: `leases`, `engines`.

Outside itself it may import `mesh`, `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
