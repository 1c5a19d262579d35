"""What errors say, word for word: each names what it got, what was expected, and what to do."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from processes import ROOT, Child, StruckWhileWaiting, free_port, stopped


@pytest.fixture(scope="module", autouse=True)
def _two_nodes_with_two_simulated_gpus() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield
    dr.shutdown()


def plain(text: str) -> str:
    """Return an error's text without what differs between machines: host names, folders, process ids, line numbers."""
    text = text.replace(socket.gethostname(), "HOST")
    # A checkout's path may have blanks.
    text = re.sub(r"(?:[\w.-]*/)+([\w-]+\.py):\d+", r"\1:LINE", text.replace(str(ROOT), ""))
    text = re.sub(r"\bpid \d+", "pid PID", text)
    # Under xdist a program in a string calls pytest.
    text = re.sub(r"^  called from <string>:\d+\n(?:  \(\d+ calls in libraries\)\n)?", "", text, flags=re.M)
    return re.sub(r"[ \t]+$", "", text, flags=re.M)


def says(
    code: Callable[[], object], expected: str, kind: type[BaseException] = dr.DistruntimeError
) -> BaseException:
    """Hold that `code` raises a `kind` with this text."""
    with pytest.raises(kind) as caught:
        code()
    assert plain(str(caught.value)) == expected.strip("\n")
    return caught.value


def at(node: int, device: str = "cpu", *shape: int) -> Any:
    with dr.on(node, device):
        return torch.ones(shape or (3,))


# Where things are


def test_operands_on_different_nodes() -> None:
    x, y = at(0, "cuda:0", 3, 3), at(1, "cuda:0", 3, 3)
    says(
        lambda: x @ y,
        """
aten.mm.default: operands live on different nodes: `self` on node 0 cuda:0 (HOST), `mat2` on node 1 cuda:0 (HOST)
  move one of them, for instance mat2.to(self.device)      (copies 36 B from node 1 cuda:0 to node 0 cuda:0)
""",
        dr.errors.PlacementError,
    )


def test_operands_on_different_devices() -> None:
    says(
        lambda: torch.cat([at(0), at(0), at(0, "cuda:1")]),
        """
aten.cat.default: operands live on different devices: `tensors[0]` on node 0 cpu (HOST), `tensors[2]` on node 0 cuda:1 (HOST)
  move one of them, for instance tensors[2].to(tensors[0].device)      (copies 12 B from node 0 cuda:1 to node 0 cpu)
""",
        dr.errors.PlacementError,
    )


def test_a_local_tensor_among_the_operands() -> None:
    says(
        lambda: at(0) + torch.ones(3),
        """
aten.add.Tensor: `other` (3,) is a local tensor on cpu, the other operands live on node 0 cpu (HOST)
  send it there: other.to("remote:2")      or read the remote ones: dr.fetch(...)
""",
        dr.errors.PlacementError,
    )


def test_a_local_tensor_that_would_be_written() -> None:
    says(
        lambda: torch.zeros(()).add_(at(0).sum()),
        """
aten.add_.Tensor: `self` () is local and written by this call, the other operands live on node 0 cpu (HOST)
  send it there: self.to("remote:2")      or read the remote ones: dr.fetch(...)
""",
        dr.errors.PlacementError,
    )


def test_no_such_device() -> None:
    says(
        lambda: at(0).cuda(7),
        "node 0 (HOST) has no device 'cuda:7': it has cpu, cuda:0, cuda:1",
        dr.errors.PlacementError,
    )
    says(
        lambda: dr.on(1, "cuda:2"),
        "node 1 (HOST) has no device 'cuda:2': it has cpu, cuda:0, cuda:1",
        dr.errors.PlacementError,
    )


def test_no_such_node() -> None:
    says(lambda: dr.node(2), "there is no node 2: this session has nodes 0, 1", dr.errors.PlacementError)
    says(
        lambda: at(0).to(node=5), "there is no node 5: this session has nodes 0, 1", dr.errors.PlacementError
    )


# What a remote tensor cannot do


def test_pickling_a_tensor() -> None:
    says(
        lambda: pickle.dumps(at(1)),
        """
a tensor on node 1 cpu cannot be pickled: its values are on a worker. torch.save(state, path) fetches and saves it; elsewhere fetch it first: dr.fetch(state)
""",
        dr.errors.NotSupportedError,
    )


def test_pickling_a_closure_over_a_tensor() -> None:
    import cloudpickle

    x = at(0)
    says(
        lambda: cloudpickle.dumps(lambda: x + 1),
        """
a tensor on node 0 cpu cannot be pickled: its values are on a worker. torch.save(state, path) fetches and saves it; elsewhere fetch it first: dr.fetch(state)
""",
        dr.errors.NotSupportedError,
    )


