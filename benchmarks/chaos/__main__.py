"""`make chaos`."""

import sys

if __name__ == "__main__":  # forked services import this module, and need nothing of it
    from benchmarks.chaos.chaos import main

    sys.exit(main())
