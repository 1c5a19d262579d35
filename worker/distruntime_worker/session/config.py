"""What one worker was told to be: everything the daemon needs to know, checked."""

from __future__ import annotations

from dataclasses import dataclass

from distruntime.wire.keys import KeyPair


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of a worker. Invariant: exactly one of `listen` and `master` is set."""

    # The address to wait for masters at.
    listen: str | None = None
    # The address of a master to dial.
    master: str | None = None
    # The number to ask the dialled master for; None: the master numbers us.
    node: int | None = None
    # The worker offers these devices, and all that there are if there is none.
    devices: tuple[str, ...] = ()
    # Offer this many GPUs that are CPU tensors in truth.
    simulate_cuda: int = 0
    # None: nobody has to prove who they are.
    keys: KeyPair | None = None
    # Torch's kernels use so many threads; 0: as torch chooses.
    threads: int = 0
    # Where other workers reach this one; empty: found out.
    data_host: str = ""
    # The port of this worker's own channel for other workers; 0: any free one.
    data_port: int = 0
    # Whether to end with its last session.
    once: bool = False
    max_memory: int | float | None = (
        # Each session may hold so much on each device: bytes, or as a float a part of what it has.
        None
    )
