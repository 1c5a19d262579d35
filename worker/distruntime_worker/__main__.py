"""`python -m distruntime_worker` is the command `distruntime-worker`."""

from .cli import command

if __name__ == "__main__":
    command()
