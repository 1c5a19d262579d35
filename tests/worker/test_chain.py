"""Links stand around every kind of instruction, in one order, whenever they or a template come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distruntime.errors import InternalError, UsageError
from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import CHECK, FIRST_TEMPLATE, STAMP, Done, OpenMesh, Segment
from distruntime_worker.log.budget import Budget, limits
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session.executor import Executor
from distruntime_worker.values.mesh_lanes import Shards
from distruntime_worker.values.objects import Poisoned
from distruntime_worker.values.step import Run, Step
from distruntime_worker.values.streams import Work

MIB = 1 << 20
# A mebibyte has so many.
FLOATS = MIB // 4
MEMBER = ["device", "member"]
SMALL, LARGE = ["float32", [4], None], ["float32", [3 * FLOATS], None]
OUT_OF_PLACE, IN_PLACE = [-1, None, None, False, [], []], [-1, None, None, True, [], []]
OPERATORS: list[list[Any]] = [
    ["aten::mul_.Tensor", [OPERAND, ["number"]], {}, 0],
    ["aten::normal_.default", [OPERAND], {}, 0],
    ["aten::rand.default", [["list", 4]], {"device": MEMBER}, 1],
    ["aten::rand.default", [["list", 3 * FLOATS]], {"device": MEMBER}, 1],
    ["aten::repeat.default", [OPERAND, ["list", 3 * FLOATS]], {}, 1],
    ["aten::outer.default", [OPERAND, OPERAND], {}, 1],
]
COUNT = len(OPERATORS) + 2
NUMBERS = range(FIRST_TEMPLATE, FIRST_TEMPLATE + COUNT)
MUL_, NORMAL_, RAND, RAND_LARGE, REPEAT, OUTER, REDUCE_, GATHER = NUMBERS
NAMES = [name for name, *_ in OPERATORS]


class Session:
    """An executor without a socket. Its log is the worker's own, or that of a mesh with two members here.

    Groups have no members elsewhere: what an operation of one makes is ones.
    """

    def __init__(self, mesh: bool, most: int | None = 2 * MIB) -> None:
        devices = Devices(simulate_cuda=2)
        budget = None if most is None else Budget("a", limits(most, devices))
        self.done: list[Any] = []
        self.errors: list[BaseException | None] = []
        self.executor = Executor(devices, self._send, lambda *_: None, budget=budget)
        self.executor.joint.take_part = self._begin  # type: ignore[method-assign, assignment]
        self.state, self.mesh = self.executor.state, None
        if mesh:
            self.executor.open_mesh(OpenMesh(0, ["cuda:0", "cuda:1"]))
            self.mesh = self.state.meshes[0]
            self.mesh.lines[0] = [[7, 0], [7, 1]]
        self.log = self.mesh or self.state
        self._position = 0

    def _send(self, message: Any, payload: Any = None, copy: bool = True) -> None:
        self.done += [message] if isinstance(message, Done) else []

    def _begin(self, collective: Any, slots: Any, p: Any, i: int, error: Any = None, at: Any = None) -> int:
        self.errors.append(error)
        if error is not None:
            where = at or (p, i)
            self.state.poison(collective, slots, p, i, self.state.failure(*where, error, collective.name, ""))
        else:
            for k in collective.writes:
                slots[p[i + k]] = torch.ones(3 * FLOATS)
        return i + collective.length

    def learn(self) -> None:
        rows = [*OPERATORS]
        for options, layout in ((IN_PLACE, SMALL), (OUT_OF_PLACE, LARGE)):
            along, own = [0, options, [SMALL], [layout]], [7, options, [[0, "cpu", [SMALL], [layout]]]]
            rows.append(["group::all_gather", own if self.mesh is None else along, {}, 0])
        if self.mesh is None:
            on = ["device", "cpu"]
            rows = [[name, args, dict.fromkeys(kwargs, on), results] for name, args, kwargs, results in rows]
        self.executor.learn([[FIRST_TEMPLATE + k, *row] for k, row in enumerate(rows)], self.mesh)

    def issue(self, *words: Any) -> list[str]:
        """Run words; return the texts of what failed."""
        work = Work(Segment(1, self._position, [], list(words), []), [], 1, mesh=self.mesh)
        self._position += len(words)
        self.executor.works.append(work)
        with torch.no_grad():
            self.executor.run(work)
        return [failure[3] for failure in self.done[-1].failures]

    def put(self, ref: int, *values: torch.Tensor) -> None:
        """Let a value be there: a copy of the last of `values` for each further member of a mesh."""
        self.state.slots[ref] = values[0] if self.mesh is None else Shards([values[0], values[-1].clone()])

    def values(self, ref: int) -> list[Any]:
        value = self.state.slots[ref]
        return list(value) if isinstance(value, Shards) else [value]


def begun(mesh: bool, when: str) -> tuple[Session, torch.Tensor]:
    """Return a session and what it may read only, which is in slot 1: ones, a mesh's first member's part."""
    session, shared = Session(mesh), torch.ones(4)
    if when == "learnt before":
        session.learn()
    session.executor.chain.read_only.watch()
    if when == "learnt after":
        session.learn()
    session.executor.chain.read_only.add(shared)
    session.put(1, shared)
    return session, shared


each_log = pytest.mark.parametrize("mesh", [False, True], ids=["own log", "mesh"])
each_order = pytest.mark.parametrize("when", ["learnt before", "learnt after"])


def test_the_order_from_the_outermost_inwards() -> None:
    assert [(type(link).__name__, link.each) for link in Session(mesh=False).executor.chain.links] == [
        ("Timing", False),
        ("ReadOnly", True),
        ("LostDevices", True),
        ("Draws", False),
        ("Shares", False),
    ]


@each_log
@each_order
def test_what_others_share_is_not_written(mesh: bool, when: str) -> None:
    session, shared = begun(mesh, when)
    (text,) = session.issue(MUL_, 1, 5.0)
    assert "write to a copy" in text
    # Each member looks for itself.
    assert [value.tolist() for value in session.values(1)] == [[1.0] * 4, [5.0] * 4][: 1 + mesh]
    session.put(2, torch.ones(4))
    assert session.issue(MUL_, 2, 5.0) == []
    (text,) = session.issue(REDUCE_, 1, 2, 1)
    assert text.startswith("this would write what another session has published")
    assert len(session.errors) == 1 and isinstance(session.errors[0], UsageError)
    assert shared.tolist() == [1.0] * 4


@each_log
@each_order
def test_the_share_of_memory_holds_too(mesh: bool, when: str) -> None:
    session, _ = begun(mesh, when)
    session.put(2, torch.ones(1))
    for words in ((REPEAT, 2, 3), (RAND_LARGE, 3), (GATHER, 1, 2, 3)):
        texts = session.issue(*words)
        assert texts and all("may hold 2.0 MiB" in text for text in texts), words
        assert all(isinstance(value, Poisoned) for value in session.values(3)), words
        assert session.executor.state.budget is not None
        assert max(session.executor.state.budget.held().values()) < MIB
    assert session.errors == [None]


@each_log
@each_order
def test_each_session_draws_its_own_numbers(mesh: bool, when: str) -> None:
    (one, _), (other, _) = begun(mesh, when), begun(mesh, when)
    drawn: dict[int, list[Any]] = {0: [], 1: []}
    for which in (0, 1, 1, 0):
        session = (one, other)[which]
        assert session.issue(RAND, 3) == []
        drawn[which].append([value.tolist() for value in session.values(3)])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


@each_order
def test_what_is_refused_neither_draws_nor_counts(when: str) -> None:
    (one, shared), (other, _) = begun(False, when), begun(False, when)
    assert len(one.issue(NORMAL_, 1)) == 1
    assert len(one.issue(RAND_LARGE, 2)) == 1
    assert one.issue(RAND, 3) == [] == other.issue(RAND, 3)
    assert torch.equal(one.values(3)[0], other.values(3)[0])
    assert shared.tolist() == [1.0] * 4


def test_sizes_that_are_known_stay_known_when_a_link_is_switched_on() -> None:
    session = Session(mesh=False)
    session.learn()
    session.put(1, torch.ones(FLOATS))
    session.issue(CHECK, 1, [[[FLOATS, FLOATS], [FLOATS, 1], 0, "float32", 0]], OUTER, 1, 1, 2)
    session.executor.chain.read_only.watch()
    (text,) = session.issue(OUTER, 1, 1, 3)
    # What was tried would have "made" it, or failed otherwise.
    assert text.endswith("aten.outer.default needs 256.0 GiB more")


@each_log
def test_an_instruction_that_no_link_concerns_runs_itself(mesh: bool) -> None:
    session = Session(mesh, most=None)
    session.learn()
    for word, step in session.state.own.items():
        assert session.log.templates[word] is step.run
    for number in (MUL_, REPEAT, OUTER, REDUCE_, GATHER):
        assert session.log.templates[number] == session.log.info[number].run
    assert session.log.templates[RAND] != session.log.info[RAND].run


class Seen:
    """A link that notes what runs."""

    def __init__(self, each: bool) -> None:
        self.each, self.names = each, list[str]()

    def around(self, step: Step, run: Run) -> Run | None:
        def seen(slots: dict[int, Any], p: list[Any], i: int) -> int:
            self.names.append(step.name)
            return run(slots, p, i)

        return seen


@each_log
@each_order
@pytest.mark.parametrize("each", [False, True], ids=["around the whole", "around each"])
def test_a_link_more_stands_around_all_kinds_of_steps(mesh: bool, when: str, each: bool) -> None:
    session, link = Session(mesh, most=None), Seen(each)
    if when == "learnt before":
        session.learn()
    session.executor.chain.links.append(link)
    session.executor.chain.renew()
    if when == "learnt after":
        session.learn()
    # It stands there once, however often the tables are made.
    session.executor.chain.renew()
    session.put(1, torch.ones(4))
    session.put(2, torch.ones(4))
    words = [MUL_, 1, 2.0, STAMP, 9, "cuda:0", OUTER, 1, 2, 3, REDUCE_, 1, 1, 2, GATHER, 2, 1, 4, RAND, 5]
    assert session.issue(*words) == []
    times = 2 if mesh and each else 1
    groups = [session.log.info[number].name for number in (REDUCE_, GATHER)]
    mul, outer, rand = ([name] * times for name in (NAMES[0], NAMES[5], NAMES[2]))
    assert link.names == [*mul, "stamp", *outer, *groups, *rand]
    session.executor.chain.links.remove(link)
    session.executor.chain.renew()
    assert session.log.templates[MUL_] == session.log.info[MUL_].run


def test_a_forgotten_template_does_not_come_back() -> None:
    session = Session(mesh=False)
    session.learn()
    del session.log.templates[MUL_], session.log.info[MUL_]
    session.executor.chain.renew()
    assert MUL_ not in session.log.templates and NORMAL_ in session.log.templates


def test_no_link_drops_an_instruction_of_the_runtime() -> None:
    step = Session(mesh=False).state.own[STAMP]
    with pytest.raises(InternalError, match="stamp cannot be dropped as a template is"):
        step.drop({}, [STAMP, 1], 0, UsageError("no"))
