"""Runs a router: `python -m rollmesh.router --help`."""

import os
import sys

from rollmesh.router.config import RouterConfig
from rollmesh.router.service import RouterService
from rollmesh.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service("router", RouterConfig, RouterService, sys.argv[1:], os.environ))
