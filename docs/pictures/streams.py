"""Draw `streams.svg`: what two streams of one node and one of another did, as `dr.trace` recorded it.

    $ python docs/pictures/streams.py       (in the root of a clone)

It runs the program below on two workers of this machine, reads the trace and draws each slice where it was.
"""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import torch

import distruntime as dr

PICTURE = Path(__file__).with_name("streams.svg")
LEFT, RIGHT, TOP, ROW, BAR = 150, 880, 64, 56, 26
STYLE = """
  .page { fill: #ffffff; } text { fill: #1f2328; font: 13px sans-serif; } .small { font-size: 11px; }
  .axis { stroke: #8c959f; } .computes { fill: #2f81f7; } .moves { fill: #1a7f37; }
  .waits { fill: #d0d7de; } .issues { fill: #bf8700; } .on { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } text { fill: #e6edf3; } .waits { fill: #3d444d; } .moves { fill: #238636; }
    .on { fill: #ffffff; }
  }
"""


def program(
    batches: list[torch.Tensor], weight: torch.Tensor, prepare: dr.Stream, compute: dr.Stream
) -> None:
    """Prepare each batch on one stream of node 1 and compute with it on another. Node 0 waits for the end."""
    for batch in batches:
        with dr.stream(prepare):
            there = batch.to("remote").sort(dim=1).values
        with dr.stream(compute):
            (there @ weight).relu_()
    done = compute.record_event()
    done.wait(dr.current_stream(0))
    x = torch.ones(800, 800, device=dr.place(0))
    dr.fetch((x @ x)[0, 0])


def record(path: Path) -> list[dict[str, Any]]:
    """Run the program twice, and return the slices of the second time."""
    with dr.init_master_worker(world_size=2, quiet=True):
        prepare, compute = dr.Stream(1), dr.Stream(1)
        batches = [torch.randn(700, 700) for _ in range(4)]
        weight = torch.randn(700, 1200, device=dr.place(1))
        program(batches, weight, prepare, compute)
        dr.synchronize()
        with dr.trace(str(path), quiet=True):
            program(batches, weight, prepare, compute)
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def rows(events: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of the picture, each with its name and its slices."""
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}

    def slices(node: str, stream: str) -> list[dict[str, Any]]:
        return [
            e
            for e in events
            if e["ph"] == "X"
            and process[e["pid"]].startswith(node)
            and thread[e["pid"], e["tid"]].startswith(stream)
            and e["name"] != "wait: the end of the trace"
            and not e["name"].startswith("send 0")
        ]

    return [
        ("your process", slices("master", "the traced thread")),
        ("node 1, prepare", slices("node 1", "stream 1")),
        ("node 1, compute", slices("node 1", "stream 2")),
        ("node 0, stream 0", slices("node 0", "stream 0")),
    ]


def kind(event: dict[str, Any]) -> str:
    """Return the class of a slice, which is its colour."""
    if event["cat"] in ("read", "wait"):
        return "waits"
    if event["cat"] == "send":
        return "issues"
    return "computes" if event["cat"] == "operator" else "moves"


def draw(found: list[tuple[str, list[dict[str, Any]]]]) -> str:
    end = max(e["ts"] + e["dur"] for _, slices in found for e in slices)
    scale = (RIGHT - LEFT) / end
    height = TOP + ROW * len(found) + 56
    words = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img">',
        "<title>Two streams of node 1 and one of node 0, as dr.trace recorded them</title>",
        f'<style>{STYLE}</style><rect class="page" width="900" height="{height}"/>',
    ]
    legend = [
        ("issues", "sends"),
        ("moves", "uploads and answers"),
        ("computes", "computes"),
        ("waits", "waits"),
    ]
    for k, (name, text) in enumerate(legend):
        words.append(f'<rect class="{name}" x="{LEFT + 165 * k}" y="20" width="14" height="14"/>')
        words.append(f'<text x="{LEFT + 20 + 165 * k}" y="32">{text}</text>')
    for k, (name, slices) in enumerate(found):
        y = TOP + ROW * k
        words.append(f'<text x="12" y="{y + 18}">{name}</text>')
        for e in sorted(slices, key=lambda e: kind(e) != "waits"):
            x, width = LEFT + e["ts"] * scale, max(1.0, e["dur"] * scale)
            words.append(
                f'<rect class="{kind(e)}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">'
                f"<title>{escape(e['name'])}, {e['dur'] / 1000:.2f} ms</title></rect>"
            )
            short = e["name"].removeprefix("aten.").removeprefix("wait: ").replace("explicit ", "")
            short = {
                "a wait for another node": "waits for the event",
                "a wait for another stream": "waits for prepare",
                "fetch": "waits for the fetch",
            }.get(short, short)
            if width > 7 * len(short):
                style = "small" if kind(e) == "waits" else "small on"
                words.append(f'<text class="{style}" x="{x + 4:.1f}" y="{y + 17}">{escape(short)}</text>')
    y = TOP + ROW * len(found)
    words.append(f'<line class="axis" x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}"/>')
    step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 1000) if end / 1000 / s <= 8)
    for ms in range(0, int(end / 1000) + 1, step):
        x = LEFT + ms * 1000 * scale
        words.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 6}"/>')
        words.append(f'<text class="small" x="{x:.1f}" y="{y + 22}" text-anchor="middle">{ms} ms</text>')
    return "\n".join([*words, "</svg>", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(draw(rows(record(Path(folder) / "trace.json"))), encoding="utf-8")
