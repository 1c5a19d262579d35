"""Where a disk, descriptors, memory or processes are used up: nothing that was promised is lost, the error
names what was full and where, and the session goes on. docs/tables/sessions.md has the table.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import control_groups
import distruntime as dr
import small_disks
from distruntime.wire.keys import KeyPair
from distruntime_worker import nursery as worker_nursery
from processes import PATH, Child, ListeningWorker, free_port, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are set on Linux only"),
    pytest.mark.timeout(180),
]
_WHY = small_disks.unavailable()
needs_disks = pytest.mark.skipif(bool(_WHY), reason=_WHY)


def said(what: str, act: Callable[[], object]) -> None:
    """Print what comes of something, in one line."""
    try:
        words = f"fine: {act()}"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    print(what, json.dumps(words))


def check(child: Child | Iterator[str], what: str, words: str) -> None:
    """Read on until something was said, and compare it."""
    if isinstance(child, Child):
        line = child.expect(f"{what} ")
    else:
        line = next(one for one in child if one.startswith(f"{what} ")).removeprefix(f"{what} ")
    told = json.loads(line)
    assert re.search(words, told, re.DOTALL), told


def with_mounts(function: Callable[..., None], *args: object) -> Iterator[str]:
    """Run a function of this module where it may mount; return the lines that it has printed."""
    source = f"import {Path(__file__).stem} as module\nmodule.{function.__name__}(*{args!r})\n"
    paths = [*PATH, str(Path(__file__).parent)]
    done = subprocess.run(
        [*small_disks.COMMAND, sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=150,
        check=True,
    )
    return iter(done.stdout.splitlines())


def works(node: int = 0) -> bool:
    return bool((torch.ones(3, device=dr.place(node, "cpu")) + 1).sum().item() == 6.0)


def limited(pid: int, what: int, value: int) -> int:
    """Set a process's limit; return what it was."""
    before, hard = resource.prlimit(pid, what)  # type: ignore[attr-defined]
    resource.prlimit(pid, what, (value, hard))  # type: ignore[attr-defined]
    return int(before)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# A full disk


def full_disk(name: str) -> None:
    """The child: everything that writes, on a disk that is full and then is not."""
    disk = Path(name)
    small_disks.mount(disk)
    package = disk.parent / "scarce_package"
    package.mkdir()
    (package / "__init__.py").write_text("here = 1\n", encoding="utf-8")
    (package / "data.bin").write_bytes(os.urandom(200_000))
    sys.path.insert(0, str(disk.parent))
    os.environ |= {
        "TMPDIR": name,
        "DISTRUNTIME_STATE": f"{name}/state",
        "DISTRUNTIME_SIGNING_KEY": f"{name}/signing",
    }
    dr.init_master_worker(world_size=1, quiet=True)
    x = torch.ones(100_000, device="remote")
    dr.save({"x": x}, disk / "saved")
    acts: dict[str, Callable[[], object]] = {
        "save": lambda: dr.save({"x": x * 2}, disk / "saved"),
        "load": lambda: dr.load(disk / "saved")["x"].sum().item(),
        "ship": lambda: dr.workers.ship("scarce_package"),
        "publish": lambda: dr.publish("model", torch.nn.Linear(3, 3).to("remote")),
        "print": lambda: float(dr.remote(noisy)(x[:1])),
        "works": works,
    }
    small_disks.fill(disk)
    for what, act in acts.items():
        said(f"full {what}", act)
    small_disks.empty(disk)
    for what, act in acts.items():
        said(f"again {what}", act)
    dr.shutdown()
    # The last process of the session removes what it had there: a nursery that is idle ends after a minute.
    until(lambda: not [*disk.glob("distruntime-*")], 100)
    small_disks.fill(disk)
    said("named", lambda: dr.init_master_worker(world_size=1, quiet=True, session="scarce").shutdown())


def noisy(x: Tensor) -> Tensor:
    for _ in range(200):
        print("noise", end=" ")
    return x + 1


