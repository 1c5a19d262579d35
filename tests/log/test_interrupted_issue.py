"""What Ctrl-C leaves that strikes amid an operation: it has happened or not, and every read says so alike.

The worker's log stands still meanwhile, so a read that does not wait for what is in the log would find the
old value. The place of the stroke is any at which Python lets a signal's handler run: see strikes.py.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import Session, active_session
from distruntime.streams.stream import current_stream
from distruntime.wire.shared import LEAST
from distruntime.wire.shield import shield
from processes import blocked, until
from strikes import Struck, strikes


class Adder:
    """Keeps a tensor, and adds to it."""

    def __init__(self, kept: torch.Tensor | None = None) -> None:
        self.kept = kept

    def keep(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def add(self) -> None:
        if self.kept is not None:
            self.kept.add_(1)


def _add(w: torch.Tensor) -> None:
    w.add_(1)


ADDER = dr.remote(Adder)
ADD = dr.remote(_add, returns=object)
State = Any


def _zeros(*names: str, count: int = 3) -> State:
    return SimpleNamespace(**{name: torch.zeros(count).to(REMOTE) for name in names})


def _kept() -> State:
    state = _zeros("w")
    state.adder = ADDER(state.w)
    return state


def _unkept() -> State:
    state = _zeros("w")
    state.adder = ADDER()
    return state


def _square() -> State:
    return SimpleNamespace(w=torch.arange(4.0).view(2, 2).to(REMOTE))


def _seeded() -> State:
    torch.manual_seed(3)
    return _zeros("w")


def _sent(count: int) -> State:
    return SimpleNamespace(w=torch.zeros(count).to(REMOTE), y=torch.ones(count))


def _put(name: str, make: Callable[[State], object]) -> Callable[[State], object]:
    return lambda state: setattr(state, name, make(state))


def _let_go(state: State) -> None:
    state.v = None
    state.w.add_(1)


def _let_go_and_resize(state: State) -> None:
    state.v = None
    state.w.resize_(2)


@dataclass(frozen=True)
class Case:
    """A state, an operation on it that is struck, and one behind it that is not."""

    make: Callable[[], State]
    act: Callable[[State], object]
    then: Callable[[State], object] = lambda state: None
    names: Sequence[str] = ("w",)
    # It asks its worker where it is not known, which stands still.
    asks: bool = False

    def look(self, state: State) -> list[torch.Tensor]:
        return [getattr(state, name) for name in self.names]


CASES = {
    "add_": Case(lambda: _zeros("w"), lambda s: s.w.add_(1)),
    "plus": Case(lambda: _zeros("w"), _put("w", lambda s: s.w + 1)),
    "out": Case(lambda: _zeros("w", "o"), lambda s: torch.add(s.o, 1, out=s.o), names=("o",)),
    "view": Case(lambda: _zeros("w"), lambda s: s.w.view(-1)[0:2].add_(1)),
    "several": Case(
        lambda: _zeros("a", "b", "c"),
        lambda s: torch._foreach_add_([s.a, s.b, s.c], 1),
        names=("a", "b", "c"),
    ),
    "copy_": Case(lambda: _zeros("w"), lambda s: s.w.copy_(s.w + 1)),
    "upload": Case(lambda: _sent(3), lambda s: s.w.copy_(s.y)),
    "large_upload": Case(lambda: _sent(9000), lambda s: s.w.copy_(s.y)),
    "new_upload": Case(lambda: _sent(3), _put("w", lambda s: s.y.to(REMOTE))),
    "metadata": Case(_square, lambda s: s.w.t_()),
    "resize": Case(lambda: _zeros("w"), lambda s: s.w.resize_(2)),
    "set_": Case(
        lambda: SimpleNamespace(**vars(_square()), y=torch.ones(2, 2).to(REMOTE)), lambda s: s.w.set_(s.y)
    ),
    "factory": Case(lambda: _zeros("w"), _put("w", lambda s: torch.ones(3, device=REMOTE))),
    "random": Case(_seeded, lambda s: s.w.uniform_()),
    "free": Case(lambda: _zeros("w", "v"), _let_go),
    # On streams the frees of another stream stand behind the instruction.
    "free_and_resize": Case(lambda: _zeros("w", "v"), _let_go_and_resize),
    "function": Case(lambda: _zeros("w"), lambda s: ADD(s.w), asks=True),
    "method": Case(_kept, lambda s: s.adder.add(), asks=True),
    "kept": Case(_unkept, lambda s: s.adder.keep(s.w), lambda s: s.adder.add(), asks=True),
    "new_object": Case(_unkept, _put("adder", lambda s: ADDER(s.w)), lambda s: s.adder.add(), asks=True),
}


def _values(found: Sequence[torch.Tensor]) -> list[object]:
    return [value.tolist() for value in found]


@contextmanager
def _waiting(stream: dr.Stream | None) -> Iterator[None]:
    """Keep the worker from getting further, where there is a stream."""
    with nullcontext() if stream is None else blocked(stream):
        yield


def _allowed(case: Case) -> list[list[object]]:
    """Return the values after the case has run not at all, once and twice."""
    state, found = case.make(), []
    for _ in range(3):
        found.append(_values(dr.fetch(case.look(state))))
        case.act(state)
        case.then(state)
    return found


def _attack(
    case: Case,
    *,
    known: bool = True,
    sends: bool = True,
    streams: Sequence[dr.Stream] = (),
    begin: int = 1,
    step: int = 1,
) -> int:
    """Strike a case at every `step`-th place, and return how often.

    `known` is whether its signatures are, and `sends` whether each instruction is sent at once. It runs on
    the first of two streams, and is read on the other one.
    """
    state: Any = case.look(case.make())[0]
    node, place = active_session().nodes[0], state._handle.place
    allowed, count = _allowed(case), 0
    on, behind = (streams[0], streams[1]) if streams else (nullcontext(), nullcontext())
    gate = None if case.asks and not known else streams[0] if streams else current_stream()
    for strike in strikes(begin, step):
        state = case.make()
        dr.synchronize()
        if not known:
            place.clear_signatures()
        with _waiting(gate):
            node.flush()
            if sends:
                node.enough = 0
            raised = False
            try:
                with on, strike:
                    case.act(state)
            except Struck:
                raised = True
            # Whatever stands around it lets it through. Only pyzmq drops it where it lets go of a payload's
            # frame.
            assert raised == bool(strike.struck) or strike.struck.endswith(" in flush")
            with behind:
                case.then(state)
                first = dr.fetch_async([value + 0 for value in case.look(state)])
            second = dr.fetch_async(case.look(state))
        found = _values(first.result(60))
        assert found in allowed[:2], strike.struck
        assert found == _values(second.result(60)) == _values(dr.fetch(case.look(state))), strike.struck
        count += strike.came
        # What is kept is kept twice then.
        if strike.came and case.then is Case.then:
            case.act(state)
            assert _values(dr.fetch(case.look(state))) == allowed[allowed.index(found) + 1], strike.struck
    return count


@pytest.mark.parametrize("name", ["add_", "several", "metadata", "function", "kept"])
def test_an_interrupted_operation_has_happened_or_not(session: object, name: str) -> None:
    assert _attack(CASES[name], begin=3, step=7) > 20


def test_an_interrupted_operation_among_streams_has_happened_or_not(session: object) -> None:
    streams = dr.Stream(), dr.Stream()
    assert _attack(CASES["add_"], streams=streams, begin=3, step=13) > 20


@pytest.mark.filterwarnings("ignore:Exception ignored in. 'zmq:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow(reason="strikes each operation at every place that Python allows")
@pytest.mark.parametrize("how", ["gathered", "sent", "new", "on streams"])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_interrupted_everywhere(session: object, name: str, how: str) -> None:
    streams = (dr.Stream(), dr.Stream()) if how == "on streams" else ()
    # What finds out what a new call gives changes nothing.
    step = {"gathered": 1, "sent": 1, "new": 11, "on streams": 3}[how]
    assert _attack(CASES[name], known=how != "new", sends=how != "gathered", streams=streams, step=step) > 20


def _read_and_copy(w: torch.Tensor) -> list[object]:
    w.add_(1)
    there = w.to("remote:1")
    return [w.sum().item(), there.tolist()]


def _require_answered(opened: Session, struck: str) -> None:
    """Fail unless nothing is asked any more: the pump would look for an answer a thousand times a second."""
    try:
        until(lambda: len(opened.requests) == 0)
    except AssertionError:
        asked = [(one.form, one.node, one.done, one.lost) for one in opened.requests._open.values()]
        pump = traceback.format_stack(sys._current_frames()[opened.pump.thread.ident or 0])
        pytest.fail(f"struck at {struck}; asked: {asked}; reads: {opened.requests._reader}; {''.join(pump)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_an_interrupted_read_leaves_the_session_as_it_was(session: object, number: int) -> None:
    """Reads and copies between nodes, by Ctrl-C, and by a timeout whose handler raises."""
    opened, came = active_session(), 0
    _read_and_copy(torch.zeros(3).to(REMOTE))
    _require_answered(opened, "nothing has struck yet")
    for strike in strikes(begin=2, step=17, number=number):
        w = torch.zeros(3).to(REMOTE)
        raised = False
        try:
            with strike:
                _read_and_copy(w)
        except Struck:
            raised = True
        assert raised == bool(strike.struck)
        done = w[0].item()
        assert done in (0.0, 1.0), strike.struck
        assert _read_and_copy(w) == [3 * (done + 1), [done + 1] * 3], strike.struck
        _require_answered(opened, strike.struck)
        assert shield._depth == 0 and not opened.in_moment, strike.struck
        came += strike.came
    assert came > 20


# Python drops what strikes where the loan of shared memory ends.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_read_through_shared_memory_leaves_nothing_asked(session: object) -> None:
    """A worker that was asked writes into it: such a request stays open until the worker has answered."""
    opened, came = active_session(), 0
    x: Any = torch.ones(LEAST).to(REMOTE)
    x.cpu()
    _require_answered(opened, "nothing has struck yet")
    for strike in strikes(step=7):
        with suppress(Struck), strike:
            x.cpu()
        assert x.cpu().sum() == LEAST, strike.struck
        _require_answered(opened, strike.struck)
        came += strike.came
    assert came > 20


def test_an_interrupted_operation_of_a_mesh_comes_before_what_a_member_runs(session: object) -> None:
    """Its words stood in a log that was not active, where a read overtook them."""
    mesh, came = dr.init_device_mesh("cpu", (2,)), 0
    for strike in strikes(step=3):
        x: Any = dr.from_shards([torch.zeros(3).to(f"remote:{k}") for k in range(2)], mesh)
        dr.synchronize()
        with suppress(Struck), strike:
            x.add_(1)
        found = [x.member(k).cpu()[0].item() for k in range(2)]
        assert found in ([0.0, 0.0], [1.0, 1.0]), strike.struck
        x.add_(1)
        came += strike.came
    assert came > 20


class Mine(NotImplementedError):
    """A meta kernel says by such an error that it cannot tell."""


@pytest.mark.parametrize("kind", [Mine, ValueError, RuntimeError, KeyboardInterrupt])
def test_what_a_handler_raises_in_a_kernel_is_no_word_of_the_kernel(
    session: object, kind: type[BaseException]
) -> None:
    x: Any = torch.ones(3).to(REMOTE)
    places = set()
    for strike in strikes(step=7, kind=kind):
        x._handle.place.clear_signatures()
        try:
            with strike:
                torch.nn.functional.softmax(x, 0)
        except kind as error:
            assert type(error) is kind and str(error) == strike.struck != ""
        else:
            assert not strike.struck
        places.add(strike.struck)
        # Among streams a log that was never sent is longer each time, and so is the way through it.
        dr.synchronize()
    assert any("/torch/" in place for place in places) and x.tolist() == [1.0] * 3


@contextmanager
def _compilers_frames() -> Iterator[None]:
    """Let Python call functions as it does once a compiler, such as torch's, looks at frames.

    Then a signal's handler may run behind each call of one, too.
    """
    before = set_eval_frame(False)
    try:
        yield
    finally:
        set_eval_frame(before)


@pytest.mark.parametrize("name", ["add_", "several", "metadata", "view", "out"])
def test_an_interrupted_operation_behind_a_compiler(session: object, name: str) -> None:
    with _compilers_frames():
        assert _attack(CASES[name], begin=2, step=7) > 20


@pytest.mark.parametrize("frames", [nullcontext, _compilers_frames])
@pytest.mark.parametrize("known", [True, False])
def test_what_was_written_is_noted_for_autograd(
    session: object, known: bool, frames: Callable[[], AbstractContextManager[None]]
) -> None:
    """Whoever has saved what an interrupted operation has written hears of it."""
    refused = 0
    for strike in strikes():
        w = torch.ones(3).to(REMOTE)
        x = torch.ones(3, device=REMOTE, requires_grad=True)
        y = (x * w).sum()
        if not known:
            w._handle.place.clear_signatures()  # type: ignore[attr-defined]
        try:
            with frames(), strike:
                w.add_(1)
        except Struck:
            pass
        written = w.tolist() == [2.0] * 3
        try:
            y.backward()  # type: ignore[no-untyped-call]
            assert not written, strike.struck
        except RuntimeError as error:
            refused += 1
            assert "modified by an inplace operation" in str(error)
    assert refused > 1
