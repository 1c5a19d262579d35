"""The log of a node that has streams, while finalizers issue something in its own code."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from distruntime.log.tape import StretchedLog, put


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_what_a_finalizer_issues_while_a_segment_is_cut_off_is_in_its_stretch(at: int, stream: int) -> None:
    log = StretchedLog(lambda ref: None, lambda: None, range(12), [[0, 0], [1, 7]])
    node: Any = SimpleNamespace(words=log, base=0, latest=())
    calls = 0

    def strike(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if calls == at + 1:
                put(node, stream, [98, 99], instruction=True)

    before = sys.getprofile()
    sys.setprofile(strike)
    try:
        rest = log.rest(12)
        # This is how a log is cut in `Log.flush`.
        while len(rest) + 12 != len(log):
            rest = log.rest(12)
    finally:
        sys.setprofile(before)
    assert rest.stretched(len(rest)) == ([[stream, 2]] if rest else [])
    assert [*rest] == [*log][12:] and rest.size == len(rest)
