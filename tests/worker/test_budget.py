"""A session holds what its worker was told that one may hold (`--max-memory`), and what it is refused harms
nobody.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import (
    CHECK,
    FIRST_TEMPLATE,
    HOST,
    LEARN,
    UPLOAD,
    Done,
    Failed,
    Message,
    OpenMesh,
    Segment,
)
from distruntime_worker.log.budget import Budget, limits
from distruntime_worker.machine.devices import Devices
from distruntime_worker.options import _memory
from distruntime_worker.session.executor import Executor
from distruntime_worker.values.objects import Poisoned
from distruntime_worker.values.streams import Work
from processes import STARTING, free_port, slots, until

MIB = 1 << 20
CPU = torch.device("cpu")
# A mebibyte has so many.
FLOATS = MIB // 4
ON_CPU = ["device", "cpu"]
TEMPLATES: list[list[Any]] = [
    ["aten::empty.memory_format", [["list", FLOATS]], {"device": ON_CPU}, 1],
    ["aten::zeros.default", [["list", 64, FLOATS]], {"device": ON_CPU}, 1],
    ["aten::full.default", [["list", 1 << 20, 1 << 20], ["number"]], {"device": ON_CPU}, 1],
    ["aten::add.Tensor", [OPERAND, OPERAND], {}, 1],
    ["aten::view.default", [OPERAND, ["list", -1]], {}, 1],
    ["aten::mul_.Tensor", [OPERAND, ["number"]], {}, 0],
    ["aten::outer.default", [OPERAND, OPERAND], {}, 1],
    ["aten::resize_.default", [OPERAND, ["list", 100 * FLOATS]], {}, 0],
    ["distruntime::resize_storage", [OPERAND, 100 * MIB], {}, 0],
    ["aten::add.out", [OPERAND, OPERAND], {"out": OPERAND}, 0],
    ["aten::split.Tensor", [OPERAND, FLOATS // 4], {}, [1, 1, 1, 1]],
    ["aten::sort.default", [OPERAND], {}, [1, 1]],
    ["aten::nonzero.default", [OPERAND], {}, 1],
]
EMPTY, ZEROS, FULL, ADD, VIEW, MUL_, OUTER, RESIZE_, RESIZE, ADD_OUT, SPLIT, SORT, NONZERO = range(
    FIRST_TEMPLATE, FIRST_TEMPLATE + len(TEMPLATES)
)


class Session:
    """An executor without a socket; what is issued has run when `issue` returns."""

    def __init__(self, name: str, most: int | None, devices: Devices | None = None) -> None:
        devices = devices or Devices()
        self.budget = None if most is None else Budget(name, limits(most, devices))
        self.sent: list[Message] = []
        self.executor = Executor(
            devices,
            lambda message, payload=None, copy=True: self.sent.append(message),
            lambda *_: None,
            budget=self.budget,
        )
        self.executor.learn([[FIRST_TEMPLATE + k, *fields] for k, fields in enumerate(TEMPLATES)])
        self.slots = self.executor.slots
        self._seq = self._position = 0

    def issue(self, *words: Any, payloads: list[Any] | None = None) -> list[str]:
        """Run words; return the texts of what failed."""
        self._seq += 1
        work = Work(Segment(self._seq, self._position, [], list(words), []), payloads or [], 1)
        self._position += len(words)
        self.executor.works.append(work)
        with torch.no_grad():
            self.executor.run(work)
        done = self.sent[-1]
        assert isinstance(done, Done) and done.seq == self._seq
        assert {failure[2] for failure in done.failures} <= {"torch.OutOfMemoryError"}
        return [failure[3] for failure in done.failures]

    def held(self) -> int:
        assert self.budget is not None
        return self.budget.held()[CPU]


def test_a_result_that_is_too_much_is_refused_with_numbers_and_everything_else_stays() -> None:
    one, other = Session("one", 8 * MIB, devices := Devices()), Session("other", 8 * MIB, devices)
    for ref in range(1, 8):
        assert one.issue(EMPTY, ref, MUL_, ref, 0.0) == []
    kept = [one.slots[ref].view(torch.int32).clone() for ref in range(1, 8)]
    (text,) = one.issue(EMPTY, 8, ADD, 1, 2, 9)
    assert re.fullmatch(
        r"session 'one' may hold 8\.0 MiB on cpu of \S+ \(--max-memory\); it holds 8\.0 MiB, "
        r"and aten\.add\.Tensor (made|needs) 1\.0 MiB more",
        text,
    )
    assert isinstance(one.slots[9], Poisoned) and one.held() == 8 * MIB
    assert (
        other.issue(*(word for ref in range(1, 9) for word in (EMPTY, ref))) == []
    )  # another session has its own
    assert all(torch.equal(one.slots[ref].view(torch.int32), kept[ref - 1]) for ref in range(1, 8))
    assert one.issue(-9, -8, ADD, 1, 2, 10) == []  # what is freed can be used again
    assert one.held() == 8 * MIB
    assert one.issue(*range(-10, -9), *range(-7, 0)) == []
    assert one.held() == 0


def test_what_shares_memory_counts_once() -> None:
    session = Session("a", 4 * MIB)
    assert session.issue(EMPTY, 1, EMPTY, 2, MUL_, 1, 0.0) == []
    words = [word for ref in range(10, 1010) for word in (VIEW, 1, ref)]
    assert session.issue(*words, SPLIT, 1, 2000, 2001, 2002, 2003) == []
    assert session.held() == 2 * MIB
    assert session.issue(-1, EMPTY, 3, EMPTY, 4) == []  # its views keep it
    assert session.held() == 4 * MIB
    assert len(session.issue(EMPTY, 5)) == 1


def test_values_that_die_cost_nothing() -> None:
    session = Session("a", 4 * MIB)
    assert session.issue(EMPTY, 1) == []
    for _ in range(50):
        assert session.issue(*[EMPTY, 2, ADD, 1, 1, 3, -2, -3] * 20) == []
    assert session.held() == MIB


def test_a_request_for_too_much_is_not_tried() -> None:
    session = Session("a", 8 * MIB)
    (text,) = session.issue(FULL, 1.0, 1)  # 4 TiB
    assert text.endswith("it holds 0 B, and aten.full.default needs 4.0 TiB more")
    (text,) = session.issue(FULL, 2.0, 2)
    assert text.endswith("aten.full.default needs 4.0 TiB more")
    (text,) = session.issue(ZEROS, 3)
    assert text.endswith("aten.zeros.default needs 64.0 MiB more")
    assert session.issue(EMPTY, 4) == []


def test_what_the_master_predicts_is_asked_for_first_and_known_the_next_time() -> None:
    session = Session("a", 8 * MIB)
    session.slots[1] = torch.ones(1 << 20)
    (text,) = session.issue(CHECK, 1, [[[1 << 20, 1 << 20], [1 << 20, 1], 0, "float32", 0]], OUTER, 1, 1, 2)
    assert text.endswith("it holds 4.0 MiB, and aten.outer.default needs 4.0 TiB more")
    (text,) = session.issue(OUTER, 1, 1, 3)
    assert text.endswith("aten.outer.default needs 4.0 TiB more")
    session.slots[4] = torch.ones(10)
    assert session.issue(OUTER, 4, 4, 5) == []


def test_learnt_results_are_refused_too() -> None:
    session = Session("a", 8 * MIB)
    session.issue(
        *(
            word
            for ref in range(1, 6)
            for word in (
                EMPTY,
                ref,
                MUL_,
                ref,
                0.0,
            )
        )
    )
    session.slots[6] = torch.ones(2 * FLOATS)
    del session.sent[:]
    (text,) = session.issue(LEARN, 5, NONZERO, 6, 7)  # 4 MiB
    assert "aten.nonzero.default made 4.0 MiB more" in text
    assert any(isinstance(message, Failed) and message.request == 5 for message in session.sent)
    assert session.held() == 7 * MIB


def test_uploads_and_copies_to_the_host_count() -> None:
    session = Session("a", 4 * MIB)
    data = torch.ones(2 * FLOATS).numpy()
    assert (
        session.issue(UPLOAD, 1, "cpu", "float32", [2 * FLOATS], 0, payloads=[memoryview(data).cast("B")])
        == []
    )
    assert session.issue(HOST, 1, 2, []) == []
    (text,) = session.issue(
        UPLOAD, 3, "cpu", "float32", [2 * FLOATS], 0, payloads=[memoryview(data).cast("B")]
    )
    assert text.endswith("it holds 4.0 MiB, and an upload needs 2.0 MiB more")
    (text,) = session.issue(HOST, 1, 4, [])
    assert text.endswith("a copy to the host needs 2.0 MiB more")
    assert session.held() == 4 * MIB and session.slots[1].sum() == 2 * FLOATS


@pytest.mark.parametrize("operator", [RESIZE_, RESIZE])
def test_memory_that_is_to_grow_is_asked_for(operator: int) -> None:
    session = Session("a", 8 * MIB)
    assert session.issue(EMPTY, 1, EMPTY, 2) == []
    (text,) = session.issue(operator, 1)
    assert text.endswith("needs 99.0 MiB more")
    assert session.held() <= 2 * MIB
    assert session.issue(*(word for ref in range(3, 9) for word in (EMPTY, ref))) == []


def test_an_out_that_grows_counts() -> None:
    session = Session("a", 4 * MIB)
    session.slots[1], session.slots[2] = torch.ones(3 * FLOATS), torch.empty(0)
    assert session.held() == 3 * MIB
    (text,) = session.issue(ADD_OUT, 1, 1, 2)
    assert text.endswith("it holds 3.0 MiB, and aten.add.out made 3.0 MiB more")
    assert isinstance(session.slots[2], Poisoned) and session.held() == 3 * MIB


def test_of_several_results_all_go() -> None:
    session = Session("a", 4 * MIB)
    session.slots[1] = torch.ones(FLOATS)
    (text,) = session.issue(SORT, 1, 2, 3, SORT, 1, 4, 5)[:1]
    assert "aten.sort.default" in text
    assert session.held() <= 4 * MIB


def test_members_of_a_mesh_on_one_device_share_it() -> None:
    session = Session("a", 8 * MIB, Devices(simulate_cuda=2))
    assert session.budget is not None and set(session.budget.held()) == {
        CPU
    }  # simulated GPUs are main memory
    executor = session.executor
    executor.open_mesh(OpenMesh(0, ["cuda:0", "cuda:1"]))
    mesh = executor.state.meshes[0]
    empty = ["aten::empty.memory_format", [["list", 3 * FLOATS]], {"device": ["device", "member"]}, 1]
    executor.learn([[FIRST_TEMPLATE, *empty]], mesh)
    for k in range(2):
        work = Work(Segment(k + 1, 2 * k, [], [FIRST_TEMPLATE, k + 1], []), [], 1, mesh=mesh)
        executor.line_up(work)
        executor.run(work)
    assert len(work.failures) == 2 and "aten.empty.memory_format needs 6.0 MiB more" in work.failures[0].text
    assert session.held() == 6 * MIB


def test_streams_that_make_values_at_once_stay_within_it() -> None:
    budget = Budget("a", {CPU: 8 * MIB})
    values: dict[int, Any] = {}
    budget.watch(values)
    refused = [0] * 4

    def make(k: int) -> None:
        for n in range(300):
            try:
                budget.require([CPU], MIB, "it")
                values[k] = torch.empty(FLOATS)
                budget.add(CPU, MIB, "it")
                values[k + 10] = torch.empty(FLOATS)
                budget.add(CPU, MIB, "it")
                values[k + 20 + n % 2] = values.pop(k)
            except torch.OutOfMemoryError:
                refused[k] += 1
                values.pop(k + 20, None)

    threads = [threading.Thread(target=make, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (
        sum(refused) > 0 and budget.held()[CPU] <= (8 + 4 * 2) * MIB
    )  # each has two that it may be about to be refused
    values.clear()
    budget.require([CPU], 8 * MIB, "it")


def test_without_a_limit_nothing_stands_in_the_way() -> None:
    free, held = Session("a", None), Session("b", 8 * MIB)
    assert all(
        free.executor.state.templates[number] == free.executor.state.info[number].run
        for number in (EMPTY, ADD, VIEW, SORT)
    )
    for number in (VIEW, MUL_, SPLIT):  # what makes no memory costs nothing with one either
        assert held.executor.state.templates[number] == held.executor.state.info[number].run


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("16GB", 16 * 10**9),
        ("4096B", 4096),
        ("1 TiB", 1 << 40),
        ("50%", 0.5),
        ("100%", 1.0),
    ],
)
def test_sizes_on_the_command_line(text: str, size: float) -> None:
    assert _memory(text) == size and type(_memory(text)) is type(size)


@pytest.mark.parametrize("text", ["", "8", "8 apples", "-1GiB", "0%", "101%", "0MiB", "GiB", "1e9B", "50%%"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got "):
        _memory(text)


def test_parts_are_of_what_the_device_has() -> None:
    devices = Devices()
    total = devices.info()[0][2]
    assert limits(0.5, devices) == {**limits(0.5, devices), CPU: total // 2}
    assert limits(1 << 30, devices)[CPU] == 1 << 30


@contextmanager
def worker(tmp_path: Path, *options: str) -> Iterator[str]:
    """A worker of its own that listens; its address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    path = os.pathsep.join(
        [str(Path(dr.__file__).parent.parent), str(Path(dr.__file__).parent.parent / "worker")]
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "distruntime_worker",
                "--listen",
                address,
                "--insecure",
                "--threads",
                "1",
                *options,
            ],
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: "listening" in log.read_text(encoding="utf-8") or process.poll() is not None, STARTING)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        yield address
        assert process.poll() is None, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow(reason="starts a worker with little memory, 9 s")
