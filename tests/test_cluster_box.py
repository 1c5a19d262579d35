"""The cluster in a box: three of its scenarios, and that nothing of it is left. The lane has the others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hosts
from hosts import Host, Interface
from lane_modules import modules_of
from processes import Child, state, until
from router import Router, Weather

BOX = Path(__file__).resolve().parent / "box"
_WHY = hosts.unavailable()
needs_hosts = pytest.mark.skipif(bool(_WHY), reason=_WHY)

with modules_of(BOX) as module:
    lane, scenarios, chaos, services = (module(name) for name in ("run", "scenarios", "chaos", "services"))
BY_NAME = {scenario.name: scenario for scenario in lane.SCENARIOS}


def test_every_scenario_has_a_topology_and_a_name_of_its_own() -> None:
    topologies = [topology.name for topology in lane.TOPOLOGIES]
    assert len(set(topologies)) == len(topologies) and len(BY_NAME) == len(lane.SCENARIOS)
    assert {scenario.topology for scenario in lane.SCENARIOS} == set(topologies)


def test_where_there_can_be_no_hosts_the_lane_says_why_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "there is no /dev/net/tun")
    assert lane.main([], tmp_path) == 0
    assert capsys.readouterr().out == "cannot run here: there is no /dev/net/tun\n"


@pytest.mark.parametrize(
    ("said", "outcome", "wrong"),
    [
        ({"result": "a"}, "equal", ""),
        ({"result": "b"}, "equal", "it computed b, and not a"),
        ({"failed": "NodeFailed: node 1"}, "equal", "NodeFailed: node 1"),
        ({"failed": "NodeFailed: node 1"}, "node 1", ""),
        ({"failed": "NodeFailed: node 0"}, "node 1", "the words do not match 'node 1': NodeFailed: node 0"),
        ({"result": "a"}, "node 1", "it did not fail, and must: node 1"),
        ({}, "ended", ""),
        ({"failed": "NodeFailed: node 1"}, "ended", "NodeFailed: node 1"),
        ({"result": "a"}, "ended", "it computed a, and must have ended before"),
        ({"late": "not in time", "at": "round 2"}, "equal", "not in time: 9 s, it last was at round 2"),
    ],
)
def test_a_scenario_is_green_only_as_it_must_come(said: dict[str, Any], outcome: str, wrong: str) -> None:
    scenario = scenarios.Scenario("tried", "", "rack", outcome=outcome, within=9)
    assert lane.verdict(scenario, said, "a", 1.0) == wrong


class Heard:
    """What a lane of chaos knows of its masters."""

    def __init__(self) -> None:
        self.lines, self.began = {}, {"one": 1000.0}


@pytest.mark.parametrize(
    ("odd", "fault", "over", "right"),
    [
        ("", "kill", 1001.0, True),
        ("raised NodeFailed: node 1 (gpu2) exited: killed", "kill", 1001.0, True),
        ("raised NodeFailed: node 1 (gpu2) exited: killed", "kill", 1000.0 - chaos.LATER, False),
        ("raised NodeFailed: node 2 (gpu3) exited: killed", "kill", 1001.0, False),
        ("raised NodeFailed: node 1 (gpu2) is unreachable", "down", 1001.0, False),
        # gloo may know before the master does, and knows addresses alone.
        ("raised NodeFailed: group 3 is broken: closed by peer [10.77.0.12]:56505.", "kill", 1001.0, True),
        ("raised NodeFailed: group 3 is broken: closed by peer [10.77.0.13]:56505.", "kill", 1001.0, False),
        ("raised OSError: [Errno 28] No space left on device", "full_disk", 1001.0, True),
        ("raised OSError: [Errno 28] No space left on device", "descriptors", 1001.0, False),
        ("the end of v3 reads [1], expected [2]", "kill", 1001.0, False),
    ],
)
def test_a_piece_of_work_fails_with_the_true_cause_or_is_wrong(
    odd: str, fault: str, over: float, right: bool
) -> None:
    found = chaos.Chaos(None, Heard(), 1)
    found.over.append((chaos.Fault(fault, "gpu2", "gpu1", 1.0, 0.5, 0.5), over))
    found.judge("one", {"done": "operations", "seed": 1, "odd": odd})
    assert not found.wrong == right


def test_faults_follow_from_the_seed_and_each_kind_has_its_part() -> None:
    size = sum(chaos.DECK.values())
    drawn = [fault for fault, _ in zip(chaos.faults_of(1), range(2 * size))]
    assert drawn == [fault for fault, _ in zip(chaos.faults_of(1), range(2 * size))]
    assert Counter(fault.kind for fault in drawn[:size]) == chaos.DECK and drawn[:size] != drawn[size:]
    assert set(chaos.CAUSES) < set(chaos.DECK)
    assert all(hasattr(chaos.Chaos, kind) for kind in chaos.DECK)


def test_what_rises_beyond_its_noise_is_not_flat() -> None:
    noise = random.Random(1)
    samples = [
        {
            "seconds": 10.0 * k,
            "gpu1 7, MiB": 200 + 0.05 * k + noise.gauss(0, 0.5),
            "gpu1 7, descriptors": 40.0 + k % 3,
            "one, microseconds": 15 + noise.gauss(0, 1),
            # It has ended.
            **({"gpu1 8, MiB": 1000.0 + k} if k < 200 else {}),
        }
        for k in range(300)
    ]
    (wrong,) = chaos.flat(samples)
    assert wrong.startswith("gpu1 7, MiB rises by ")
    assert chaos.flat(samples[:10]) == ["10 rounds are too few for a slope"]


def test_where_a_launcher_is_not_here_the_lane_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lane.main(["slurm", "mpirun"], tmp_path) == 0
    assert capsys.readouterr().out == (
        "slurm (Slurm of three nodes): cannot run here: there is no slurmctld: apt install slurmctld\n"
        "mpirun (Open MPI over hosts): cannot run here: there is no mpirun: apt install openmpi-bin\n"
        "0 of 2 green, not here: slurm, mpirun\n"
    )


class Boxes:
    """What runs scenarios, without a box: one that fails, one whose box does not come up."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lacks(self, scenario: Any) -> str:
        return "there is no ray" if scenario.topology == "ray" else ""

    def run(self, scenario: Any) -> tuple[str, str]:
        if scenario.name == "mtu":
            raise OSError("no worker listens")
        return ("it computed b" if scenario.name == "drop-2" else ""), "1.0 s"

    def end(self) -> None:
        pass


