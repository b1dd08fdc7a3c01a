"""`make kills`."""

import sys

if __name__ == "__main__":  # forked services import this module, and need nothing of it
    from benchmarks.kills.matrix import main

    sys.exit(main())
