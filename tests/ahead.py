"""A service whose clock is ten seconds ahead: `python -m tests.ahead rollmesh.router ...`."""

import runpy
import sys
import time

AHEAD_S = 10

if __name__ == "__main__":
    _host = time.time_ns
    time.time_ns = lambda: _host() + AHEAD_S * 10**9
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
