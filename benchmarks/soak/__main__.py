"""`make soak`."""

import sys

if __name__ == "__main__":  # forked services import this module, and need nothing of it
    from benchmarks.soak.soak import main

    sys.exit(main())
