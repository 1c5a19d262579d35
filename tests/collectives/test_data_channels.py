"""Every data channel passes the suite that users are given; how one is found, and what is refused before
anything is sent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from apart import apart, listening
from distruntime.session.session import Session
from distruntime.testing import check_data_channel
from distruntime_worker.collectives.data_channel import find, names, torch_group
from distruntime_worker.collectives.data_channel.gloo import Gloo
from distruntime_worker.collectives.data_channel.relay import Relay
from distruntime_worker.collectives.data_channel.tcp import TCP
from distruntime_worker.collectives.data_channel.tls import TLS
from distruntime_worker.collectives.data_channel.torch_group import NCCL, XCCL
from distruntime_worker.collectives.listening import interface_of
from processes import ListeningWorker

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "08_own_channel.py"
PAGE = (ROOT / "docs" / "data_channel.md").read_text(encoding="utf-8")

Fresh = Callable[..., Any]


@pytest.fixture
def no_session() -> Iterator[None]:
    """Ends the session that is open, so that the suite starts one of its own."""
    dr.shutdown()
    yield
    dr.shutdown()


# The suite


_GLOO = pytest.param("gloo", marks=pytest.mark.slow(reason="each group of gloo takes a while: 12.7 s in all"))

_RELAY = pytest.param("relay", marks=pytest.mark.slow(reason="has every collective, as gloo: 14 s in all"))


@pytest.mark.parametrize("channel", [_GLOO, "tcp", "tcp+tls", _RELAY])
def test_a_shipped_channel_passes_the_suite(no_session: None, channel: str) -> None:
    check_data_channel(channel)


def test_mpi_passes_the_suite(no_session: None, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt install openmpi-bin, or mpich")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install mpi4py")
    # All three are Open MPI's, which is careful with machines that have few cores, and with root.
    leave = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "worker"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: the path of a socket is short
        command = [
            "mpirun",
            "-n",
            "3",
            sys.executable,
            "-m",
            "distruntime_worker",
            "--master",
            f"ipc://{folder}/master",
        ]
        with (tmp_path / "log").open("wb") as log:
            run = subprocess.Popen(
                command,
                env={**os.environ, **leave, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            with dr.init_master_worker(listen=f"ipc://{folder}/master", world_size=3, data_channel="mpi"):
                check_page("mpi", dr.distributed.new_group([0, 1, 2]).capabilities)
                check_data_channel("mpi")
        except dr.errors.ConnectionFailed:
            raise AssertionError((tmp_path / "log").read_text(encoding="utf-8")) from None
        finally:
            run.terminate()
            run.wait(30)


class Liar(dr.distributed.DataChannel):
    """Says that it sends, and does not."""

    capabilities = dr.distributed.Capabilities(frozenset({"send"}))

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        """Forget it."""

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        data.zero_()

    def abort(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class Stuck(Liar):
    """Its second member does not close."""

    def close(self) -> None:
        if self.rank:
            raise FileNotFoundError("the folder is gone")


def test_a_channel_that_does_not_close_costs_no_worker(fresh_session: Fresh) -> None:
    dr.distributed.register_data_channel("Stuck", Stuck)
    with fresh_session(data_channel="Stuck"):
        for _ in range(2):
            group = dr.distributed.new_group([0, 1])
            group.close()
            with pytest.raises(dr.errors.RemoteError, match=r"(?s)the folder is gone.*test_data_channels.py"):
                dr.synchronize()
        assert {node.state for node in dr.nodes()} <= {"ready", "busy"}


def test_the_suite_finds_a_channel_out(fresh_session: Fresh) -> None:
    dr.distributed.register_data_channel("Liar", Liar)
    with fresh_session(data_channel="Liar"):
        with pytest.raises(
            AssertionError,
            match=r"data channel 'Liar', 2 members, copy from rank 0 to 1 of \(5, 3\) .*is wrong",
        ):
            check_data_channel("Liar", sizes=(2,))
        with pytest.raises(
            dr.errors.UsageError, match="groups of 3 members are tried, and the session has 2 nodes"
        ):
            check_data_channel("Liar", sizes=(3,))
        with pytest.raises(dr.errors.UsageError, match="another data channel"):
            check_data_channel("gloo", sizes=(2,))
        with pytest.raises(dr.errors.UsageError, match="at least 2 each"):
            check_data_channel("gloo", sizes=(1,))


class Recorded(Liar):
    """gloo, and a reduction tells how many operations torch's flight recorder has of this process."""

    capabilities = Gloo.capabilities

    def __init__(self, membership: dr.distributed.Membership) -> None:
        super().__init__(membership)
        self._gloo = Gloo(membership)

    def all_reduce(self, data: torch.Tensor, op: dr.distributed.Reduction) -> None:
        self._gloo.all_reduce(data, op)
        recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        data.fill_(len(recorded.get("entries", [])))

    def abort(self) -> None:
        self._gloo.abort()