@needs_disks
@pytest.mark.slow(reason="a master in a process of its own, and three sessions: 5 s")
def test_a_full_disk_costs_nothing_but_what_was_to_be_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    full = rf"No space left on device: \d+ bytes were to be written, 0 are free there.*{disk}"
    child = with_mounts(full_disk, str(disk))
    check(child, "full save", rf"OSError: the checkpoint in {disk}/saved was not written; what was there")
    check(child, "full load", "fine: 100000.0")
    check(child, "full ship", f"OSError.*{full}.*node 0")
    check(child, "full publish", rf"ConfigurationError: the signing key.*{disk}/signing: No space left")
    check(child, "full print", "fine: 2.0")
    check(child, "full works", "fine: True")
    for what in ("save", "load", "ship", "publish", "print", "works"):
        check(child, f"again {what}", "fine: 200000.0" if what == "load" else "fine")
    check(child, "named", rf"ConfigurationError: the session 'scarce' cannot be noted in {disk}/state")


def full_cache(name: str) -> None:
    """The child: Inductor keeps its work on a disk that is full."""
    small_disks.mount(Path(name))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{name}/cache"
    small_disks.fill(Path(name))
    dr.init_master_worker(world_size=1, quiet=True)
    program = dr.program(waves, compile="inductor")
    x = torch.ones(8, 8, device="remote")
    for _ in range(4):
        program(x)
    until(lambda: program.compiled not in ("", "compiling"), 100)
    said("compiled", lambda: program.compiled)
    said("right", lambda: torch.allclose(program(x).cpu(), waves(torch.ones(8, 8))))
    dr.shutdown()


def waves(x: Tensor) -> Tensor:
    return ((torch.sin(x) * 2 + torch.cos(x)) * 3).exp() - 1


@needs_disks
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor takes a C++ compiler")
@pytest.mark.slow(reason="Inductor is imported, and compiles until its disk is full: 6 s")
def test_a_full_disk_of_inductors_is_named_and_the_program_runs(tmp_path: Path) -> None:
    child = with_mounts(full_cache, str(tmp_path))
    check(child, "compiled", rf"cannot compile.*No space left on device \({tmp_path}/cache, 0 bytes free")
    check(child, "right", "fine: True")


def full_shared_memory() -> None:
    """The child: members of a mesh, whose tensors go through /dev/shm."""
    shared = Path("/dev/shm")
    small_disks.mount(shared, 1 << 20)
    small_disks.fill(shared)
    dr.init_master_worker(world_size=2, quiet=True)
    large = torch.ones(1_000_000)
    mesh = dr.init_device_mesh("cpu", (2,))
    function = dr.spmd(mesh)(one_more)
    said("spmd", lambda: function(torch.ones(3, device=mesh.device)).cpu())
    said("upload", lambda: large.to("remote").sum().item())
    said("download", lambda: (torch.ones(1_000_000, device="remote") + 1).cpu().sum().item())
    said("left", lambda: [*shared.glob("torch_*")])
    small_disks.empty(shared)
    said("again", lambda: function(torch.ones(3, device=mesh.device)).cpu())
    dr.shutdown()


def one_more(x: Tensor) -> Tensor:
    return x + 1


@needs_disks
@pytest.mark.slow(reason="starts processes of dr.spmd: 5 s")
def test_shared_memory_that_is_full_is_named_and_costs_a_call_of_spmd() -> None:
    child = with_mounts(full_shared_memory)
    check(child, "spmd", r"/dev/shm of this worker is full: 12 bytes.*0 of 1,048,576 are free.*--shm-size")
    check(child, "upload", "fine: 1000000.0")
    check(child, "download", "fine: 2000000.0")
    # torch itself leaves a file there.
    check(child, "left", r"fine: \[\]")
    check(child, "again", r"fine: tensor\(\[2., 2., 2.\]\)")


# No descriptors


def worker_without_descriptors(folder: str) -> None:
    dr.init_master_worker(world_size=2, quiet=True)
    pid = dr.nodes()[0].pid
    mesh = dr.init_device_mesh("cpu", (2,))
    function = dr.spmd(mesh)(one_more)
    x = torch.ones(3, device=dr.place(0, "cpu"))
    works()
    acts: dict[str, Callable[[], object]] = {
        "group": lambda: dr.distributed.new_group([0, 1]),
        "save": lambda: dr.save({"x": x}, f"{folder}/saved"),
        "spmd": lambda: function(torch.ones(3, device=mesh.device)).cpu(),
        "upload": lambda: torch.ones(3_000_000).to("remote").sum().item(),
        "works": works,
    }
    before = limited(pid, resource.RLIMIT_NOFILE, open_files(pid))
    for what, act in acts.items():
        said(f"none {what}", act)
    limited(pid, resource.RLIMIT_NOFILE, before)
    for what, act in acts.items():
        said(f"again {what}", act)
    dr.shutdown()


