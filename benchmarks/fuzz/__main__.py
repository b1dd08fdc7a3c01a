"""`make fuzz`."""

import sys

if __name__ == "__main__":  # forked services import this module, and need nothing of it
    from benchmarks.fuzz.fuzz import main

    sys.exit(main())
