"""What one worker was told to be: everything the daemon needs to know, checked."""

from __future__ import annotations

from dataclasses import dataclass

from distruntime.wire.keys import KeyPair


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of a worker. Invariant: exactly one of `listen` and `master` is set."""

    listen: str | None = None  # the address to wait for masters at
    master: str | None = None  # the address of a master to dial
    node: int | None = None  # the number to ask the dialled master for; None: the master numbers us
    devices: tuple[str, ...] = ()  # to offer; empty: all there are
    simulate_cuda: int = 0  # offer this many GPUs that are CPU tensors in truth
    keys: KeyPair | None = None  # None: nobody has to prove who they are
    threads: int = 0  # of torch's kernels; 0: as torch chooses
    data_host: str = ""  # where other workers reach this one; empty: found out
    data_port: int = 0  # of this worker's own channel for other workers; 0: any free one
    once: bool = False  # whether to end with its last session
    max_memory: int | float | None = (
        None  # that each session may hold on each device: bytes, or as a float a part of what it has
    )
