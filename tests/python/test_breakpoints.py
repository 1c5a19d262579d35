"""`breakpoint()` in a function opens a prompt here, in the main thread's next wait."""

from __future__ import annotations

import builtins
import pdb
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from processes import until

# From Python 3.13 on, the debugger stops at the breakpoint's own line, and not at the one behind it.
AT_ITSELF = sys.version_info >= (3, 13)


class Script:
    """Types lines at prompts; what it was asked is kept."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines, self.asked = list(lines), list[str]()

    def __call__(self, prompt: str = "") -> str:
        self.asked.append(prompt)
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, session: object) -> Iterator[Callable[..., Script]]:
    """Types lines at the prompts of this test."""

    def types(*lines: str | BaseException) -> Script:
        script = Script(*lines)
        monkeypatch.setattr(builtins, "input", script)
        return script

    yield types


def stops(x: int) -> int:
    y = x + 1
    breakpoint()
    return y * 2


def test_a_prompt_reads_and_changes_the_functions_variables(
    typed: Callable[..., Script], capsys: pytest.CaptureFixture[str]
) -> None:
    script = typed("p x, y", "y = 10", "c")
    assert dr.fetch(dr.remote(stops)(3, node=1)) == 20
    assert script.asked == ["[node 1] (Pdb) "] * 3
    out = capsys.readouterr().out
    assert "[node 1] (3, 4)\n" in out and "stops()" in out
    assert f"-> {'breakpoint()' if AT_ITSELF else 'return y * 2'}\n" in out


def test_a_wait_for_anything_opens_it(typed: Callable[..., Script]) -> None:
    script = typed("c", "c")
    stopped = dr.remote(stops, returns=object)(1, node=1)
    dr.synchronize()
    assert len(script.asked) == 1 and dr.fetch(stopped) == 4

    def by_name(x: torch.Tensor) -> torch.Tensor:
        pdb.set_trace()
        return x + 1

    assert dr.remote(by_name)(torch.ones(1, device=REMOTE)).item() == 2.0
    assert len(script.asked) == 2


def test_who_steps_out_of_a_function_does_not_step_through_the_worker(typed: Callable[..., Script]) -> None:
    for _ in range(5):
        script = typed(*["n"] * (3 if AT_ITSELF else 2))
        assert dr.fetch(dr.remote(stops, returns=object)(1, node=1)) == 4
        assert script.lines == []
    # The thread is not traced any more.
    assert dr.fetch(dr.remote(sys.gettrace, returns=object)(node=1)) is None
    typed()
    assert dr.fetch(dr.remote(breakpoint, returns=object)(node=1)) is None


@pytest.mark.parametrize("line", ["q", EOFError()])
def test_the_end_of_the_input_ends_the_function(typed: Callable[..., Script], line: Any) -> None:
    typed(line)
    with pytest.raises(dr.errors.RemoteError, match="stops was ended at its breakpoint"):
        dr.fetch(dr.remote(stops, returns=object)(1, node=1))
    assert dr.fetch(dr.remote(len)([1], node=1)) == 1


def test_ctrl_c_leaves_the_prompt_and_the_next_wait_opens_it_again(typed: Callable[..., Script]) -> None:
    script = typed(KeyboardInterrupt(), "c")
    stopped = dr.remote(stops, returns=object)(1, node=1)
    with pytest.raises(KeyboardInterrupt):
        dr.fetch(stopped)
    assert dr.fetch(stopped) == 4
    assert script.asked == ["[node 1] (Pdb) "] * 2


def test_who_does_not_wait_is_told(typed: Callable[..., Script], capsys: pytest.CaptureFixture[str]) -> None:
    typed("c")
    stopped = dr.remote(stops, returns=object)(1, node=1)
    shown: list[str] = []

    def told() -> bool:
        shown.append(capsys.readouterr().err)
        return "[node 1] a function stands at a breakpoint: dr.synchronize() opens" in "".join(shown)

    until(told)
    assert dr.fetch(stopped) == 4


def test_a_breakpoint_outlasts_the_timeout_of_its_call(typed: Callable[..., Script]) -> None:
    typed("import time; time.sleep(0.2)", "c")
    assert dr.fetch(dr.remote(stops, returns=object, timeout=0.15)(1, node=1)) == 4


def test_cancelling_ends_a_function_at_its_breakpoint(typed: Callable[..., Script]) -> None:
    typed()
    stopped = dr.remote(stops, returns=object)(1, node=1)
    until(lambda: active_session().requests.output._prompts)
    dr.cancel(1)
    until(lambda: not active_session().requests.output._prompts)
    with pytest.raises(dr.errors.StreamCancelled, match="stops was interrupted"):
        dr.fetch(stopped)


def test_the_end_of_the_session_ends_it(fresh_session: Callable[..., Any]) -> None:
    inner = fresh_session(world_size=1)
    stopped = dr.remote(stops, returns=object)(1)
    until(lambda: inner.requests.output._prompts)
    with pytest.raises(dr.errors.RemoteError, match="stops was ended at its breakpoint"):
        dr.shutdown()
    del stopped
