"""The door of `rollmesh.cli`: its names for other rooms and tests."""

from rollmesh.cli.__main__ import main as main
from rollmesh.cli.config import check_mesh as check_mesh, installed as installed
from rollmesh.cli.top import (
    Screen as Screen,
    Seen as Seen,
    keys_of as keys_of,
    lines as lines,
    pressed as pressed,
    sessions_of as sessions_of,
    transcript_of as transcript_of,
)
from rollmesh.cli.up import Supervisor as Supervisor, free_ports as free_ports
