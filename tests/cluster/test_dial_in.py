"""Workers that dial in: who has come is shown, who has not is named, and a worker's second try is no news."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.cluster import absences
from distruntime.session import launched
from distruntime.session.launcher import worker_command
from distruntime.session.session import active_session
from processes import STARTING, Child, until

Dialler = Callable[..., None]


def begin(address: str, count: int, timeout: float = STARTING, **options: Any) -> dr.types.Session:
    return dr.init_master_worker(listen=address, world_size=count, insecure=True, timeout=timeout, **options)


def test_each_arrival_is_shown(address: str, dial: Dialler, capsys: pytest.CaptureFixture[str]) -> None:
    dial(), dial()
    begin(address, 2, quiet=False)
    said = capsys.readouterr().out
    assert f"waiting at {address} for 2 workers, which dial it: distruntime-worker --master {address}" in said
    # Two that come at once may be told in either order.
    came = re.findall(rf"node (\d) \({re.escape(socket.gethostname())}\) after [\d.]+ s, (\d) of 2", said)
    assert sorted(number for number, _ in came) == ["0", "1"] and [count for _, count in came] == ["1", "2"]


def test_who_is_missing_is_named(address: str, dial: Dialler) -> None:
    dial()
    texts: list[str] = []

    def one_has_come() -> bool:
        with pytest.raises(dr.errors.ConnectionFailed) as caught:
            begin(address, 3, timeout=1.0)
        texts.append(str(caught.value))
        return "has come" in texts[-1]

    until(one_has_come)
    assert texts[-1].startswith(
        f"2 of 3 workers did not dial {address} within 1 s: nodes 1, 2 are missing; "
        f"node 0 ({socket.gethostname()}) has come (pid "
    )
    assert f"Start each with distruntime-worker --master {address}" in texts[-1]


def test_a_worker_hears_that_the_session_did_not_come_about(
    address: str, dial: Dialler, tmp_path: Path
) -> None:
    dial()

    def told() -> bool:
        with pytest.raises(dr.errors.ConnectionFailed):
            begin(address, 2, timeout=1.0)
        return "ended (the session did not come about)" in (tmp_path / "worker-0.log").read_text(
            encoding="utf-8"
        )

    until(told)
    # It dials again, and serves the next attempt.
    begin(address, 1)
    assert torch.ones(2, device=REMOTE).tolist() == [1, 1]


def test_who_dials_a_session_that_has_all_its_workers_is_told(
    address: str, dial: Dialler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dial()
    begin(address, 1)
    dial()
    until(lambda: "the session has all its workers. It gets no place" in caplog.text)
    told = f"the master at {address} has no place for this worker: the session has all its workers"
    until(lambda: told in (tmp_path / "worker-1.log").read_text(encoding="utf-8"))
    dr.shutdown()
    begin(address, 2)
    assert torch.ones(2, device=REMOTE).to(node=1).tolist() == [1, 1]  # type: ignore[call-overload]


def test_a_worker_with_the_number_of_an_absent_one_takes_its_place_unless_it_has_waited_for_it(
    address: str, dial: Dialler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a worker on another machine, nobody here knows whether the process is there.
    for module in (absences, launched):
        monkeypatch.setattr(module, "has_died", lambda process: False)
    dial("--node", "0"), dial("--node", "1")
    begin(address, 2)
    kept = [torch.ones(2, device=dr.place(node, "cpu")) for node in (0, 1)]
    first, second = (node.pid for node in dr.nodes())
    dial("--node", "0")
    until(lambda: "the session has all its workers. It gets no place" in caplog.text)
    os.kill(second, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    until(lambda: [node.state for node in dr.nodes()] == ["unreachable"] * 2)
    dial("--node", "1")
    gone = rf"\(pid {second}\) was unreachable .*another worker was started with its number: .*, pid \d+"
    with pytest.raises(dr.errors.NodeFailed, match=gone):
        kept[1].cpu()
    until(lambda: dr.nodes()[1].state == "ready")
    assert torch.ones(2, device=dr.place(1, "cpu")).tolist() == [1, 1]
    # Who was there before the other one was away was not started for it: its network may only be cut.
    assert dr.nodes()[0].state == "unreachable"


def test_the_waiting_time_is_one_for_schedulers(address: str, dial: Dialler) -> None:
    dial()
    dr.init_master_worker(listen=address, world_size=1, insecure=True)
    assert active_session().patience == 600.0


def test_a_wildcard_is_this_machine_in_the_command() -> None:
    name = socket.gethostname()
    assert (
        worker_command("tcp://0.0.0.0:29400", dials=True) == f"distruntime-worker --master tcp://{name}:29400"
    )


def hang_up(address: str) -> None:
    """Connect, send the beginning of a handshake, and hang up."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        stranger.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")


def test_a_connection_that_is_refused_is_told_at_once(
    address: str, dial: Dialler, caplog: pytest.LogCaptureFixture
) -> None:
    dial()
    begin(address, 1)
    hang_up(address)
    until(lambda: f"rejected a connection to {address}: " in caplog.text)


def publishes(address: str) -> None:
    """Child: a kernel whose workers dial in; it publishes a value, and dies."""
    begin(address, 1, session="day", resume="auto")
    dr.publish("x", torch.full((3,), 2.0, device=REMOTE))
    print("published", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_same_line_begins_and_attaches_where_workers_dial(
    address: str, dial: Dialler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    dial()
    with Child(publishes, address) as child:
        child.expect("published")
    begin(address, 1, session="day", resume="auto")
    assert dr.lookup("x").tolist() == [2, 2, 2]