def test_a_numpy_array_of_it() -> None:
    says(
        at(0).numpy,
        """
can't convert a tensor on node 0 cpu to numpy; fetch it first: x.detach().cpu().numpy(), or x.numpy(force=True)
""",
        TypeError,
    )


# What went wrong on a worker


def test_a_poisoned_value() -> None:
    x, index = at(1, "cuda:0"), torch.tensor([7])
    y = x[index] * 2
    says(
        y.cpu,
        """
index 7 is out of bounds for dimension 0 with size 3
  aten::index.Tensor on node 1 (HOST), operands: (3,) float32, (1,) int64
  issued at test_golden_errors.py:LINE   y = x[index] * 2
""",
        IndexError,
    )


def test_a_dead_worker() -> None:
    with Child(lose_a_worker) as child:
        lost = (
            "node 1 (HOST) (pid PID) exited: killed by signal 9 (SIGKILL). Lost with it: 2 tensors (16 B), made"
            " /          12 B by test_golden_errors.py:LINE   return torch.ones(shape or (3,)) (1 tensor)"
            " /           4 B by test_golden_errors.py:LINE   x.sum().item() (1 tensor)"
            " /   The session and its other nodes go on; dr.restart(1) puts a new worker there."
        )
        assert plain(child.expect("error")) == lost
        for _ in range(2):  # that the operands live on different nodes is not what matters
            assert plain(child.expect("mixed")) == lost
        child.finish()


def lose_a_worker() -> None:
    """The child: kill a worker, read what was on it."""
    torch.set_num_threads(1)
    dr.init_master_worker(world_size=2)
    x = at(1)
    x.sum().item()
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    try:
        x.sum().item()
    except dr.errors.NodeFailed as error:
        print("error", str(error).replace("\n", " / "))
    y = at(0)
    for mix in (lambda: x + y, lambda: y + x):
        try:
            mix()
        except (dr.errors.NodeFailed, dr.errors.PlacementError) as mixed:
            print("mixed", str(mixed).replace("\n", " / "))
    dr.shutdown()


# Sessions


def outlive_a_session() -> None:
    """The child: use tensors after their session, without one and within another."""
    torch.set_num_threads(1)
    try:
        torch.zeros(2, device=REMOTE)
    except RuntimeError as error:
        print("before", type(error).__name__, str(error).partition(",")[0])
    try:
        dr.factories.FloatTensor(2)
    except dr.errors.SessionClosed as error:
        print("none", error)
    dr.init_master_worker(world_size=1, quiet=True)
    x = torch.ones(3, device=REMOTE)
    dr.shutdown()
    for code in (
        lambda: x + 1,
        x.cpu,
        x.sum,
        lambda: x.add_(1),
        lambda: dr.fetch(x),
        lambda: x.to("cuda"),
        lambda: torch.zeros(3).copy_(x),
    ):
        try:
            code()
            print("no error")
        except dr.errors.SessionClosed as error:
            print("after", error)
    print("repr", repr(x))
    dr.init_master_worker(world_size=1, quiet=True)
    y = torch.ones(3, device=REMOTE)
    for code in (
        lambda: x + 1,
        lambda: x + y,
        lambda: y + x,
        lambda: y.copy_(x),
        x.cpu,
        lambda: torch.stack([y, x]),
    ):
        try:
            code()
            print("no error")
        except dr.errors.SessionClosed as error:
            print("older", error)
    assert y.sum().item() == 3
    dr.shutdown()
    dr.shutdown()


def test_tensors_of_sessions_that_have_ended() -> None:
    ended = "this session has ended (it was shut down); its tensors are gone. Call init_master_worker for a new one"
    with Child(outlive_a_session) as child:
        assert (
            child.expect("before") == "RuntimeError Expected one of cpu"
        )  # torch's own, which docs/limits.md explains
        assert child.expect("none") == "there is no session: call distruntime.init_master_worker() first"
        for _ in range(7):
            assert child.line() == f"after {ended}"
        assert child.line() == "repr <remote 3 float32, 12 B, node 0 cpu: its session has ended>"
        for _ in range(6):
            assert (
                child.line()
                == f"older {ended.partition(' Call ')[0]} Make them again in the session that is open"
            )
        child.finish()


