"""The router: membership of the mesh, leases of engines, control of engines, and their weights.

Modules, each of which imports only those below it:

    __main__
    service | commands    RPCs, and control calls to all engines of a model. `forget-weights`
    dispatch | pushes     streams of leases. Pushes of weights and adapters
    updates               what engines lack, and how they get it
    peers                 weights held equal between routers
    models                the models, their engines and weights. Evaluations for which pushes wait
    metrics | kept        kept weights on disk
    config
    leases                streams, sessions, the queue: every step of a lease
    engines | membership  engines, their circuits, and which a turn gets. Members and gateways

Read first: `leases`, `engines`.

Outside itself it may import `mesh`, `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
