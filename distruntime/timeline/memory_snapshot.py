"""`dr.profiler.memory_snapshot`: a worker's memory in the format of torch's own viewer, https://pytorch.org/memory_viz.

On a worker with CUDA it is what torch's allocator says there. Elsewhere it is made of the values that live:
torch keeps no account of a CPU's memory. In both, a block of memory names the lines of this program that made
the value in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import Pickler
from typing import Literal, NamedTuple, TypeVar

from ..errors import ProtocolError, UsageError, WaitTimeout, without_our_frames
from ..log.line import Line, file_name, line_number
from ..log.node import Node
from ..session.holders import born_lines
from ..session.requests import Request
from ..session.session import Session, active_session
from ..wire.deadlines import SNAPSHOT
from ..wire.messages import MakeSnapshot, RecordMemory, TakeSnapshot
from ..wire.shield import Lock
from .chrome import Json

T = TypeVar("T")
# A frame, a block, a segment and an event are such dictionaries.
Row = dict[str, Json]
Frames = list[Row]

# No worker brings more bytes than this, and no block names more frames.
_MOST, _FRAMES = 1 << 30, 40
# Torch calls a segment of a mebibyte or less "small".
_SMALL = 1 << 20
# The viewer reads no newer pickle.
_PICKLE = 4
# A worker keeps one snapshot for a session until it has been taken.
_one_at_a_time = Lock()
# Torch keeps so many entries of the history unless the user says otherwise. Each may take several KB.
_ENTRIES = 100_000


class _Value(NamedTuple):
    """Where a value's memory is on its worker."""

    ref: int
    device: int
    address: int
    nbytes: int


@without_our_frames
def memory_snapshot(
    path: str | os.PathLike[str] | None = None, *, node: int = 0, timeout: float | None = None
) -> dict[str, Json]:
    """Return a worker's memory as `torch.cuda.memory._snapshot()` does, and write it to a file.

    The file is for https://pytorch.org/memory_viz and for `torch.cuda._memory_viz`. A block begins its frames
    with the lines of this program that made the value in it. GPU k of the worker is device k. The CPU comes
    after the last GPU, and simulated GPUs are the CPU. Torch's history of events is there where
    `dr.profiler.record_memory_history()` has switched it on, on GPUs. For a CPU the events are those of the
    values that live still, in the order in which this program has made them. Block until the worker
    has brought it.

    Args:
        path: the file to write, as `torch.cuda.memory._dump_snapshot(path)` does; None: none.
        node: the number of the worker.
        timeout: how many seconds the worker may take (60).

    Raises:
        UsageError: the file's folder is not there. PlacementError: there is no such node. NodeFailed: it is
            lost. WaitTimeout: it takes longer.
    """
    to = None if path is None else _checked(path)
    session = active_session()
    session.places.devices(node)
    worker = session.nodes[node]
    # What the program has let go of is freed by what has gathered.
    for log in session.logs:
        log.flush()
    limit = SNAPSHOT.get(timeout)
    if not _one_at_a_time.acquire(timeout=limit):
        raise WaitTimeout(f"another thread's snapshot was not there within {limit:g} s")
    try:
        taken = _taken(session, worker, limit)
    finally:
        _one_at_a_time.release()
    found = _made(taken, born_lines(worker))
    found["distruntime"] = {"node": node, "host": worker.host, "devices": taken["devices"]}
    if to is not None:
        with open(to, "wb") as file:
            Pickler(file, protocol=_PICKLE).dump(found)
    return found


@without_our_frames
def record_memory_history(
    enabled: Literal["all", "state"] | None = "all", *, node: int | None = None, max_entries: int = _ENTRIES
) -> None:
    """Switch torch's history of the memory of workers' GPUs on or off, for `dr.profiler.memory_snapshot`.

    It is `torch.cuda.memory._record_memory_history` on the workers, for all of their sessions. It costs each
    allocation some microseconds there. It does nothing on a worker without CUDA. Block for a round trip.

    Args:
        enabled: "all" keeps who made and freed what; "state" who made what is there; None switches it off.
        node: a node's number; all nodes if left out, but for lost ones.
        max_entries: how many events are kept, the last ones.

    Raises:
        UsageError: `enabled` or `max_entries` is something else. PlacementError: there is no such node.
    """
    if enabled not in ("all", "state", None):
        raise UsageError(f'got enabled={enabled!r}, expected "all", "state" or None')
    if not isinstance(max_entries, int) or max_entries < 1:
        raise UsageError(f"max_entries is a number of events from 1 on, got {max_entries!r}")
    session = active_session()
    asked = [session.ask(worker, RecordMemory, enabled, max_entries) for worker in session.living(node)]
    for request in asked:
        session.value(request)


