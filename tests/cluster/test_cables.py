"""Cuts of a real network, between two network namespaces: TCP itself finds nobody there any more.

For root, on Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distruntime as dr
from cut_training import counted, same, train, whole_words
from distruntime.session.session import active_session
from distruntime.wire.keys import KeyPair
from hosts import unavailable
from namespaces import Cable, enter
from processes import PATH, Child, pause, until

_WHY = unavailable()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)
STEPS = 30
PORT = 29400
SILENCE = 1.0


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable() as made:
        yield made


@pytest.fixture
def key(tmp_path: Path) -> str:
    KeyPair.generate().save(tmp_path / "key")
    return str(tmp_path / "key")


def start(cable: Cable, key: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        "PYTHONPATH": os.pathsep.join(PATH),
        "OMP_NUM_THREADS": "1",
        "DISTRUNTIME_UNREACHABLE": str(SILENCE),
    }
    command = [sys.executable, "-m", "distruntime_worker", *arguments, "--key", key]
    with log.open("wb") as output:
        return cable.run(command, output, environment)


def master(namespace: str, key: str, listen: str) -> None:
    """The child: train twice, undisturbed and with pauses for trouble. The parent says when to go on."""
    enter(namespace)
    torch.set_num_threads(1)
    print("listening" if listen else "dialling")
    where = {"listen": listen, "world_size": 1} if listen else {"workers": [f"tcp://10.77.0.2:{PORT}"]}
    dr.init_master_worker(**where, key=key, unreachable=SILENCE, grace=120, timeout=90)  # type: ignore[arg-type]
    whole_words()
    node = active_session().nodes[0]

    def disturb(step: int) -> None:
        if step in (8, 18, 25):
            print("at", step)
            sys.stdin.readline()

    wanted = train(STEPS)
    states: list[str] = []
    stop = threading.Event()
    watcher = threading.Thread(
        target=lambda: [states.append(node.state) for _ in iter(lambda: stop.wait(0.05), True)]
    )
    watcher.start()
    same(train(STEPS, disturb), wanted)
    stop.set()
    watcher.join()
    counted()
    until(lambda: node.state == "ready")
    print("same", "unreachable" in states, node.state)
    dr.shutdown()


TROUBLES = {
    "pulled for a second": (1.0, 1.0, 1.0),
    "pulled for longer than TCP waits": (4.0, 0.2, 3.0),
    "pulled while the master's address changes": (2.0, 1.0, 2.0),
    "the master's address changes": (0.0, 0.0, 0.0),
}


_LONG = pytest.mark.slow(reason="waits until TCP gives a connection up")
_SLOW = pytest.mark.slow(reason="starts a worker as a program behind a cable: 10.9 s in the suite")


@pytest.mark.parametrize(
    "listen",
    [pytest.param(False, marks=_SLOW, id="the master dials"), pytest.param(True, id="the worker dials")],
)
@pytest.mark.parametrize(
    "what", [what if what == "pulled for a second" else pytest.param(what, marks=_LONG) for what in TROUBLES]
)
@pytest.mark.slow(reason="starts a program behind a cable, 7 s")
def test_a_training_over_a_cable_that_is_pulled(
    cable: Cable, key: str, tmp_path: Path, what: str, listen: bool
) -> None:
    if listen and "address" in what:
        pytest.skip("whoever is dialled must stay where it is")
    log = tmp_path / "worker.log"
    address = f"tcp://10.77.0.1:{PORT}" if listen else ""
    arguments = ["--master", address] if listen else ["--listen", f"tcp://10.77.0.2:{PORT}"]
    with Child(master, cable.master, key, address) as child:
        child.expect("listening" if listen else "dialling", 90)
        worker = start(cable, key, log, *arguments)
        try:
            for k, seconds in enumerate(TROUBLES[what]):
                child.expect("at", 90)
                if seconds:
                    cable.pull()
                if "address" in what:
                    cable.move(10 + k)
                child.tell()
                pause(seconds)
                cable.plug()
            seen, state = child.expect("same", 90).split()
            assert state == "ready"
            if max(TROUBLES[what]) > SILENCE:  # a new connection may be there before anyone looks
                assert seen == "True"
            child.finish()
        finally:
            worker.terminate()
            worker.wait(20)
    assert "Traceback" not in log.read_text(encoding="utf-8")
