"""`python -m distruntime_worker` is the command `distruntime-worker`."""

import gc

# Importing torch makes objects that stay, and looking through them again and again is a tenth of a worker's
# start.
gc.disable()

from .cli import command  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    command()