def _checked(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not found.parent.is_dir() or found.is_dir():
        raise UsageError(
            f"the snapshot cannot be written to {str(path)!r}: "
            + ("that is a folder" if found.is_dir() else f"there is no folder {str(found.parent)!r}. Make it")
        )
    return found


def _taken(session: Session, worker: Node, timeout: float) -> dict[str, Json]:
    """Return what a worker has noted of its memory."""
    deadline = time.monotonic() + timeout
    asked = session.ask(worker, MakeSnapshot)
    size = _answered(session, asked, deadline).nbytes
    if not 0 <= size <= _MOST:
        raise ProtocolError(f"{worker} says that its snapshot has {size:,} bytes")
    data = bytearray()
    while len(data) < size:
        chunk = session.ask(worker, TakeSnapshot, len(data))
        part = _answered(session, chunk, deadline)
        if not part:
            raise ProtocolError(f"the snapshot of {worker} ended too early")
        data += part
    try:
        found = json.JSONDecoder().decode(data.decode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("devices"), dict):
        raise ProtocolError(f"the snapshot of {worker} makes no sense")
    return found


def _answered(session: Session, request: Request[T], deadline: float) -> T:
    if not session.result(request, max(0.0, deadline - time.monotonic())):
        session.requests.discard(request)
        raise WaitTimeout(
            f"{request.node} has not brought a snapshot of its memory in time. Give it longer: "
            "memory_snapshot(timeout=...). A history of many entries takes long: "
            "record_memory_history(max_entries=...)"
        )
    session.raise_for(request)
    return request.value


def _made(taken: Mapping[str, Json], lines: Mapping[int, Line]) -> dict[str, Json]:
    """Return a snapshot in torch's format."""
    values = _values(taken.get("values"))
    frames = _frames_by_address(values, lines)
    devices = taken["devices"]
    count = max((int(key) for key in devices if key.isdigit()), default=0) if isinstance(devices, dict) else 0
    whole = taken.get("torch")
    found: dict[str, Json] = {"segments": [], "device_traces": []}
    if isinstance(whole, dict):
        stacks = taken.get("stacks")
        _put_back(whole, stacks if isinstance(stacks, list) else [])
        found = {**whole}
    segments, traces = found.get("segments"), found.get("device_traces")
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise ProtocolError("a snapshot of torch's has segments and device_traces, and this one has not")
    _name_blocks(segments, frames)
    while len(traces) <= count:
        traces.append([])
    # Torch's allocator does not know of the CPU's memory.
    known = {number for number in range(count)} if isinstance(whole, dict) else set[int]()
    sizes: dict[tuple[int, int], int] = {}
    for value in values:
        key = value.device, value.address
        sizes[key] = max(value.nbytes, sizes.get(key, 0))
    for value in sorted(values):
        key = value.device, value.address
        size = sizes.pop(key, 0)
        if value.device in known or not size or not 0 <= value.device <= count:
            continue
        mine = frames.get(key, [])
        segments.append(_segment(value, size, mine))
        traces[value.device].append(
            {"action": "alloc", "addr": value.address, "size": size, "stream": 0, "frames": mine}
        )
    return found


def _values(rows: Json) -> list[_Value]:
    """Return where values are, as a worker says; raise `ProtocolError` where it says what cannot be."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, list) or len(row) != 5 or not all(type(number) is int for number in row):
            raise ProtocolError(f"{row!r:.80} is no value of a snapshot")
        ref, _, device, address, nbytes = row
        found.append(_Value(ref, device, address, nbytes))
    return found


def _frames_by_address(values: Sequence[_Value], lines: Mapping[int, Line]) -> dict[tuple[int, int], Frames]:
    """Return the frames of the line that made the oldest value in each memory, by device and address."""
    found: dict[tuple[int, int], Frames] = {}
    for value in sorted(values):
        line = lines.get(value.ref)
        if line is not None:
            found.setdefault((value.device, value.address), _frames(line))
    return found


def _frames(line: Line) -> Frames:
    """Return a line and its callers as torch does, the innermost first."""
    _, call, at = line
    found: Frames = []
    while call is not None and len(found) < _FRAMES:
        code = call.code
        found.append(
            {"filename": file_name(code.co_filename), "line": line_number(code, at), "name": code.co_name}
        )
        at, call = call.at, call.outer
    return found


def _name_blocks(segments: Sequence[Json], frames: Mapping[tuple[int, int], Frames]) -> None:
    """Let the blocks of torch's segments begin with the lines of this program."""
    for segment in segments:
        if not isinstance(segment, dict):
            continue
        device, address, blocks = (segment.get(key) for key in ("device", "address", "blocks"))
        if not isinstance(device, int) or not isinstance(address, int) or not isinstance(blocks, list):
            continue
        for block in blocks:
            # The blocks of a segment follow each other.
            mine, size = frames.get((device, address)), block.get("size")
            if mine is not None and str(block.get("state")).startswith("active"):
                block["frames"] = [*mine, *(block.get("frames") or [])]
            address += size if isinstance(size, int) else 0


def _segment(value: _Value, size: int, frames: Frames) -> Row:
    block: Row = {
        "address": value.address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": frames,
    }
    return {
        "device": value.device,
        "address": value.address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "small" if size <= _SMALL else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def _put_back(thing: Json, stacks: Sequence[Json]) -> None:
    """Put each list of frames in the place of its number."""
    if isinstance(thing, dict):
        number = thing.get("frames")
        if type(number) is int:
            thing["frames"] = stacks[number] if 0 <= number < len(stacks) else []
        for key, one in thing.items():
            if key != "frames":
                _put_back(one, stacks)
    elif isinstance(thing, list):
        for one in thing:
            _put_back(one, stacks)
