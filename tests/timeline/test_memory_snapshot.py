"""`dr.profiler.memory_snapshot`: a worker's memory as torch's viewer reads it, with this program's lines."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz as viz

import distruntime as dr
from distruntime.errors import ProtocolError
from distruntime.session.session import Session
from distruntime.timeline import memory_snapshot as module
from distruntime_worker.session import snapshot as worker_side
from traces import line_of

at = partial(line_of, __file__)
# The viewer in the browser knows these words of a pickle, and no others.
READ = (
    "PROTO FRAME EMPTY_DICT EMPTY_LIST EMPTY_TUPLE MARK MEMOIZE SHORT_BINUNICODE BINUNICODE BININT BININT1 "
    "BININT2 LONG1 BINGET LONG_BINGET APPEND APPENDS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 NONE "
    "NEWTRUE NEWFALSE BINFLOAT STOP"
).split()


def flames(text: str) -> str:
    return text


def test_torchs_own_tools_read_it_and_name_the_lines(session: Session, tmp_path: Path) -> None:
    kept = [torch.ones(1000, device="remote") + k for k in range(3)]  # the list
    with dr.on(1):
        other = torch.ones(50, device="remote")
    dr.synchronize()
    path = tmp_path / "x.pickle"
    found: Any = dr.profiler.memory_snapshot(path)
    with open(path, "rb") as file:
        data = file.read()
    assert pickle.loads(data) == found
    assert {word.name for word, _, _ in pickletools.genops(data)} <= set(READ)
    mine = [s for s in found["segments"] if s["total_size"] == 4000]
    (device,) = [int(k) for k, name in found["distruntime"]["devices"].items() if name == "cpu"]
    assert len(mine) == 3 and {s["device"] for s in mine} == {device}
    for segment in mine:
        frame = segment["blocks"][0]["frames"][0]
        assert f"{Path(frame['filename']).name}:{frame['line']}" == at("the list")
    lines = viz.memory(found, format_flamegraph=flames)
    assert lines.count(f"{at('the list')}:") >= 3
    assert "total_reserved" in viz.segsum(found) and "entries" in viz.trace(found)
    assert "Active Memory Timeline" in viz.trace_plot(found)
    assert "Allocator State History" in viz.segment_plot(found)
    assert not [s for s in dr.profiler.memory_snapshot(node=1)["segments"] if s["total_size"] == 4000]  # type: ignore[attr-defined]
    del kept[:], other
    # The worker frees them behind what it runs still.
    dr.synchronize()
    assert not [s for s in dr.profiler.memory_snapshot()["segments"] if s["total_size"] == 4000]  # type: ignore[attr-defined]


@pytest.mark.slow(reason="takes snapshots from many threads, 3 s")
def test_threads_take_theirs_one_after_the_other(session: Session) -> None:
    kept = [torch.ones(100, device="remote") for _ in range(300)]
    dr.synchronize()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: dr.profiler.memory_snapshot(), range(12)))
    assert len({len(one["segments"]) for one in found}) == 1
    assert len(kept) == 300


def test_what_cannot_be_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(dr.errors.UsageError, match="there is no folder"):
        dr.profiler.memory_snapshot(tmp_path / "no" / "x.pickle")
    with pytest.raises(dr.errors.UsageError, match="that is a folder"):
        dr.profiler.memory_snapshot(tmp_path)
    with pytest.raises(dr.errors.PlacementError):
        dr.profiler.memory_snapshot(node=7)
    with pytest.raises(dr.errors.UsageError, match='expected "all", "state" or None'):
        dr.profiler.record_memory_history("some")  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="from 1 on, got 0"):
        dr.profiler.record_memory_history(max_entries=0)
    # It does nothing on a CPU.
    dr.profiler.record_memory_history()
    dr.profiler.record_memory_history(None, node=1)


def test_members_of_a_mesh_have_their_lines(session: Session) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.ones(777, device=mesh.device) + 1  # on the mesh
    dr.synchronize()
    for node in (0, 1):
        found: Any = dr.profiler.memory_snapshot(node=node)
        (mine,) = [s for s in found["segments"] if s["total_size"] == 777 * 4]
        assert at("on the mesh").endswith(f":{mine['blocks'][0]['frames'][0]['line']}")
    del x


def _of_cuda() -> dict[str, Any]:
    """Return what `torch.cuda.memory._snapshot()` gives, in short: a segment of three blocks."""
    there = [{"filename": "worker.py", "line": 1, "name": "run"}]
    blocks = [
        {"address": 4096, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": there},
        {"address": 4608, "size": 512, "requested_size": 512, "state": "inactive", "frames": []},
        {"address": 5120, "size": 512, "requested_size": 512, "state": "active_allocated", "frames": there},
    ]
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 1536,
        "stream": 0,
        "blocks": blocks,
        "frames": there,
    }
    event = {"action": "alloc", "addr": 4096, "size": 400, "stream": 0, "frames": there}
    return {"segments": [{**segment, "segment_pool_id": (0, 0)}], "device_traces": [[event]]}


def test_what_torch_says_of_cuda_keeps_its_frames_and_gets_the_lines() -> None:
    whole, stacks = _of_cuda(), list[object]()
    worker_side._set_apart(whole, stacks, {})
    assert len(stacks) == 2
    values = [[7, -1, 0, 4096, 400], [8, -1, 1, 99, 40]]
    taken = {"values": values, "torch": whole, "stacks": stacks, "devices": {"0": "cuda:0", "1": "cpu"}}
    line: Any = (1, _call(), 0)
    found: Any = module._made(json.loads(json.dumps(taken)), {7: line})
    first, second, third = found["segments"][0]["blocks"]
    assert [frame["name"] for frame in first["frames"]] == ["_call", "run"]
    assert second["frames"] == [] and [frame["name"] for frame in third["frames"]] == ["run"]
    # Torch knows nothing of the CPU, which comes after the last GPU.
    assert [s["device"] for s in found["segments"]] == [0, 1] and len(found["device_traces"]) == 2
    assert found["device_traces"][0][0]["frames"][0]["name"] == "run"
    assert "segments: 2" in viz.segsum(found)


def _call() -> Any:
    from_here: Any = type("Call", (), {"code": _call.__code__, "outer": None, "at": 0})
    return from_here()


@pytest.mark.parametrize(
    "values",
    [[["a", 0, 0, 0, 0]], [[1, 2]], [3], [[True, 0, 0, 0, 0]]],
    ids=["text", "short", "number", "bool"],
)
def test_a_worker_that_says_what_cannot_be_is_refused(values: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="is no value of a snapshot"):
        module._made({"values": values, "torch": None, "stacks": [], "devices": {"0": "cpu"}}, {})


def test_the_history_is_switched_on_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def switch(enabled: object, **more: object) -> None:
        said.append((enabled, more))

    devices = SimpleNamespace(asynchronous=[torch.device("cuda:0")])
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", switch)
    state: Any = SimpleNamespace(devices=devices)
    worker_side.record(state, "all", 10)
    worker_side.record(state, None, 10)
    devices.asynchronous = []
    worker_side.record(state, "all", 10)
    assert said == [
        ("all", {"stacks": "python", "max_entries": 10}),
        (None, {"stacks": "python", "max_entries": 10}),
    ]
    with pytest.raises(dr.errors.ConfigurationError, match="got the memory history 'much'"):
        worker_side.record(state, "much", 10)


def test_simulated_gpus_are_the_cpu(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=2)
    x = torch.ones(1234, device=dr.place(0, "cuda:1"))
    dr.synchronize()
    found: Any = dr.profiler.memory_snapshot()
    assert found["distruntime"]["devices"] == {"0": "cuda:0", "1": "cuda:1", "2": "cpu"}
    assert [s["device"] for s in found["segments"] if s["total_size"] == 1234 * 4] == [2]
    assert len(found["device_traces"]) == 3
    del x