@pytest.mark.slow(reason="starts processes of dr.spmd: 5 s")
def test_a_worker_without_descriptors_goes_on(tmp_path: Path) -> None:
    with Child(worker_without_descriptors, str(tmp_path)) as child:
        check(child, "none group", r"node 0 .*(Too many open files|file descriptors left)")
        check(child, "none save", r"Too many open files.*saved.*no file descriptor left of \d+.*ulimit -n")
        check(child, "none spmd", r"\d+ file descriptors left of \d+.*for the store of dr.spmd.*ulimit -n")
        check(child, "none upload", "fine: 3000000.0")
        for what in ("works", "again group", "again save", "again spmd", "again works"):
            check(child, what if what.startswith("again") else f"none {what}", "fine")


def test_a_daemon_without_descriptors_refuses_a_group_and_keeps_its_sessions(
    own_state: None, tmp_path: Path
) -> None:
    KeyPair.generate().save(tmp_path / "key")
    with ExitStack() as stack:
        daemons = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            # It listens at all addresses, so it looks at which of them its master has reached it.
            words = ("--listen", f"tcp://0.0.0.0:{free_port()}", "--key", str(tmp_path / "key"))
            daemons.append(ListeningWorker(tmp_path / name, *words, "--threads", "1"))
            stack.callback(daemons[-1].process.wait)
            stack.callback(daemons[-1].process.kill)
        where = [daemon.address.replace("0.0.0.0", "127.0.0.1") for daemon in daemons]
        dr.init_master_worker(workers=where, key=tmp_path / "key", quiet=True)
        kept, pid = torch.ones(3, device=dr.place(0, "cpu")), daemons[0].process.pid
        dr.distributed.new_group([0, 1]).close()
        before = limited(pid, resource.RLIMIT_NOFILE, open_files(pid))
        with pytest.raises(dr.errors.ConfigurationError, match=r"node 0 .*descriptors? left of \d+"):
            dr.distributed.new_group([0, 1])
        assert works() and works(1)
        limited(pid, resource.RLIMIT_NOFILE, before)
        dr.distributed.all_reduce([kept, kept.to(dr.place(1, "cpu"))])
        assert kept.sum().item() == 6.0
        dr.shutdown()


def master_without_descriptors() -> None:
    dr.init_master_worker(world_size=2, quiet=True)
    kept = torch.ones(3_000_000, device="remote")
    works(), works(1)
    os.kill(dr.nodes()[1].pid, 9)
    said("lost", lambda: works(1))
    # A public name is imported when it is first used.
    restart = dr.restart
    before = limited(os.getpid(), resource.RLIMIT_NOFILE, open_files(os.getpid()))
    said("download", lambda: kept.cpu().sum().item())
    said("restart", lambda: restart(1))
    said("works", works)
    limited(os.getpid(), resource.RLIMIT_NOFILE, before)
    said("again", lambda: dr.restart(1))
    said("there", lambda: works(1))
    dr.shutdown()


def test_a_master_without_descriptors_reads_and_says_why_no_worker_starts() -> None:
    with Child(master_without_descriptors) as child:
        check(child, "lost", "NodeFailed: node 1 .*SIGKILL")
        check(child, "download", "fine: 3000000.0")
        check(child, "restart", r"no worker can be started for node 1: .*no file descriptor left of \d+")
        check(child, "works", "fine: True")
        check(child, "again", "fine")
        check(child, "there", "fine: True")


# No memory, no processes


def master_without_memory() -> None:
    dr.init_master_worker(world_size=1, quiet=True)
    large, small = torch.ones(128 << 20, device="remote"), torch.ones(1 << 20, device="remote")
    works()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limited(os.getpid(), resource.RLIMIT_AS, pages * resource.getpagesize() + (256 << 20))
    said("large", lambda: large.cpu())
    said("small", lambda: small.cpu().sum().item())
    said("part", lambda: large[:1000].cpu().sum().item())
    said("works", works)
    dr.shutdown()


