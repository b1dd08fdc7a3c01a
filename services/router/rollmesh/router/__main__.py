"""Runs a router or one of its command-line tools: `python -m rollmesh.router [TOOL] --help`."""

import os
import sys

from rollmesh.router.config import RouterConfig
from rollmesh.router.service import RouterService
from rollmesh.runtime.process import run_service

if __name__ == "__main__":
    if sys.argv[1:2] == ["forget-weights"]:
        from rollmesh.router.commands import forget_weights

        sys.exit(forget_weights(sys.argv[2:], os.environ))
    sys.exit(run_service("router", RouterConfig, RouterService, sys.argv[1:], os.environ))
