"""Workers that run no Python of their masters: `--no-functions`, and those without a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

import distruntime as dr
from distruntime.python.pickling import unpickled
from distruntime.session.session import active_session
from distruntime.wire.keys import KeyPair
from processes import STARTING, ListeningWorker


class Leaves:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


class Kept(dr.distributed.DataChannel):
    """A data channel that no worker has."""

    capabilities = dr.distributed.Capabilities(frozenset({"send"}))

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        """Send nothing."""

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        """Receive nothing."""

    def abort(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


Start = Callable[..., ListeningWorker]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that listens; it ends with the test."""
    dr.shutdown()
    started: list[ListeningWorker] = []

    def start(*arguments: str) -> ListeningWorker:
        started.append(ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", *arguments))
        return started[-1]

    yield start
    dr.shutdown()
    for one in started:
        one.stop()


def refuses(text: str, path: Path) -> None:
    """Check that functions are refused, that nothing was unpickled there, and that operators go on."""
    with pytest.raises(dr.errors.NotSupportedError, match=text):
        dr.fetch(dr.remote(len)([1]))
    with pytest.raises(dr.errors.NotSupportedError, match=text):
        dr.fetch(dr.remote(len, returns=object)(Leaves(path)))
    thing = Leaves(path)
    with pytest.raises(dr.errors.NotSupportedError, match=text):
        dr.fetch(dr.remote(lambda: thing)())
    assert not path.exists()
    dr.distributed.register_data_channel("Kept", Kept)
    with pytest.raises(dr.DistruntimeError, match=text):
        dr.distributed.new_group([dr.place(0, "cpu"), dr.place(0, "cuda:0")], backend="Kept")
    assert torch.ones(2, device="remote").tolist() == [1.0, 1.0]


def test_a_worker_refuses_functions(worker: Start, tmp_path: Path) -> None:
    KeyPair.generate().save(tmp_path / "key")
    started = worker("--no-functions", "--simulate-cuda", "1", "--key", str(tmp_path / "key"))
    with dr.init_master_worker(workers=[started.address], key=tmp_path / "key", timeout=STARTING):
        refuses(r"[s]tarted with --no-functions: .* Start it without that option", tmp_path / "there")
        mesh, path = dr.init_device_mesh("cpu", (1,)), str(tmp_path)
        for use in (
            lambda: dr.spmd(mesh, lambda: 1)(),
            lambda: list(dr.data.data_loader([1, 2], node=0)),
            lambda: dr.RemoteModule(torch.nn.Linear, 2, 2, node=0),
            lambda: dr.load(path, node=0),
            lambda: dr.load(path, node=mesh),
        ):
            with pytest.raises(dr.errors.NotSupportedError, match=r"[s]tarted with --no-functions"):
                use()


def test_a_session_without_a_key_runs_no_function_and_opens_no_object(worker: Start, tmp_path: Path) -> None:
    started = worker("--insecure", "--simulate-cuda", "1")
    with dr.init_master_worker(workers=[started.address], insecure=True, timeout=STARTING):
        # An error quotes the line that has issued the call, and so would match its own pattern.
        refuses(r"[h]as no key, .*`distruntime-worker keygen`", tmp_path / "there")
        with pytest.raises(dr.errors.NotSupportedError, match=r"this session has no key, .* return tensors"):
            unpickled(memoryview(cloudpickle.dumps(Leaves(tmp_path / "here"))), [], active_session())
        assert not (tmp_path / "here").exists()


def test_local_workers_run_functions(session: object) -> None:
    assert dr.fetch(dr.remote(len)([1, 2])) == 2
