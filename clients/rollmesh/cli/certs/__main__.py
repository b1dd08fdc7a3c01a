"""`rollmesh certs DIR`: makes a CA and a certificate for each role, for a trial of TLS.

Start a service with `--tls-certificate-file DIR/ROLE.crt --tls-key-file DIR/ROLE.key --tls-ca-file
DIR/ca.crt --tls-server-name rollmesh`; the certificate shows its role, so no token is needed. The
key of the CA is not kept: make all of them again before they expire.
"""

import argparse
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rollmesh.cli.certs.making import are_valid, make_certificates
from rollmesh.runtime.access.making import write_private

_DAYS = 30
_KEPT_DAYS = 7


def main() -> int:
    """Returns the exit code: 0, 1 if a file cannot be written, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh certs", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the files are written")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="a further name or address of the services; repeat it for several",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"do nothing if there are certificates for {_KEPT_DAYS} more days, and replace others",
    )
    parser.add_argument("--days", type=int, default=_DAYS, help="validity [default: %(default)s]")
    options = parser.parse_args()
    if options.days < 1:
        parser.error("--days: give at least 1")
    now = datetime.now(UTC)
    try:
        if options.keep and are_valid(options.folder, now + timedelta(days=_KEPT_DAYS)):
            return 0
        files = make_certificates(options.host, now, options.days)
        if options.keep:
            for name in files:
                (options.folder / name).unlink(missing_ok=True)
        write_private(options.folder, files)
    except (OSError, ValueError) as error:
        print(f"rollmesh certs: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: ca.crt, and ROLE.crt and ROLE.key, valid for {options.days} days")
    return 0


if __name__ == "__main__":
    sys.exit(main())
