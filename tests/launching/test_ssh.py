"""Workers that ssh reaches, through a real sshd and for a second user.

For root, on Linux, with openssh-server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.__main__ import main
from distruntime.launching.ssh import SshWorker
from distruntime.launching.ssh_connection import Broken, SshConnection
from distruntime.session.session import active_session
from distruntime.version import __version__
from distruntime.wire import scratch
from distruntime.wire.keys import KeyPair
from processes import STARTING, Child, ListeningWorker, until
from sshd import Account, Islands, Machine, packages, unavailable

_WHY = unavailable()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    with Account() as made:
        yield made


@pytest.fixture(scope="module")
def box(account: Account) -> Machine:
    return account.machine("gpubox")


@pytest.fixture(autouse=True)
def clean(account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Puts the client with the test's own config first, and looks afterwards that nothing is left."""
    dr.shutdown()
    monkeypatch.setenv("PATH", f"{account.bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DISTRUNTIME_KEY", str(tmp_path / "key"))
    before = own_folders()
    yield
    dr.shutdown()
    until(lambda: not account.processes(), 30)
    assert account.left() == []
    assert own_folders() <= before


def own_folders() -> set[Path]:
    """Return the folders for sockets that this process owns."""
    return {
        path for path in Path(tempfile.gettempdir()).glob("distruntime-session-*") if path in scratch._held
    }


def begin(*addresses: str, **arguments: object) -> dr.types.Session:
    return dr.init_master_worker(workers=list(addresses), timeout=STARTING, **arguments)  # type: ignore[arg-type]


def worker(number: int = 0) -> SshWorker:
    found = active_session().workers[number]
    assert isinstance(found, SshWorker)
    return found


def ssh_process(number: int = 0) -> int:
    until(lambda: worker(number)._connection is not None and worker(number).step == "running")
    connection = worker(number)._connection
    assert connection is not None
    return connection.process.pid


# -- one line --------------------------------------------------------------------------------------


