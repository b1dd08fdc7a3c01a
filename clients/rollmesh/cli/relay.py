"""`rollmesh relay`: a public process that agents call, and to which sidecars dial out."""

import os
import sys

from rollmesh.runtime.process import run_service
from rollmesh.sidecar import RelayConfig, RelayService


def main() -> int:
    """Returns the exit code."""
    return run_service("relay", RelayConfig, RelayService, sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
