"""Implicit waits of the master for workers, by line, and the mode that warns of them or forbids them."""

from __future__ import annotations

import html
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

from ..errors import UsageError, without_our_frames
from ..log.line import Line, code_text, line_number, line_text, place_of, shown_line, user_line
from ..wire.shield import RLock
from .tables import table_html, table_text

# What the argument checks of torch.distributions wait for. Their own frames are torch's, and the line that is
# shown is the user's, which does not say so.
CHECK = "an argument check"
_CHECKS = os.path.join("torch", "distributions", "distribution.py")
# The frame of such a check is the sixth from where a wait is noted. This is that, with a margin.
_DEPTH = 8
# Lines of libraries that are known to wait, and what spares it. The first that fits counts.
_KNOWN = (
    (
        r"transformers/trainer\.py:\d+ .*(isnan|isinf)",
        "transformers' Trainer looks for NaN in each loss. TrainingArguments(logging_nan_inf_filter=False) "
        "leaves that out.",
    ),
    (
        r"transformers/(masking_utils|modeling_attn_mask_utils)\.py:",
        "transformers asks whether a mask hides a position. If nothing is padded, give the model no "
        'attention_mask. A model with attn_implementation="eager" does not ask.',
    ),
)

# Fewer waits than so many at one line are no matter, and so many sentences of advice are enough.
_MANY, _MOST_ADVICE = 20, 3


@dataclass(frozen=True)
class Stall:
    """The implicit waits of one line: how often, how long in all (seconds), and for what."""

    line: str
    why: str
    count: int
    seconds: float


class Stalls(list[Stall]):
    """The waits of a session's master. Prints as a table, with advice below it."""

    def _rows(self) -> list[list[str]]:
        return [
            ["waited", "times", "for", "at"],
            *([f"{s.seconds:.4f} s", str(s.count), s.why, s.line] for s in self),
        ]

    def advice(self) -> list[str]:
        """Return what would spare the longest of these waits, a sentence or two for each."""
        found = [text for stall in self if stall.count >= _MANY and (text := _advice(stall))]
        return found[:_MOST_ADVICE]

    def __repr__(self) -> str:
        return "\n".join([table_text(self._rows()), *self.advice()]) if self else "no waits so far"

    def _repr_html_(self) -> str:
        advice = "".join(f"<p>{html.escape(text)}</p>" for text in self.advice())
        return table_html(self._rows()) + advice


def _advice(stall: Stall) -> str:
    """Return how a program does without many waits of one kind; nothing where they are meant or harmless."""
    where, line = stall.line.split()[:1], stall.count
    at = f" at {where[0]}" if where else ""
    if stall.why == CHECK:
        return (
            f"{line} times torch.distributions checked an argument{at}. A distribution that is made with "
            "validate_args=False does not check: Normal(mean, std, validate_args=False). "
            "torch.distributions.Distribution.set_default_validate_args(False) is for all of them."
        )
    for pattern, remedy in _KNOWN:
        if stall.why == "item" and re.search(pattern, stall.line.replace(os.sep, "/")):
            return f"{line} reads one by one{at}: {remedy}"
    if stall.why == "a full window":
        return (
            f"{line} times the worker had as much work as it may have{at}. So it is the worker that takes "
            "the time: nothing here is to be gained."
        )
    if stall.why == "an upload":
        return ""
    if stall.why.startswith("aten") and not _depends_on_data(stall.why):
        return ""
    if stall.why.startswith("aten"):
        name = stall.why.split()[0].removesuffix(".default")
        return (
            f"{line} times {name} waited for the shape of its result{at}. A form whose shape does not depend "
            "on data does not wait: torch.where(condition, x, y) or a mask, for example."
        )
    if stall.why == "repr" or stall.why.startswith("explicit"):
        return (
            f"{line} fetches one by one{at}: collect the tensors in a list, and call dr.fetch(list) once."
            if stall.why == "explicit fetch"
            else ""
        )
    return (
        f"{line} reads one by one{at}: collect the tensors in a list, and call dr.fetch(list) once after the "
        "loop. If the loop must go on meanwhile, dr.fetch_async(x) gives a future."
    )


