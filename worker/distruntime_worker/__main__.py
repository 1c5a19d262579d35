"""`python -m distruntime_worker` is the command `distruntime-worker`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
