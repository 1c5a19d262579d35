"""`distruntime launch` on hosts that ssh reaches, through real sshds and for a second user.

For root, on Linux, with openssh-server.
"""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from launches import Launch
from processes import until
from sshd import Account, unavailable

_WHY = unavailable()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)

# It computes on both hosts, says where they are, and waits to be ended.
SCRIPT = """
import signal
import torch
import distruntime as dr

with dr.init_master_worker(quiet=True):
    nodes = dr.nodes()
    x = torch.ones(3, device=dr.place(0)).to(dr.place(1))
    print([node.address for node in nodes], x.place, x.sum().item())
    print(*[node.pid for node in nodes])
    print("waiting", flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    """Gives a user, and two names of hosts that both lead to this machine."""
    with Account() as made:
        for name in ("gpu1", "gpu2"):
            made.ready_machine(name)
        yield made


def launch(account: Account, folder: Path, *options: str) -> Launch:
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    path = f"{account.bin}{os.pathsep}{os.environ['PATH']}"
    return Launch(folder, *options, "train.py", PATH=path, DISTRUNTIME_KEY=str(folder / "key"))


def until_nothing_is_left(account: Account, launched: Launch) -> None:
    launched.until_nothing_is_left()
    until(lambda: not account.processes(), 30.0)
    assert account.left() == []


def test_a_script_computes_on_two_hosts_and_ctrl_c_ends_all(account: Account, tmp_path: Path) -> None:
    with launch(account, tmp_path, "--hosts", "gpu1,gpu2") as launched:
        launched.until_said("waiting")
        where, pids, _ = launched.out.splitlines()
        assert where == "['ssh://gpu1', 'ssh://gpu2'] node 1 cpu 3.0"
        first, second = pids.split()
        assert first != second
        for pid in (first, second):
            assert Path(f"/proc/{pid}").stat().st_uid == account.uid
        os.kill(launched.process.pid, signal.SIGINT)
        assert launched.ended() == 128 + signal.SIGINT, launched.said()
        assert "KeyboardInterrupt" in launched.err
        until_nothing_is_left(account, launched)


def test_kill_9_of_a_launch_leaves_no_process_on_its_hosts(account: Account, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1 slots=1\ngpu2\n", encoding="utf-8")
    with launch(account, tmp_path, "--hostfile", "hosts") as launched:
        launched.until_said("waiting")
        assert account.processes()
        os.kill(launched.process.pid, signal.SIGKILL)
        until_nothing_is_left(account, launched)
