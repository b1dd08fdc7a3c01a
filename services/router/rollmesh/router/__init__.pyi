"""The door of `rollmesh.router`: its names for other rooms and tests."""

from rollmesh.router.config import RouterConfig as RouterConfig
from rollmesh.router.engines import (
    Choice as Choice,
    Circuit as Circuit,
    CircuitLimits as CircuitLimits,
    Engine as Engine,
    Fleet as Fleet,
    Lease as Lease,
    Ranking as Ranking,
    Target as Target,
    fits as fits,
)
from rollmesh.router.kept import KeptWeights as KeptWeights, restored as restored
from rollmesh.router.leases import AWAITED_MS as AWAITED_MS, LeaseTable as LeaseTable
from rollmesh.router.membership import Member as Member, Members as Members
from rollmesh.router.models import Models as Models
from rollmesh.router.pushes import Pushes as Pushes
from rollmesh.router.service import RouterService as RouterService