def test_a_master_with_256_mib_reads_what_fits() -> None:
    with Child(master_without_memory) as child:
        check(child, "large", r"MemoryError: no room here for the 536,870,912 bytes of a tensor of node 0")
        check(child, "small", "fine: 1048576.0")
        check(child, "part", "fine: 1000.0")
        check(child, "works", "fine: True")


_NO_GROUPS = control_groups.unavailable()
needs_groups = pytest.mark.skipif(bool(_NO_GROUPS), reason=_NO_GROUPS)


def eats(x: Tensor) -> Tensor:
    """Take more memory than the group has."""
    return x + torch.ones(100 << 20).sum()


def eats_alone(x: Tensor, group: str) -> Tensor:
    if torch.distributed.get_rank() == 1:
        Path(group).write_text(str(os.getpid()), encoding="ascii")
        return eats(x)
    return x


@needs_groups
@pytest.mark.slow(reason="starts processes of dr.spmd: 3 s")
def test_the_kernel_kills_a_worker_and_a_rank_that_take_too_much(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    with control_groups.memory(200 << 20) as group:
        mesh = dr.init_device_mesh("cpu", (2,))
        alone, more = dr.spmd(mesh)(eats_alone), dr.spmd(mesh)(one_more)
        x = torch.ones(3, device=mesh.device)
        with pytest.raises(RuntimeError, match=r"rank 1 on node 1 was ended by SIGKILL in .*eats_alone"):
            alone(x, str(group)).cpu()
        assert more(x).cpu().tolist() == [2.0] * 3 and works()
        group.write_text(str(dr.nodes()[1].pid), encoding="ascii")
        with pytest.raises(dr.errors.NodeFailed, match=r"node 1 .*SIGKILL.*by the kernel.*no memory left"):
            with dr.on(1):
                torch.ones(100 << 20, device="remote").sum().item()
        assert works()
        dr.restart(1)
        assert works(1)


@needs_groups
def test_a_daemon_without_a_thread_for_a_session_says_so_and_keeps_what_it_has(
    own_state: None, tmp_path: Path
) -> None:
    KeyPair.generate().save(tmp_path / "key")
    daemon = ListeningWorker(
        tmp_path, "--listen", "tcp://127.0.0.1:0", "--key", str(tmp_path / "key"), "--threads", "1"
    )
    try:
        begin = partial(
            dr.init_master_worker,
            workers=[daemon.address],
            key=tmp_path / "key",
            session="kept",
            resume="auto",
            keep=60,
            quiet=True,
        )
        begin()
        dr.publish("x", torch.ones(3, device="remote"))
        dr.detach()
        with control_groups.threads() as group:
            (group / "cgroup.procs").write_text(str(daemon.process.pid), encoding="ascii")
            with pytest.raises(dr.errors.ConnectionFailed, match=r"start one more \(session\).*pids.max"):
                begin(timeout=20)
            (group / "pids.max").write_text("max", encoding="ascii")
            begin()
            assert dr.lookup("x").sum().item() == 3.0
            dr.shutdown()
    finally:
        daemon.process.kill()
        daemon.process.wait()


def test_a_nursery_that_cannot_fork_says_so_in_the_workers_log_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_fork)
    monkeypatch.setattr(worker_nursery, "_may_fork", lambda: True)
    monkeypatch.setattr(worker_nursery.signal, "set_wakeup_fd", lambda *_, **__: -1)
    monkeypatch.setattr(worker_nursery.signal, "signal", lambda *_: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        nursery = worker_nursery.Nursery(theirs, os.getpid())
        for number in (1, 2):
            log = os.open(tmp_path / "worker-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            given = [os.open(os.devnull, os.O_RDONLY), log]
            assert not nursery._start(worker_nursery.Request(number=number, descriptors=given))
            assert json.loads(ours.recv(1000)) == [number, 0, 71]
        for end in (nursery._woken, nursery._wake):
            end.close()
    text = (tmp_path / "worker-0.log").read_text(encoding="utf-8")
    assert text.count("cannot fork: this process") == 2 and "ulimit -u" in text