def test_a_session_that_asks_for_too_much_hears_who_holds_what_and_goes_on(tmp_path: Path) -> None:
    dr.shutdown()
    with (
        worker(tmp_path, "--max-memory", "64MiB") as address,
        dr.init_master_worker(workers=[address], insecure=True, quiet=True, timeout=STARTING),
    ):
        kept = [torch.full((10 * FLOATS,), float(k), device="remote") for k in range(5)]
        for _ in range(3):
            with pytest.raises(
                torch.OutOfMemoryError,
                match=r"may hold 64\.0 MiB on cpu .* it holds 50\.0 MiB, and .* 40\.0 MiB more",
            ) as caught:
                torch.zeros(40 * FLOATS, device="remote").sum().item()
            assert "held there: 50.0 MiB by " in str(caught.value) and Path(__file__).name in str(
                caught.value
            )
            with pytest.raises(torch.OutOfMemoryError, match=r"4\.0 TiB"):
                torch.ones(1 << 40, device="remote").sum().item()
            with pytest.raises(torch.OutOfMemoryError, match=r"aten\.cat\.default"):
                torch.cat(kept).sum().item()
        with pytest.raises(torch.OutOfMemoryError, match=r"an upload needs 20\.0 MiB more"):
            torch.ones(20 * FLOATS).to("remote").sum().item()
        assert [x.mean().item() for x in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]
        for k, x in enumerate(kept):
            x.resize_(1).fill_(float(k))
        assert [x.item() for x in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]
        del kept, x, caught
        # The upload was for this operator.
        with pytest.raises(torch.OutOfMemoryError, match=r"aten\.empty_strided"):
            dr.synchronize()
        again = torch.ones(60 * FLOATS, device="remote")
        assert again.sum().item() == 60 * FLOATS
        del again
        assert slots() == 0


@pytest.mark.slow(reason="trains on a worker with a share, 4 s")
def test_a_training_loop_within_its_share_notices_nothing(tmp_path: Path) -> None:
    dr.shutdown()
    with (
        worker(tmp_path, "--max-memory", "8MiB") as address,
        dr.init_master_worker(workers=[address], insecure=True, quiet=True, timeout=STARTING),
    ):

        def train(device: str) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
            ).to(device)
            optimizer = torch.optim.Adam(model.parameters())
            losses = []
            for step in range(30):
                batch = torch.full((32, 64), float(step)).to(device)
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        assert train("remote") == train("cpu")


def test_a_size_that_makes_no_sense_ends_the_worker_at_once() -> None:
    path = os.pathsep.join(
        [str(Path(dr.__file__).parent.parent), str(Path(dr.__file__).parent.parent / "worker")]
    )
    command = [
        sys.executable,
        "-m",
        "distruntime_worker",
        "--listen",
        "tcp://127.0.0.1:0",
        "--insecure",
        "--max-memory",
        "lots",
    ]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=STARTING
    )
    assert (
        ended.returncode == 2
        and "--max-memory: got 'lots', expected a size with its unit, as 8GiB" in ended.stderr
    )
