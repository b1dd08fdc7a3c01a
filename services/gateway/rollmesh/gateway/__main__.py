"""Runs a gateway: `python -m rollmesh.gateway --help`."""

import os
import sys

from rollmesh.chat import ModelFilesError
from rollmesh.chat.templates import TemplateRefusedError
from rollmesh.gateway.commands import TOOLS, run_tool
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.service import GatewayService
from rollmesh.runtime.process import run_service


def main() -> int:
    """Returns the exit code."""
    if sys.argv[1:] and sys.argv[1] in TOOLS:
        return run_tool(sys.argv[1], sys.argv[2:], os.environ)
    try:
        return run_service("gateway", GatewayConfig, GatewayService, sys.argv[1:], os.environ)
    except (ModelFilesError, TemplateRefusedError) as error:
        print(f"rollmesh gateway: model_path: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
