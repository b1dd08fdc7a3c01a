"""Runs a collector: `python -m rollmesh.collector --help`."""

import os
import sys

from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.service import CollectorService
from rollmesh.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service("collector", CollectorConfig, CollectorService, sys.argv[1:], os.environ))
