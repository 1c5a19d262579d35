"""What one worker was told to be: everything the daemon needs to know, checked."""

from __future__ import annotations

from dataclasses import dataclass

from distruntime.wire.keys import KeyPair


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of a worker. Invariant: exactly one of `listen` and `master` is set."""

    # The worker waits for masters at this address.
    listen: str | None = None
    # The worker dials the master at this address.
    master: str | None = None
    # The worker asks the dialled master for this number. If it is None, the master numbers the worker.
    node: int | None = None
    # The worker offers these devices, and all that there are if there is none.
    devices: tuple[str, ...] = ()
    # The worker offers so many GPUs that are CPU tensors in truth.
    simulate_cuda: int = 0
    # If it is None, nobody has to prove who they are.
    keys: KeyPair | None = None
    # Torch's kernels use so many threads. If it is 0, torch chooses.
    threads: int = 0
    # Other workers reach this one at this host. If it is empty, the worker finds it out.
    data_host: str = ""
    # The worker's own channel for other workers has this port. If it is 0, the system chooses a free one.
    data_port: int = 0
    # If it is True, the worker ends with its last session.
    once: bool = False
    # Each session may hold so much on each device: so many bytes, or, as a float, a part of what the device
    # has.
    max_memory: int | float | None = None
    # If it is False, the worker runs no function of a master's, and unpickles nothing.
    functions: bool = True
    # Health and figures are served over HTTP at this host and port. If it is None, they are not.
    metrics: tuple[str, int] | None = None
