"""Runs a scorer: `python -m rollmesh.scorer module:function [flags]`."""

import os
import sys

from rollmesh.runtime.process import run_service
from rollmesh.scorer.config import ScorerConfig
from rollmesh.scorer.service import ScorerService

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--function={arguments[0]}"
    sys.exit(run_service("scorer", ScorerConfig, ScorerService, arguments, os.environ))
