"""Who looks at a training with a fault finds it: a slow read, a slow node, a leak, a stuck collective."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import planted
from distruntime.cluster import named_sessions
from distruntime.cluster.observe import Answer, Observer
from distruntime.timeline.top import Looks, strip_of, strips
from distruntime.wire.messages import (
    Activity,
    AskActivity,
    JointRow,
    SeenSession,
    StreamRow,
)
from planted import line_of
from processes import Child, until

pytestmark = pytest.mark.usefixtures("own_state")


@contextmanager
def shown(fault: str) -> Iterator[Callable[[], str]]:
    """Yield what `top` shows, each time anew, of a training with a fault."""
    with Child(planted.train, fault) as child:
        child.expect("trains", 90)
        entry = named_sessions.read("planted")
        assert entry is not None
        with Observer(entry.workers) as observer:
            looks = Looks()

            def look() -> str:
                # The lines are wrapped.
                text = looks.text(observer.ask(AskActivity, 30.0), time.monotonic())
                return re.sub(r"\n   +", " ", text)

            yield look


def note_of(text: str, *parts: str) -> str:
    """Return the note of what stands out that has these parts; nothing if there is none."""
    notes = [line for line in text.splitlines() if line.startswith(" ! ")]
    return next((note for note in notes if all(part in note for part in parts)), "")


@pytest.mark.slow(reason="trains with each of four faults, with two workers each")
@pytest.mark.parametrize(
    "fault, parts",
    [
        ("read", ["the program waits at", line_of("the slow read"), "dr.fetch([...])"]),
        ("node", ["node 1 is late", "node 0 waits for it", "for_so_long", line_of("the slow node")]),
        ("leak", ["session planted holds", "more than", "dr.trace"]),
        (
            "stuck",
            [
                *["all_reduce of group", line_of("the stuck collective"), "node 0 waits", "for node 1"],
                *["which runs python.call for_so_long", line_of("what keeps it")],
            ],
        ),
    ],
)
def test_top_names_what_was_planted(fault: str, parts: list[str]) -> None:
    with shown(fault) as look:
        until(lambda: note_of(look(), *parts), 90)
        assert "# computing" in look()


@pytest.mark.slow(reason="traces each of two faults, in a process and two workers each")
@pytest.mark.parametrize(
    "fault, parts",
    [
        ("read", ["40 waits for item at", line_of("the slow read"), "reads: Read once"]),
        ("leak", ["more at the end than at the begin", "40 more tensors", line_of("the leak")]),
    ],
)
def test_a_trace_names_what_was_planted(fault: str, parts: list[str], tmp_path: Path) -> None:
    # tests/timeline/test_why_slow.py has a slow node and a stuck collective.
    with Child(planted.trace, fault, str(tmp_path / "x.json")) as child:
        child.expect("traced", 90)
        text = "\n".join(child.printed)
    assert [part for part in parts if part not in text] == [], text


# -- by hand -------------------------------------------------------------------------------------------------


def stream(seen: str, running: str | None = None, seconds: float = 0.0, **more: object) -> StreamRow:
    return StreamRow("stream 0", seen, running, seconds, str(more.get("line", "")), more.get("joint"))  # type: ignore[arg-type]


def answer(node: int, row: StreamRow, held: int = 0, at: str = "", waits: str = "") -> Answer[Activity]:
    seen = SeenSession("day", node, {"cpu": held}, [row], at, waits)
    return Answer(f"tcp://w{node}", Activity(0.05, [seen]))


def text(*looks: list[Answer[Activity]]) -> str:
    """Return what is shown after these looks, one a second."""
    looking, found = Looks(), ""
    for second, answers in enumerate(looks):
        found = looking.text(answers, float(second))
    return re.sub(r"\n   +", " ", found)


def test_a_member_that_does_not_answer_is_named() -> None:
    joint = JointRow("all_reduce of group 3", "all_reduce of group 3, 5", [0, 1, 2], 12.0, "a.py:7   x")
    waiting = stream("g" * 40, "all_reduce of group 3", 12.0, joint=joint)
    both = [answer(0, waiting), answer(1, stream("m" * 40)), answer(2, waiting)]
    gone = Answer("tcp://w1", None, "tcp://w1 did not answer")
    found = text(both, [both[0], gone, both[2]])
    assert note_of(found, "all_reduce of group 3 at a.py:7", "nodes 0, 2 waits 12 s for node 1", "not answer")
    assert "was given no such operation yet" in text(both)
    # All are there.
    assert "!" not in text([answer(0, waiting), answer(1, waiting), answer(2, waiting)])
    # Nobody has said where node 1 is.
    assert "not among these workers" in text([both[0], both[2]])


def test_a_strip_shows_what_a_stream_was_seen_at_most() -> None:
    assert strip_of("c" * 50 + "m" * 46, 0.05) == ("#" * 25 + "m" * 23, pytest.approx(4.8))
    assert strip_of("", 0.05) == ("", 0.0)
    assert strip_of("sgqcm.?", 0.1)[0] == "sgq#m.?"
    assert list(strips(" |##mg| x |..|")) == [(2, 4, "#"), (4, 5, "m"), (5, 6, "g"), (11, 13, ".")]


def test_what_does_not_stand_out_has_no_note() -> None:
    busy = stream("c" * 100, "aten::mm", 0.1)
    steady = [[answer(0, busy, 1 << 30, "a.py:1   x", "")] for _ in range(8)]
    assert "!" not in text(*steady)
    # What is given back and taken again does not grow.
    saw = [[answer(0, busy, (1 << 30) + (k % 3 << 22))] for k in range(9)]
    assert "!" not in text(*saw)
    # A program that computes by itself reads nothing.
    thinks = [[answer(0, stream("m" * 100), 0, "a.py:1   think()", "")] for _ in range(8)]
    assert "!" not in text(*thinks) and "in 8 of 8 looks the program was at a.py:1" in text(*thinks)
    assert text([]) == "" and text([Answer("tcp://a", None, "why")]) == ""


def test_memory_that_grows_stands_out_however_quick_the_looks_are() -> None:
    busy = stream("c" * 100)
    # Each step makes 4 MiB and frees it, and every fourth step keeps one.
    grows = [[answer(0, busy, (k // 4 << 20) + (k % 2 << 22))] for k in range(60)]
    assert note_of(text(*grows), "session day holds", "and grows")
    assert "!" not in text(*[[answer(0, busy, k % 2 << 22)] for k in range(60)])
    # A model came at the tenth look.
    assert "!" not in text(*[[answer(0, busy, (k // 10 > 0) << 30)] for k in range(60)])


def test_what_a_worker_says_cannot_steer_a_terminal() -> None:
    row = stream("c\x1b", "\x1b[2J", 1.0, line="\x1b]0;a\a")
    found = text([answer(0, row, 1, "\x1b[31m", "\x1b[2J")])
    assert all(c == "\n" or c.isprintable() for c in found)


def test_many_streams_are_counted() -> None:
    rows = [stream("c" * 4) for _ in range(20)]
    seen = SeenSession("day", 0, {}, rows, "", "")
    found = text([Answer("tcp://a", Activity(0.05, [seen]))])
    assert found.count("|####|") == 16 and "4 more" in found and "holds nothing" in found
