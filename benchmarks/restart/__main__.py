"""Runs the benchmark. See `restart`."""

import sys

from benchmarks.restart.restart import main

if __name__ == "__main__":
    sys.exit(main())