@pytest.mark.parametrize("boxes", ["1", "3"])
def test_several_boxes_run_each_scenario_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, boxes: str
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "")
    monkeypatch.setattr(lane, "Lane", Boxes)
    names = ["calm", "drop-2", "mtu", "ray", "ipv6", "own-names", "loss"]
    assert lane.main([*names, "--boxes", boxes], tmp_path) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(" ")[0] for line in lines) == sorted(names)
    assert last == "4 of 7 green, red: drop-2, mtu, not here: ray"
    (mtu,) = (line for line in lines if line.startswith("mtu"))
    assert "RED: OSError: no worker listens" in mtu


# It prints how a second of the steady clock was seen, and how long waits for half a second took.
_WATCH = """
import threading, time
began, day = time.monotonic(), time.time()
lock = threading.Lock()
lock.acquire()
lock.acquire(timeout=0.5)
threading.Event().wait(0.5)
took = time.monotonic() - began
print(day, took, (time.time() - day) / took)
"""


class HostHere:
    """A host without namespaces."""

    name = "here"

    def __init__(self, home: Path) -> None:
        self.home = home

    def do(self, script: str) -> str:
        return subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout


def test_a_host_has_a_clock_of_its_own_that_jumps_and_drifts(tmp_path: Path) -> None:
    if why := services.lacking(("clock",)):
        pytest.skip(why)
    host = HostHere(tmp_path)
    variables = services.SERVICES["clock"].start(services.Place({"here": host}, ("here",), tmp_path, ""))

    def seen() -> list[float]:
        environment = {**os.environ, **variables, "HOME": str(tmp_path)}
        told = subprocess.run(
            [sys.executable, "-c", _WATCH], env=environment, check=True, capture_output=True, text=True
        )
        return [float(word) for word in told.stdout.split()]

    for ahead, gains in ((0.0, 0.0), (-3600.0, 0.0), (1e8, 0.5)):
        services.set_clock(host, ahead, gains)
        began = time.time()
        day, took, rate = seen()
        # The clock gains while Python starts, too.
        assert -1 < day - ahead - began < (1 + gains) * (time.time() - began) + 1
        assert took >= 1 and abs(rate - 1 - gains) < 0.05


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with lane.Lane(tmp_path_factory.mktemp("box")) as made:
        yield made


