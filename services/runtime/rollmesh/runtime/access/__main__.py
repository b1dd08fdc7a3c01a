"""`rollmesh tokens DIR`: makes a token for each role of a mesh.

Start a service with `--tokens-dir DIR/accepted --token-file DIR/ROLE.token`. Give trainers
`DIR/trainer.token` and tools `DIR/operator.token` (ROLLMESH_TOKEN_FILE). With `--metrics-token-file
DIR/scrapers`, Prometheus shows `DIR/scraper.token`.
"""

import argparse
import sys
from pathlib import Path

from rollmesh.runtime.access.tokens import make_tokens


def main() -> int:
    """Returns the exit code: 0, 1 if a file cannot be written, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh tokens", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the files are written")
    parser.add_argument("--keep", action="store_true", help="do nothing if there are tokens")
    options = parser.parse_args()
    if options.keep and (options.folder / "accepted").exists():
        return 0
    try:
        make_tokens(options.folder)
    except OSError as error:
        print(f"rollmesh tokens: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: ROLE.token to present, accepted/ for servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
