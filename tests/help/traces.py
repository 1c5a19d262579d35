"""Reads a trace's file as the tests want it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple


class Slice(NamedTuple):
    name: str
    kind: str
    process: str
    thread: str
    began: float
    ended: float
    args: dict[str, Any]


class Read(NamedTuple):
    """A trace: its slices with the names of their processes and threads, its arrows, its notes."""

    slices: list[Slice]
    flows: list[list[dict[str, Any]]]
    notes: list[dict[str, Any]]
    about: dict[str, Any]
    events: list[dict[str, Any]]

    def of(self, process: str, *kinds: str) -> list[Slice]:
        """Return the slices of a process, of some kinds or of all."""
        return [s for s in self.slices if s.process.startswith(process) and (not kinds or s.kind in kinds)]

    def named(self, name: str) -> list[Slice]:
        return [s for s in self.slices if s.name == name]


def read_trace(path: Path) -> Read:
    text = (
        gzip.open(path, "rt", encoding="utf-8").read()
        if path.name.endswith(".gz")
        else path.read_text(encoding="utf-8")
    )
    whole = json.loads(text)
    events = whole["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [
        Slice(
            e["name"],
            e["cat"],
            processes[e["pid"]],
            threads[e["pid"], e["tid"]],
            e["ts"],
            e["ts"] + e["dur"],
            e["args"],
        )
        for e in events
        if e["ph"] == "X"
    ]
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    notes = [e for e in events if e["ph"] == "i"]
    return Read(slices, list(flows.values()), notes, whole["otherData"], events)


def line_of(file: str, text: str) -> str:
    """Return "test_trace.py:12" of the line of a file that has a text as its comment, and no other has."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (number,) = [k for k, line in enumerate(lines, 1) if line.endswith(f"  # {text}")]
    return f"{Path(file).name}:{number}"