def fork_with_a_session() -> None:
    """The child: fork, and use the parent's tensors in the grandchild."""
    torch.set_num_threads(1)
    dr.init_master_worker(world_size=1, quiet=True)
    x = torch.ones(3, device=REMOTE)
    assert x.sum().item() == 3
    pid = os.fork()
    if not pid:
        threading.Timer(30, os._exit, (9,)).start()
        for code in (lambda: x + 1, x.cpu, lambda: torch.zeros(3, device=REMOTE), dr.nodes):
            try:
                code()
                print("no error")
            except dr.errors.SessionClosed as error:
                print("forked", error)
        assert torch.ones(3).sum().item() == 3 and repr(x)
        del x
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (x + 1).sum().item() == 6
    print("parent goes on")
    dr.shutdown()


def test_a_forked_child() -> None:
    with Child(fork_with_a_session) as child:
        for _ in range(4):
            assert child.expect("forked") == (
                "remote tensors belong to the process that made them; this is a forked child of it. Fetch before you fork (dr.fetch), "
                "or call init_master_worker in the child"
            )
        child.expect("parent goes on")
        child.finish()


def test_initialising_twice_with_other_arguments() -> None:
    says(
        dr.init_master_worker,
        """
a session that was begun with other arguments is open: simulate_cuda: got 0, expected 2. Give the same arguments to get that session, or end it first: distruntime.shutdown()
""",
        dr.errors.UsageError,
    )


# Starting one: what is wrong is said before anything is started, within the deadline


def test_a_misspelt_argument() -> None:
    for code, text in (
        (
            lambda: dr.init_master_worker(sesion="day"),
            "init_master_worker() got an unexpected keyword argument 'sesion'. Did you mean 'session'?",
        ),  # type: ignore[call-arg]
        (
            lambda: dr.config(num_thread=2),
            "config() got an unexpected keyword argument 'num_thread'. Did you mean 'num_threads'?",
        ),  # type: ignore[call-arg]
        (
            lambda: dr.shutdown(timout=3),
            "shutdown() got an unexpected keyword argument 'timout'. Did you mean 'timeout'?",
        ),  # type: ignore[call-arg]
        (
            lambda: dr.names(ZZZ=3),
            "names() got an unexpected keyword argument 'ZZZ'. It has no arguments",
        ),  # type: ignore[call-arg]
        (
            lambda: dr.nn.MaxPool2d(),  # type: ignore[call-arg]
            "MaxPool2d() missing 2 required positional arguments: 'P' and 'kernel_size'. It takes P, kernel_size, stride, padding, dilation, return_indices, ceil_mode, overlap",
        ),
        (
            lambda: dr.from_shards([]),  # type: ignore[call-arg]
            "from_shards() missing 1 required positional argument: 'mesh'. It takes tensors, mesh",
        ),
    ):
        says(code, text, TypeError)


def test_a_misspelt_name() -> None:
    for code, text in (
        (lambda: dr.nodez, "module 'distruntime' has no attribute 'nodez'. Did you mean 'node'?"),
        (
            lambda: dr.status,
            "module 'distruntime' has no attribute 'status'. It is a command: python -m distruntime status",
        ),
        (lambda: dr.QQQ, "module 'distruntime' has no attribute 'QQQ'"),
    ):
        says(code, text, AttributeError)


@pytest.mark.parametrize("backend", ["tcp", "tcp+tls", "mpi", "gloo", "nccl"])
def test_a_backend_of_the_data_channel(backend: str) -> None:
    says(
        lambda: dr.init_master_worker(backend=backend),
        f"""
backend='{backend}' names a channel between workers; the command channel is always ZeroMQ: use backend="zmq", data_channel='{backend}'
""",
        dr.errors.ConfigurationError,
    )


def test_no_backend_at_all() -> None:
    says(
        lambda: dr.init_master_worker(backend="carrier pigeon"),
        """backend is "zmq", got 'carrier pigeon'; addresses of workers go into workers=["tcp://host:port", ...]""",
        dr.errors.ConfigurationError,
    )


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"workers": "tcp://a:1"}, "workers is a list of addresses, got one string: workers=['tcp://a:1']"),
        (
            {"workers": 1},
            'workers is a list of addresses, as ["tcp://gpubox:29400"], got 1: world_size= is the number of workers to start on this machine',
        ),
        ({"workers": [1]}, 'workers is a list of addresses, as ["tcp://gpubox:29400"], got [1]'),
        (
            {"workers": []},
            "workers is an empty list: name the daemons, or leave it out to start workers on this machine",
        ),
        ({"world_size": 0}, "world_size is a number of workers, at least 1, got 0"),
        (
            {"timeout": float("nan")},
            "timeout is a number of seconds above 0 (up to 1e9, some thirty years), got nan",
        ),
        ({"grace": 0}, "grace is a number of seconds above 0 (up to 1e9, some thirty years), got 0"),
        (
            {"keep": 60},
            "resume=, force= and keep= are about a session that has a name: give session= as well",
        ),
        (
            {"session": "a/b"},
            "a session's name is made of letters, digits, '.', '_' and '-', 100 at most, and begins with none of '.-'; got 'a/b'",
        ),
        (
            {"listen": "tcp://127.0.0.1:0"},
            "listen='tcp://127.0.0.1:0' needs world_size=: how many workers will dial in",
        ),
        (
            {"workers": ["tcp://a:1"], "world_size": 2},
            "world_size=2 but workers names 1: leave world_size out",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], text: str) -> None:
    says(lambda: dr.init_master_worker(**arguments), text, dr.errors.ConfigurationError)


