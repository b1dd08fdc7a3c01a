"""Runs a gateway: `python -m rollmesh.gateway --help`."""

import os
import sys

from rollmesh.chat.templates.windows import TemplateRefusedError
from rollmesh.chat.tokenizer import ModelFilesError
from rollmesh.gateway.commands import DEAD_LETTERS, REVOKE_KEY, run_dead_letters, run_revoke_key
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.service import GatewayService
from rollmesh.runtime.process.main import run_service


def main() -> int:
    """Returns the exit code."""
    if sys.argv[1:2] == [DEAD_LETTERS]:
        return run_dead_letters(sys.argv[2:], os.environ)
    if sys.argv[1:2] == [REVOKE_KEY]:
        return run_revoke_key(sys.argv[2:], os.environ)
    try:
        return run_service("gateway", GatewayConfig, GatewayService, sys.argv[1:], os.environ)
    except (ModelFilesError, TemplateRefusedError) as error:
        print(f"rollmesh gateway: model_path: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
