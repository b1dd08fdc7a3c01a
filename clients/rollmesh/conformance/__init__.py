"""Black-box checks of servers that agents call: the known habits of agents, over HTTP.

A check states its requirement, and the clients that break without it. It never depends on the
samples of a model. Imports nothing else of rollmesh, so that it runs against any server.
"""

from rollmesh.conformance.asked import CALCULATE as CALCULATE
from rollmesh.conformance.catalog import CHECKS as CHECKS
from rollmesh.conformance.checks import (
    Check as Check,
    NotSeenError as NotSeenError,
    Result as Result,
    Verdict as Verdict,
)
from rollmesh.conformance.report import junit as junit, table as table
from rollmesh.conformance.runner import run_checks as run_checks
from rollmesh.conformance.server import FailedError as FailedError, Server as Server
from rollmesh.conformance.training.records import (
    NO_IDS as NO_IDS,
    NO_TEXT as NO_TEXT,
    OTHER_IDS as OTHER_IDS,
    RECORDS as RECORDS,
)