def _depends_on_data(why: str) -> bool:
    """Whether the shape of an operator's result depends on data, as "aten.nonzero.default" does."""
    _, name, overload = [*why.split()[0].split("."), "", ""][:3]
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return torch.Tag.dynamic_output_shape in getattr(operator, "tags", ())


# They hear of each wait when it is over: what it was for, its line, and when it began
# (`time.perf_counter()`).
watchers: list[Callable[[str, Line, float], None]] = []

# A signal's handler may wait for a value while this thread holds it.
_lock = RLock()
# Lines are resolved only when somebody asks.
_found: dict[tuple[CodeType | None, int, str], list[float]] = {}
_mode = "default"
# Python notes here which lines it has warned of, as it does in a module's globals.
Told = dict[str | tuple[str, type[Warning], int], int]
_warned: Told = {}


@without_our_frames
def set_sync_debug_mode(mode: str | int) -> None:
    """Set what an implicit wait does: nothing ("default", 0), warn ("warn", 1) or raise ("error", 2).

    It is as torch.cuda.set_sync_debug_mode. Implicit are `.item()`, `bool()`, `.cpu()`, `repr` and the like;
    `dr.fetch` and `dr.synchronize` say that they wait and are not reported.
    """
    global _mode
    names = ("default", "warn", "error")
    chosen = names[mode] if isinstance(mode, int) and 0 <= mode <= 2 else mode
    if chosen not in names:
        raise UsageError(f'mode is "default", "warn" or "error" (0, 1, 2), got {mode!r}')
    _mode = str(chosen)


def get_sync_debug_mode() -> int:
    """Return 0 ("default"), 1 ("warn") or 2 ("error")."""
    return ("default", "warn", "error").index(_mode)


def before_wait(why: str) -> None:
    """Warn or raise if the mode says so, naming the user's line."""
    if _mode == "default" or why.startswith("explicit"):
        return
    found = user_line()
    line = line_text(found)
    text = f"{why} blocks until a worker answers\n  at {line}\n  `await dr.fetch_async(x)` does not block"
    if _mode == "error":
        raise UsageError(text)
    warn_at(text, found, _warned)


def warn_at(text: str, line: Line, registry: Told | None = None) -> None:
    """Warn at a line of the user's."""
    _, call, at = line
    name, number = ("<unknown>", 0) if call is None else (call.code.co_filename, line_number(call.code, at))
    warnings.warn_explicit(text, UserWarning, name, number, registry=registry)


def note_wait(why: str, started: float) -> None:
    """Add a wait that began at `started` (`time.perf_counter()`) to the user's line."""
    seconds = time.perf_counter() - started
    if why == "item" and _is_check():
        why = CHECK
    line = shown_line(user_line())
    key = *place_of(line), why
    for watcher in watchers:
        watcher(why, line, started)
    with _lock:
        entry = _found.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] += seconds


def _is_check() -> bool:
    """Whether torch.distributions reads a value to check an argument."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_CHECKS):
            return True
        frame = frame.f_back
    return False


def stalls(reset: bool = False) -> Stalls:
    """Return the master's waits so far (given up ones too), summed up by line, the longest first."""
    with _lock:
        found = list(_found.items())
        if reset:
            _found.clear()
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for (code, offset, why), (count, seconds) in found:
        line = code_text(code, offset)
        before = sums.get((line, why), (0, 0.0))
        sums[line, why] = before[0] + int(count), before[1] + seconds
    rows = [Stall(line, why, count, seconds) for (line, why), (count, seconds) in sums.items()]
    return Stalls(sorted(rows, key=lambda row: -row.seconds))