@pytest.mark.slow(reason="starts a program that imports torch, 4 s")
def test_torchs_flight_recorder_is_off_unless_it_is_asked_for(
    fresh_session: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch 2.11 it ends a process in which groups run their first operations side by side."""
    dr.distributed.register_data_channel("Recorded", Recorded)
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    for size, wanted in (("", [0.0]), ("1", [1.0])):
        if size:
            monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
        with fresh_session(data_channel="Recorded", world_size=2, simulate_cuda=2):
            mesh = dr.init_device_mesh("cuda", (4,))
            found = dr.lines.all_reduce(mesh.lines(), torch.ones(1, device=mesh.device))
            assert [shard.tolist() for shard in dr.shards(found)] == [wanted] * 4


# How one is found


@pytest.mark.slow(reason="starts a program that imports torch, 4 s")
def test_a_users_channel_in_an_installed_package_is_found(
    fresh_session: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "folder_channel.py")
    (tmp_path / "folder_channel-1.0.dist-info").mkdir()
    (tmp_path / "folder_channel-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: folder-channel\nVersion: 1.0\n", encoding="utf-8"
    )
    points = (
        "[distruntime.data_channels]\nfolder = folder_channel:SharedFolder\nnonsense = folder_channel:count\n"
    )
    (tmp_path / "folder_channel-1.0.dist-info" / "entry_points.txt").write_text(points, encoding="utf-8")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )
    with fresh_session(data_channel={"cpu": "folder"}):
        x = torch.arange(3.0, device="remote")  # the example itself passes the suite
        assert x.to(node=1).tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(
            dr.errors.ConfigurationError,
            match=r"node 0 .*'nonsense' must be a subclass of distruntime.distributed.DataChannel",
        ):
            dr.distributed.new_group([0, 1], backend="nonsense")


class Bare(Liar):
    capabilities = frozenset({"send"})  # type: ignore[assignment]


class Odd(Liar):
    capabilities = dr.distributed.Capabilities(frozenset({"send", "teleport"}))


@pytest.mark.parametrize(
    "name, factory, text",
    [
        ("auto", Liar, 'an identifier other than "auto"'),
        ("two words", Liar, "an identifier"),
        # Only names that distruntime itself gives need not be identifiers.
        ("tcp+tls", Liar, "an identifier"),
        ("mine", dict, "must be a subclass of distruntime.distributed.DataChannel, got <class 'dict'>"),
        ("mine", lambda membership: None, "must be a subclass"),
        ("mine", Bare, r"Bare.capabilities must be distruntime.distributed.Capabilities\(...\)"),
        ("mine", Odd, "Odd declares unknown operations: teleport"),
    ],
)
def test_what_is_no_data_channel_is_not_registered(name: str, factory: Any, text: str) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=text):
        dr.distributed.register_data_channel(name, factory)


def test_a_channel_that_a_worker_does_not_have(session: Session) -> None:
    with pytest.raises(
        dr.errors.ConfigurationError,
        match=r"node 0 .*no data channel 'pigeon' on this worker: it has gloo, tcp, tcp\+tls",
    ):
        dr.distributed.new_group([0, 1], backend="pigeon")
    with pytest.raises(
        dr.errors.ConfigurationError,
        match=r"'mpi' is not available on this worker: (mpi4py is not installed|it was not started)",
    ):
        dr.distributed.new_group([0, 1], backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(
            dr.errors.ConfigurationError,
            match=r"'nccl' is not available on this worker: (no CUDA device|.*without NCCL)",
        ):
            dr.distributed.new_group([0, 1], backend="nccl")


def test_without_cryptography_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cryptography" else spec(name)
    )
    with pytest.raises(
        dr.errors.ConfigurationError,
        match=r"'tcp\+tls' is not available .*: cryptography .* pip install cryptography",
    ):
        find("tcp+tls")
    assert "tcp+tls" not in names() and "tcp" in names()


# What is refused before anything is sent


def pair(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    tensors = []
    for node in (0, 1):
        with dr.on(node, "cpu"):
            tensors.append(torch.ones(4, dtype=dtype, device="remote"))
    return tensors


def test_what_a_channel_lacks_is_refused(session: Session) -> None:
    group = dr.distributed.new_group([0, 1], backend="tcp")
    with pytest.raises(
        dr.errors.NotSupportedError, match="'tcp' has no all_reduce, only send: make a group with another"
    ):
        dr.distributed.all_reduce(pair(), group=group)
    with pytest.raises(dr.errors.NotSupportedError, match="'tcp' has no barrier"):
        dr.distributed.barrier(group)
    group.close()


@pytest.mark.parametrize(
    "op, dtype, text",
    [
        (dr.distributed.premul_sum(0.5), torch.float32, "no ReduceOp.PREMUL_SUM, only AVG, BAND"),
        (dr.distributed.ReduceOp.SUM, torch.bool, "by SUM, not bool"),
        (dr.distributed.ReduceOp.SUM, torch.int16, "by SUM, not int16"),
        (dr.distributed.ReduceOp.AVG, torch.int32, "by AVG, not int32"),
        (dr.distributed.ReduceOp.BXOR, torch.float32, "by BXOR, not float32"),
    ],
)
def test_what_gloo_does_not_reduce_is_refused(
    session: Session, op: Any, dtype: torch.dtype, text: str
) -> None:
    with pytest.raises(dr.errors.NotSupportedError, match=text):
        dr.distributed.all_reduce(pair(dtype), op)


# Sockets


linux = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="who listens where is read in /proc, which is Linux's"
)


@linux
def test_on_one_machine_they_listen_on_loopback_only(session: Session) -> None:
    before = {node.index: listening(node.pid) for node in dr.nodes()}
    for backend in ("tcp", "tcp+tls", "gloo"):
        group = dr.distributed.new_group([0, 1], backend=backend)
        for node in dr.nodes():
            now = listening(node.pid)
            assert {host for host, _ in now} == {"127.0.0.1"}
            # What only workers of one machine need of each other, no other user of it reaches.
            assert bool(now - before[node.index]) == (backend == "gloo")
        group.close()


@linux
@pytest.mark.slow(reason="a thousand strangers, 7 s")
def test_tcp_goes_on_while_strangers_talk_to_it(fresh_session: Fresh, tmp_path: Path) -> None:
    with apart(fresh_session, tmp_path, "tcp"):
        before = listening(dr.nodes()[1].pid)
        x = torch.arange(1000, device="remote")
        x.to(dr.place(1, "cpu")).sum().item()
        strangers = []
        for host, port in listening(dr.nodes()[1].pid) - before:
            for noise in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10, bytes(36), b"\xff" * 36 + bytes(1000)):
                strangers.append(socket.create_connection((host, port), 10))
                strangers[-1].sendall(noise)
        assert strangers
        for _ in range(20):
            assert x.to(dr.place(1, "cpu")).sum().item() == 499500
        for stranger in strangers:
            stranger.close()


@linux
def test_nccl_is_bound_to_the_interface_that_workers_are_reached_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        interface_of("127.0.0.1") == interface_of("localhost") == "lo"
        and interface_of("192.0.2.1") == interface_of("no.such.host.") == ""
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    torch_group._bind("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    torch_group._bind("127.0.0.1")
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=lo"


def test_a_port_that_is_taken_is_said_at_the_first_group(fresh_session: Fresh, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    workers = []
    try:
        for name, address in (("one", f"127.0.0.1:{port}"), ("two", "127.0.0.1")):
            (tmp_path / name).mkdir()
            workers.append(
                ListeningWorker(tmp_path / name, "--listen", "tcp://127.0.0.1:0", "--data-address", address)
            )
        with fresh_session(workers=[worker.address for worker in workers]):
            values = pair()
            with pytest.raises(
                dr.errors.ConfigurationError,
                match=f"cannot listen at 127.0.0.1:{port} for other workers: Address .* --data-address",
            ):
                dr.distributed.all_reduce(values)
            assert values[0].tolist() == [1.0] * 4
            taken.close()
            dr.distributed.all_reduce(values)
            assert values[0].tolist() == [2.0] * 4
            assert ("127.0.0.1", port) in listening(dr.nodes()[0].pid)
    finally:
        taken.close()
        for worker in workers:
            worker.stop()


# The page

MARKED = {True: "yes", False: "no"}


def check_page(name: str, has: dr.distributed.Capabilities) -> None:
    """Fail unless the tables of docs/data_channel.md say what a channel declares."""
    collectives = has.operations - {"send"}
    row = [
        MARKED["send" in has.operations],
        "all" if len(collectives) == 9 else ", ".join(sorted(collectives)) or "none",
        ", ".join(sorted(has.devices)),
        MARKED[has.tags],
        MARKED[has.concurrent],
    ]
    assert f"| `{name}` | {' | '.join(row)} |" in PAGE
    rows = re.findall(rf"^\| `{re.escape(name)}` \| ([A-Z_, ]+) \| ([a-z0-9, ]+) \|$", PAGE, re.M)
    shown = {op: dtypes.split(", ") for ops, dtypes in rows for op in ops.split(", ")}
    assert shown == {op: sorted(str(d)[6:] for d in dtypes) for op, dtypes in has.reductions.items()}


@pytest.mark.parametrize(
    "name, channel",
    [
        ("gloo", Gloo),
        ("nccl", NCCL),
        ("xccl", XCCL),
        ("tcp", TCP),
        ("tcp+tls", TLS),
        ("relay", Relay),
    ],
)
def test_the_page_says_what_each_can_do(name: str, channel: type[dr.distributed.DataChannel]) -> None:
    # The page of mpi is checked above, since mpi may not be here.
    check_page(name, channel.capabilities)
