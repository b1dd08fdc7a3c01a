"""`rollmesh relay`: a public process that agents call, and to which sidecars dial out.

Limits of the agents' HTTP come from `ROLLMESH_SIDECAR_*`, as for a sidecar.
"""

import os
import sys

from rollmesh.runtime.config import parse_config
from rollmesh.runtime.process.main import run_service
from rollmesh.sidecar import RelayConfig, RelayService, SidecarConfig


def main() -> int:
    """Returns the exit code."""

    def build(config: RelayConfig) -> RelayService:
        http = [
            f"--port={config.http_port}",
            f"--host={config.host}",
            f"--grace-ms={config.grace_ms}",
            f"--https-certificate-file={config.https_certificate_file}",
            f"--https-key-file={config.https_key_file}",
        ]
        return RelayService(config, parse_config(SidecarConfig, "sidecar", http, os.environ))

    return run_service("relay", RelayConfig, build, sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
