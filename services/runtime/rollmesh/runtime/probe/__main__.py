"""`rollmesh probe SERVICE`: exits 0 if a service of this host serves, as probes of containers ask.

It takes the service's own flags and variables and its mesh file (`--config`), and reaches the
service as it listens: in plain text or over TLS, with the service's own certificate where
certificates are asked for. Of the sidecar it asks `/healthz`, of the others their gRPC health. It
exits with 1 if the service does not serve, and with 2 for an invalid setting.
"""

import os
import sys

from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.probe.asking import NotServingError, ProbeConfig, probe


def main() -> int:
    """Returns the exit code."""
    service, flags = "".join(sys.argv[1:2]), sys.argv[2:]
    if not service or service.startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        config = parse_config(ProbeConfig, service, flags, os.environ, in_part=True)
        probe(service, config)
    except (ConfigError, NotServingError) as error:
        print(f"rollmesh probe: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
