"""Black-box checks of servers that agents call: the known habits of agents, over HTTP.

A check states its requirement, and the clients that break without it. It never depends on the
samples of a model. Imports nothing else of rollmesh, so that it runs against any server.
"""

from rollmesh.conformance.asked import CALCULATE
from rollmesh.conformance.catalog import CHECKS
from rollmesh.conformance.checks import Check, NotSeenError, Result, Verdict
from rollmesh.conformance.report import junit, table
from rollmesh.conformance.runner import run_checks
from rollmesh.conformance.server import FailedError, Server
from rollmesh.conformance.training.records import NO_IDS, NO_TEXT, OTHER_IDS, RECORDS

__all__ = [
    "CALCULATE",
    "CHECKS",
    "NO_IDS",
    "NO_TEXT",
    "OTHER_IDS",
    "RECORDS",
    "Check",
    "FailedError",
    "NotSeenError",
    "Result",
    "Server",
    "Verdict",
    "junit",
    "run_checks",
    "table",
]
