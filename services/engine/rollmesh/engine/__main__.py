"""Runs an engine: `python -m rollmesh.engine --help`."""

import os
import sys

from rollmesh.engine.config import EngineConfig
from rollmesh.engine.service import EngineService
from rollmesh.runtime.process import run_service

if __name__ == "__main__":
    # vLLM reads these from the environment. The user's values win.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.exit(run_service("engine", EngineConfig, EngineService, sys.argv[1:], os.environ))