def find_nobody(folder: str) -> None:
    """The child: dial an address where nothing listens, one where something else does, and wait for workers that never come."""
    free = free_port()
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    deaf.listen()
    for port in (free, deaf.getsockname()[1]):
        try:
            dr.init_master_worker(workers=[f"tcp://127.0.0.1:{port}"], timeout=1.0, insecure=True)
        except dr.errors.ConnectionFailed as error:
            print("error", str(error).replace(str(port), "PORT").replace("\n", " / "))
    try:
        dr.init_master_worker(listen="tcp://127.0.0.1:*", world_size=2, timeout=1.0, insecure=True)
    except dr.errors.ConnectionFailed as error:
        print("error", re.sub(r"(1[: ])\d{2,}", r"\1PORT", str(error)).replace("\n", " / "))
    assert not dr.is_initialized()
    deaf.close()


def test_nobody_answers(tmp_path: Path) -> None:
    with Child(find_nobody, str(tmp_path)) as child:
        for _ in range(2):
            assert child.expect("error") == (
                "nothing answers at tcp://127.0.0.1:PORT within 1 s: is the worker running there (distruntime-worker --listen tcp://127.0.0.1:PORT), and the port open? From here, this shows it: nc -vz 127.0.0.1 PORT"
            )
        assert child.expect("error") == (
            "2 of 2 workers did not dial tcp://127.0.0.1:PORT within 1 s: nodes 0, 1 are missing. "
            "Start each with distruntime-worker --master tcp://127.0.0.1:PORT. "
            "If it runs, this shows on its machine whether it gets here: nc -vz 127.0.0.1 PORT"
        )
        child.finish()


def test_no_text_shows_the_plumbing() -> None:
    """Users meet places and tensors, never the device that proxies claim in C++."""
    x = at(0)
    codes: list[Callable[[], object]] = [
        lambda: x @ x.new_ones(4, 4), lambda: x.view(7), lambda: x + torch.ones(3), lambda: torch.zeros(3, device="remote:120"),
        lambda: x.to_sparse(), lambda: torch.zeros(2, device=REMOTE, pin_memory=True), lambda: x.pin_memory(), lambda: x.numpy(), x.untyped_storage,
        lambda: torch.zeros(2, device=REMOTE, generator=torch.Generator()), lambda: torch.randn(2, device=REMOTE, generator=torch.Generator()),
        lambda: x.share_memory_(), lambda: x.__dlpack__(), lambda: torch.from_dlpack(x), lambda: x.type(torch.sparse_coo),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), lambda: torch.autocast(REMOTE, dtype=torch.int8), lambda: torch.as_tensor(x, device="meta").cpu(),
        lambda: torch.nested.nested_tensor([x, x]), lambda: torch.tensor(x.device).cpu(),
    ]  # fmt: skip
    texts = [
        repr(x),
        str(x.device),
        str(x.place),
        repr(dr.nodes()),
        x.type(),
        str(x.layout),
        str(type(x).__name__),
    ]
    for code in codes:
        try:
            code()
        except Exception as error:  # whichever: its text is looked at
            texts.append(str(error))
    assert [
        text for text in texts if re.search(r"(?i)\blazy\b|wrapper_?subclass|privateuse|_handle\b", text)
    ] == []


# Tracebacks: see also tests/session/test_tracebacks.py


def test_control_c_shows_the_line_that_waits_and_no_frame_of_ours() -> None:
    x = at(0)
    x.sum().item()
    with stopped(dr.nodes()[0].pid), pytest.raises(KeyboardInterrupt) as caught, StruckWhileWaiting():
        (x + 1).sum().item()
    frames = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == ["test_golden_errors.py"]
    assert (x + 1).sum().item() == 6
