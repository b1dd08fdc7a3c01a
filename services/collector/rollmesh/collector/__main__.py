"""Runs a collector or one of its command-line tools.

Usage: `python -m rollmesh.collector [TOOL] --help`.
"""

import os
import sys

from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.service import CollectorService
from rollmesh.runtime.process import run_service

if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        from rollmesh.collector.commands import TOOLS, run_tool

        if sys.argv[1] in TOOLS:
            sys.exit(run_tool(sys.argv[1], sys.argv[2:], os.environ))
    sys.exit(run_service("collector", CollectorConfig, CollectorService, sys.argv[1:], os.environ))