@needs_hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["drop-2", "names-differ", "ipv6-dial"])
@pytest.mark.slow(reason="starts workers on hosts of their own, and a master: 20 s")
def test_a_scenario(running: Any, name: str) -> None:
    wrong, seen = running.run(BY_NAME[name])
    assert not wrong, f"{wrong}; {seen}"


@needs_hosts
@pytest.mark.timeout(600)
@pytest.mark.slow(reason="starts workers on hosts of their own, and two masters: 50 s")
def test_a_few_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "DECK", {"down": 1, "stop": 1, "kill": 1})
    assert chaos.chaos(3, 1, tmp_path) == 0


@needs_hosts
@pytest.mark.slow(reason="makes hosts, 1 s")
def test_the_weather_is_as_it_was_said() -> None:
    serve = (
        "import socket\n"
        "with socket.create_server(('', 5000)) as server:\n"
        "    print('up', flush=True)\n"
        "    while True:\n"
        "        with server.accept()[0] as one: one.sendall(b'x')\n"
    )
    dial = (
        f'{sys.executable} -c "import socket, time; began = time.monotonic(); '
        "socket.create_connection(('two', 5000), 1).recv(1); print(time.monotonic() - began)\""
    )
    names = {"one": ("10.77.0.1",), "two": ("10.77.0.2",)}
    with (
        Router() as network,
        Host("one", network, [Interface("eth0", ("10.77.0.1/16",))], names) as one,
        Host("two", network, [Interface("eth0", ("10.77.0.2/16",))], names) as two,
    ):
        assert one.do("cat /proc/sys/kernel/hostname").strip() == "one"
        process = two.start([sys.executable, "-c", serve], {}, subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        # Here and back twice: the connection, and the letter.
        network.weather("*", "*", Weather(delay=0.05))
        assert float(one.do(dial)) > 0.2
        network.calm()
        for weather in (Weather(up=False), Weather(ports=(22,)), Weather(loss=1.0)):
            network.weather("one", "two", weather)
            with pytest.raises(AssertionError, match="timed out"):
                one.do(dial)
        assert {name for name, count in network.counts().items() if count} >= {"down", "closed", "lost"}
        network.weather("one", "two", Weather(ports=(22, 5000)))
        assert float(one.do(dial)) < 1.0


def hold() -> None:
    """The child: make a host with a process, hold it still, and wait."""
    with Router() as network, Host("held", network, [Interface("eth0", ("10.77.0.1/16",))], {}) as host:
        outside = host.start(["sleep", "600"], {}, subprocess.DEVNULL)
        until(lambda: len(host.processes()) == 2)
        host.stop()
        # What has brought it there stands still with it.
        until(lambda: state(outside.pid) == "T")
        print("processes", outside.pid, *host.processes())
        sys.stdin.readline()


@needs_hosts
@pytest.mark.slow(reason="makes a host in a process of its own, 2 s")
def test_nothing_is_left_of_who_was_killed() -> None:
    with Child(hold) as child:
        inside = [int(pid) for pid in child.expect("processes").split()]
        assert len(inside) == 3
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside))
