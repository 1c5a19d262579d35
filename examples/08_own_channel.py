"""A data channel of one's own: for machines that share a folder and nothing else. Messages are files in it.

    $ python examples/08_own_channel.py
    node 0 cpu -> node 1 cpu by SharedFolder, sum 499500
    what it lacks is refused: the data channel 'shared_folder' has no all_reduce, only broadcast, send
    the conformance suite passes, in 3.5 s

The suite starts workers of its own, and kills some of them.
"""

import shutil
import tempfile
import threading
import time
from itertools import count
from pathlib import Path

import torch

import distruntime as dr
from distruntime.testing import check_data_channel


class SharedFolder(dr.distributed.DataChannel):
    """One member of a group: made on each worker, from this class, which travels there.

    All data is contiguous bytes on the CPU.
    """

    capabilities = dr.distributed.Capabilities(frozenset({"send", "broadcast"}))

    def __init__(self, membership: dr.distributed.Membership) -> None:
        super().__init__(membership)
        self._ended = threading.Event()
        self._turn = count()
        if self.rank == 0:
            membership.store.set("folder", tempfile.mkdtemp(prefix="shared-folder-"))
        self._folder = Path(membership.store.get("folder").decode())  # waits until rank 0 has set it

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        self._write(f"{self.rank}-{to}-{tag}", data)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        self._read(f"{source}-{self.rank}-{tag}", data)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        turn = next(self._turn)  # every member gets the same collectives in the same order
        if self.rank != root:
            self._read(f"{root}-{self.rank}-turn-{turn}", data)
            return
        for rank in range(self.size):
            if rank != root:
                self._write(f"{root}-{rank}-turn-{turn}", data)

    def abort(self) -> None:
        """Wake whoever waits: another member is gone, or the session is over."""
        self._ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Leave; the last one clears up, as others may still read."""
        (self._folder / f"closed-{self.rank}").touch()
        # Where two are the last, one may find less than all, as the other one clears up already.
        if all((self._folder / f"closed-{rank}").exists() for rank in range(self.size)):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, data: torch.Tensor) -> None:
        if self._ended.is_set():
            raise ConnectionAbortedError("the group has ended")
        data.numpy().tofile(self._folder / f"{name}.part")
        (self._folder / f"{name}.part").rename(self._folder / name)  # whoever finds it finds all of it

    def _read(self, name: str, data: torch.Tensor) -> None:
        path, deadline = self._folder / name, time.monotonic() + self.membership.timeout
        while not path.exists():
            if self._ended.wait(0.001):
                raise ConnectionAbortedError("the group has ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no message {name} within {self.membership.timeout} s")
        data.copy_(torch.from_file(str(path), size=data.numel(), dtype=torch.uint8))
        path.unlink()


if __name__ == "__main__":
    dr.distributed.register_data_channel("shared_folder", SharedFolder)
    with dr.init_master_worker(data_channel="shared_folder"):
        with dr.on(0, "cpu"):
            x = torch.arange(1000, device="remote")
        y = x.to(dr.place(1, "cpu"))  # from worker to worker; the bytes do not pass through this process
        print(f"{x.place} -> {y.place} by SharedFolder, sum {y.sum().item()}")
        try:
            dr.distributed.all_reduce([x, y])
        except dr.errors.NotSupportedError as error:
            print(f"what it lacks is refused: {str(error).partition(':')[0]}")
    started = time.monotonic()
    check_data_channel("shared_folder", sizes=(2,))
    print(f"the conformance suite passes, in {time.monotonic() - started:.1f} s")