def test_one_line_leads_to_a_result_and_no_command_line_has_the_key(
    account: Account, box: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(box.address(threads="1"), quiet=False) as session:
        assert torch.arange(5.0, device="remote").sum().item() == 10.0
        (node,) = dr.nodes()
        assert node.address == box.address(threads="1")
        assert Path(f"/proc/{node.pid}").stat().st_uid == account.uid
        key = worker()._keys.secret
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                assert not entry.name.isdigit() or key not in (entry / "cmdline").read_bytes()
        for path in account.left():
            for file in [path, *path.rglob("*")]:
                assert not file.is_file() or key not in file.read_bytes()
        assert "ssh://gpubox" in repr(session.nodes)
        assert "listening on tcp://127.0.0.1:" in worker().last_lines()
    assert "connecting 1 worker" in capsys.readouterr().out


def test_options_reach_a_worker_behind_a_jump_host(account: Account, box: Machine) -> None:
    behind = account.machine("behind")
    with account.config.open("a", encoding="utf-8") as file:
        file.write(" ProxyJump gpubox\n")
    with begin(behind.address(simulate_cuda="2", devices="cuda:0", max_memory="64MiB")):
        (node,) = dr.nodes()
        assert [device.name for device in node.devices] == ["cuda:0"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1 << 26, device="remote").sum().item()


def test_it_stands_beside_other_addresses(box: Machine, tmp_path: Path) -> None:
    daemon = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        with begin(daemon.address, box.address()):
            far = torch.arange(4.0, device=dr.place(0, "cpu")).to(dr.place(1, "cpu"))
            assert (far + 1).sum().item() == 10.0
            back = far.to(dr.place(0, "cpu"))
            assert back.tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        daemon.stop()


# -- ports that are closed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def islands(account: Account) -> Iterator[list[Machine]]:
    why = Islands.unavailable()
    if why:
        pytest.skip(why)
    with Islands() as made:
        yield [account.machine(f"island{k}", made.names[k], made.hosts[k]) for k in range(2)]


def test_copies_and_collectives_go_through_ssh_where_ports_are_closed(
    islands: list[Machine], caplog: pytest.LogCaptureFixture
) -> None:
    with begin(*[machine.address() for machine in islands]):
        one, two = dr.place(0, "cpu"), dr.place(1, "cpu")
        torch.manual_seed(1)
        local = torch.randn(1 << 20)
        far = local.to(one).to(two)
        assert torch.equal(far.cpu(), local)
        assert torch.equal((far * 2).to(one).cpu(), local * 2)
        a, b = torch.full((1000,), 1.0, device=one), torch.full((1000,), 2.0, device=two)
        dr.distributed.all_reduce([a, b])
        assert a.eq(3).all().item() and b.eq(3).all().item()
        stream = dr.Stream(two)
        with dr.stream(stream):
            done = stream.record_event()
        done.wait(dr.current_stream(one))
        assert torch.ones(2, device=one).sum().item() == 2.0
        with pytest.raises(
            dr.errors.ConnectionFailed, match=r"'gloo' needs a direct route between .*ssh and this"
        ):
            dr.distributed.new_group([0, 1], backend="gloo")
        mesh = dr.init_device_mesh("cpu", (2,))
        with pytest.raises(dr.errors.ConnectionFailed, match=r"dr.spmd needs a direct route"):
            dr.spmd(mesh)(lambda: 1)()
        x = torch.ones(2, device=mesh.device)
        assert dr.lines.all_reduce(mesh.lines(), x).cpu is not None
    assert "tensors between them take that way" in caplog.text


def test_a_route_that_is_missing_is_named(
    islands: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeyPair.generate().save(tmp_path / "key")
    daemon = ListeningWorker(
        tmp_path,
        *("--listen", f"tcp://{islands[0].host}:0", "--key", str(tmp_path / "key")),
        under=("ip", "netns", "exec", islands[0].namespace),
    )
    try:
        with begin(daemon.address, islands[1].address()):
            x = torch.ones(2, device=dr.place(0, "cpu"))
            with pytest.raises(
                dr.errors.ConnectionFailed, match=r"there is no route from node 0 .*to node 1 .*as well"
            ):
                x.to(dr.place(1, "cpu"))
    finally:
        daemon.stop()


def test_a_killed_ssh_costs_nothing(islands: list[Machine]) -> None:
    with begin(*[machine.address() for machine in islands]):
        one, two = dr.place(0, "cpu"), dr.place(1, "cpu")
        total = torch.zeros((), dtype=torch.int64, device=one)
        expected = 0
        for k in range(60):
            if k in (10, 30):
                os.kill(ssh_process(k // 30), signal.SIGKILL)
            # A step that ran twice, or never, would show in the sum.
            total += torch.tensor(k, device=two).to(one)
            expected += k
            if k % 10 == 9:
                assert total.item() == expected
        assert total.item() == expected
        assert worker(0)._connections == 2 and worker(1)._connections == 2
        assert {node.state for node in dr.nodes()} <= {"ready", "busy"}


# -- endings ---------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_lost_and_another_one_takes_its_place(account: Account, box: Machine) -> None:
    with begin(box.address()):
        x = torch.ones(2, device="remote")
        assert x.sum().item() == 2.0
        os.kill(worker().pid, signal.SIGKILL)
        with pytest.raises(dr.errors.NodeFailed, match=r"killed by signal 9 \(SIGKILL\)"):
            for _ in range(1000):
                (x + 1).sum().item()
        dr.restart(0, timeout=STARTING)
        assert torch.ones(3, device="remote").sum().item() == 3.0


def dying_master(address: str) -> None:
    """The child: begin a session, and wait to be killed."""
    dr.init_master_worker(workers=[address], timeout=STARTING)
    print(torch.ones(2, device="remote").sum().item(), flush=True)
    signal.pause()


def test_nothing_is_left_of_a_master_that_was_killed(account: Account, box: Machine) -> None:
    with Child(dying_master, box.address()) as child:
        assert child.line(STARTING) == "2.0"
        assert account.processes()
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: not account.processes())


def test_a_named_session_is_found_again(
    account: Account, box: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_it(**arguments: object) -> dr.types.Session:
        return begin(box.address(), session="day", **arguments)

    open_it(resume="auto")
    dr.publish("x", torch.arange(3.0, device="remote"))
    pid = dr.nodes()[0].pid
    dr.detach()
    with pytest.raises(dr.errors.ConnectionFailed, match="there is a session 'day' already"):
        open_it()
    open_it(resume="auto")
    assert dr.nodes()[0].pid == pid
    assert dr.lookup("x").tolist() == [0.0, 1.0, 2.0]
    dr.detach()
    assert main(["sessions"]) == 0 and "reached by ssh" in capsys.readouterr().out
    assert main(["sessions", "--end", "day"]) == 0 and "has ended, on 1 node" in capsys.readouterr().out
    until(lambda: not account.processes())
    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"ssh://gpubox: it has no worker of this session any more"
    ):
        open_it(resume=True)


# -- what does not work ----------------------------------------------------------------------------


def fails(address: str, kind: type[Exception], text: str, **arguments: object) -> None:
    """Expect one line, in the user's own line."""
    with pytest.raises(kind, match=text) as caught:
        begin(address, **arguments)
    assert "\n" not in str(caught.value), str(caught.value)
    assert caught.traceback[-1].path == Path(__file__)


def test_a_host_that_is_not_there(account: Account) -> None:
    fails(
        "ssh://no.such.host.invalid",
        dr.errors.ConnectionFailed,
        "ssh knows no host 'no.such.host.invalid'.*~/.ssh",
    )
    with account.config.open("a", encoding="utf-8") as file:
        file.write("Host closed\n HostName 127.0.0.1\n Port 9\n")
    fails(
        "ssh://closed", dr.errors.ConnectionFailed, "ssh://closed: nobody accepts ssh there.*Is sshd running"
    )


def test_a_host_key_that_is_unknown_or_has_changed(account: Account, box: Machine) -> None:
    with account.config.open("a", encoding="utf-8") as file:
        for name, known in (("unknown", "none_known"), ("changed", "other_known")):
            file.write(
                f"Host {name}\n HostName 127.0.0.1\n Port {box.port}\n User nobody\n"
                f' UserKnownHostsFile "{account.folder}/{known}"\n GlobalKnownHostsFile none\n'
            )
    (account.folder / "other_known").write_text(
        f"[127.0.0.1]:{box.port} {(account.folder / 'key.pub').read_text(encoding='utf-8')}", encoding="utf-8"
    )
    fails(
        "ssh://unknown",
        dr.errors.ConnectionFailed,
        "host key is not known here. Run `ssh unknown` once by hand",
    )
    fails("ssh://changed", dr.errors.ConnectionFailed, "host key has changed.*ssh-keygen -R")


def test_a_user_who_is_not_let_in(account: Account, box: Machine) -> None:
    fails(
        "ssh://root@gpubox",
        dr.errors.ConnectionFailed,
        "ssh was not let in.*ssh-copy-id root@gpubox.*ssh-add",
    )


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fails("ssh://gpubox", dr.errors.ConfigurationError, "no program ssh.*openssh-client")


def _pythons(account: Account) -> dict[str, tuple[str, str]]:
    torch_there = str(account.package("torch", torch.__version__))
    old = account.program("old", """echo 'distruntime> {"executable": "/old", "version": [3, 8, 1]}'""")
    return {
        "absent": (str(account.folder / "absent"), "there is no Python at .*absent.*Install Python 3.10"),
        "old": (str(old), r"Python 3.8.1 at /old is too old, expected 3.10 or newer.*\?python="),
        "without torch": (str(account.python("bare", [])), r"has no torch, expected 2.11 to .*\?setup=auto"),
        "old torch": (
            str(account.python("old_torch", [str(account.package("torch", "2.1.0"))])),
            r"has torch 2.1.0, expected 2.11 to .*\?setup=auto",
        ),
        "without distruntime": (
            str(account.python("only_torch", [torch_there])),
            r"has torch and no distruntime. Install it there, .*\?setup=auto",
        ),
        "other distruntime": (
            str(
                account.python(
                    "other",
                    [
                        torch_there,
                        str(account.package("distruntime", "0.0.1")),
                        str(account.package("distruntime_worker", "0.0.1")),
                    ],
                )
            ),
            rf"has distruntime 0.0.1, expected {__version__}",
        ),
    }


@pytest.mark.parametrize(
    "name", ["absent", "old", "without torch", "old torch", "without distruntime", "other distruntime"]
)
def test_what_is_missing_there_is_named_with_the_remedy(account: Account, box: Machine, name: str) -> None:
    python, text = _pythons(account)[name]
    fails(box.address(Path(python)), dr.errors.ConfigurationError, text)


def test_an_sshd_that_forwards_nothing(account: Account) -> None:
    strict = account.machine("strict", settings="AllowTcpForwarding no")
    # The client finds out when somebody uses the socket.
    fails(strict.address(), dr.errors.ConnectionFailed, "AllowTcpForwarding yes")


def test_a_shell_that_says_nothing(account: Account) -> None:
    mute = account.machine("mute", settings="ForceCommand cat >/dev/null")
    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"nothing answers there within 1 s\. Try by hand: ssh mute"
    ):
        dr.init_master_worker(workers=[mute.address()], timeout=1)


def test_a_worker_that_cannot_start_says_why(box: Machine) -> None:
    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"ended before it was ready \(exited with code 2\)(.|\n)*cuda:7"
    ):
        begin(box.address(devices="cuda:7"))


# -- setup=auto ------------------------------------------------------------------------------------


@pytest.mark.slow(reason="makes an environment, and imports torch from there twice")
def test_an_environment_is_made_there(
    account: Account, box: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    base = account.python("base", packages())
    if subprocess.run([base, "-c", "import ensurepip"], capture_output=True).returncode:
        pytest.skip("the second user's Python has no ensurepip: apt install python3-venv")
    with begin(box.address(base, setup="auto"), quiet=False):
        assert torch.arange(5.0, device="remote").sum().item() == 10.0
    said = capsys.readouterr().out
    assert "making an environment" in said and f"installing distruntime {__version__}" in said
    # The environment is found by itself.
    with begin("ssh://gpubox"):
        assert torch.arange(4.0, device="remote").sum().item() == 6.0
    shutil.rmtree(account.home / ".local")


@pytest.mark.parametrize("is_read", [True, False])
def test_an_environment_that_cannot_be_made(
    is_read: bool, account: Account, box: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is told, also where the shell has ended before it has read the wheel."""
    send = SshConnection.send

    def cut_off(connection: SshConnection, text: str) -> None:
        send(connection, text)
        if "DISTRUNTIME" in text and not is_read:
            raise Broken

    monkeypatch.setattr(SshConnection, "send", cut_off)
    torch_there = str(account.package("torch", torch.__version__))
    base = account.program(
        "full",
        'case "$*" in "-m venv"*) echo "Error: the disk is full"; exit 3;; esac\n'
        f'exec "{account.python("only", [torch_there])}" "$@"',
    )
    fails(
        box.address(base, setup="auto"),
        dr.errors.ConfigurationError,
        r"making an environment in .* failed \(exit code 3\): Error: the disk is full. Make .* by hand",
    )
