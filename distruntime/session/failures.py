"""Failures of a worker as exceptions of the master, in their original class and with the issuing line."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Collection
from functools import lru_cache

import torch

from ..errors import (
    CheckpointError,
    InternalError,
    NodeFailed,
    NotSupportedError,
    RemoteError,
    StreamCancelled,
    UsageError,
    WaitTimeout,
)
from ..log.failure_log import Cause
from ..log.line import callers_text
from ..log.node import Node
from ..wire.messages import Failure
from ..wire.units import size_text
from .holders import held, held_by_layer

_MOST_HOLDERS = 5


class WorkerTraceback(Exception):
    """The worker's own traceback, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]).rstrip()


_OF_MORE_THAN_A_TEXT = (
    "UnicodeError",
    "UnicodeDecodeError",
    "UnicodeEncodeError",
    "UnicodeTranslateError",
    "ExceptionGroup",
)
# A reply may become one of these: nothing else is looked up, and nothing is unpickled.
_KNOWN: dict[str, type[BaseException]] = {
    name: cls
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__name__ not in _OF_MORE_THAN_A_TEXT
}
_KNOWN["torch.OutOfMemoryError"] = torch.OutOfMemoryError
_KNOWN["torch.AcceleratorError"] = torch.AcceleratorError
_KNOWN["torch._C._LinAlgError"] = _KNOWN["torch.linalg.LinAlgError"] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
_KNOWN["distruntime.errors.NotSupportedError"] = NotSupportedError
for _own in (CheckpointError, InternalError, NodeFailed, StreamCancelled, UsageError, WaitTimeout):
    _KNOWN[f"distruntime.errors.{_own.__name__}"] = _own


@lru_cache(maxsize=256)
def _class(kind: str) -> type[RemoteError]:
    """Return a class that is both `RemoteError` and the original, so that either `except` catches it."""
    original = _KNOWN.get(kind, RuntimeError)
    try:
        made = type(
            original.__name__,
            (RemoteError, original),
            {
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                # KeyError's own method would show the text's repr.
                "__str__": BaseException.__str__,
            },
        )
    except TypeError:
        # The layouts of the two classes do not mix.
        return RemoteError
    return made


def out_of_memory(failure: Failure) -> bool:
    """Whether a worker's allocator had no more."""
    # torch's CPU allocator raises a plain RuntimeError, mmap an OSError.
    return (
        failure.kind in ("torch.OutOfMemoryError", "MemoryError")
        or re.search("(can't|Cannot) allocate memory", failure.text) is not None
    )


def _holders(node: Node, cause: Cause, poisoned: Collection[tuple[int, ...]]) -> list[str]:
    """Return lines about who holds the memory that the failed instruction did not get.

    Only values count that were issued before it and are still alive.
    """
    failure = cause.failure
    everyone, _ = held([node], before=(cause.log or node, failure.position), poisoned=poisoned)
    # CUDA's allocator and XPU's say "GPU 0", those of other kinds "NPU 0" or "Device 0".
    card = re.search(r"\b(?:[GN]PU|[Dd]evice) (\d+)", failure.text)
    names = [] if node.welcome is None else [row[0] for row in node.welcome.devices if row[0] != "cpu"]
    # Simulated GPUs are main memory.
    simulated = node.welcome is not None and node.welcome.simulated
    device = next((n for n in names if card and n.endswith(f":{card[1]}")), "") if card else "cpu"
    there = [h for h in everyone if h.place.local_device == device or (simulated and not card)]
    lines = [
        f"  held there: {size_text(h.nbytes)} by {h.line} ({h.tensors} tensor{'s' if h.tensors > 1 else ''})"
        for h in there[:_MOST_HOLDERS]
    ]
    if len(there) > _MOST_HOLDERS:
        rest = there[_MOST_HOLDERS:]
        lines.append(
            f"  held there: {size_text(sum(h.nbytes for h in rest))} by {len(rest)} more lines; "
            f"dr.memory({node.index}) lists them"
        )
    layers = held_by_layer([node], before=(cause.log or node, failure.position), poisoned=poisoned)
    of_device = [h for h in layers if h.place.local_device == device or (simulated and not card)]
    if of_device:
        named = ", ".join(f"{size_text(h.nbytes)} {h.line}" for h in of_device[:_MOST_HOLDERS])
        more = f"; dr.memory({node.index}, by='module') lists all {len(of_device)}"
        lines.append(f"  by layers: {named}{more if len(of_device) > _MOST_HOLDERS else ''}")
    return lines


def remote_error(
    node: Node, cause: Cause, poisoned: Callable[[], Collection[tuple[int, ...]]] = tuple
) -> RemoteError:
    """Return the exception for a failure; raise it where the call stands, so that no local keeps it.

    `poisoned` returns what holds nothing. It is asked for an error about memory, which does not name these as
    holders: who holds memory is told from what this process believes to be there, and after a failure much of
    that is not.
    """
    failure, node = cause.failure, node if cause.where is None else node.session.nodes[cause.where]
    known = failure.kind in _KNOWN
    text = failure.text if known else f"{failure.kind}: {failure.text}"
    lines = [
        text,
        f"  {failure.op} on {node}" + (f", operands: {failure.operands}" if failure.operands else ""),
    ]
    if failure.kind == "NotImplementedError" and "does not exist in torch" in failure.text:
        lines.append(f"  torch {torch.__version__} is here")
    lines += [f"  {line}" for line in callers_text(cause.call)]
    if cause.line:
        lines.append(f"  issued at {cause.line}")
    if failure.kind == "torch.AcceleratorError" and " is lost: " in failure.text:
        lines.append(f"  dr.restart({node.index}, force=True) starts this worker anew")
    if out_of_memory(failure):
        lines += _holders(node, cause, poisoned())
    error = _class(failure.kind)("\n".join(lines))
    # An ordinary operator's failure has none: it would show torch's frames and ours.
    if failure.traceback:
        error.__cause__ = WorkerTraceback(f"### worker traceback, {node}\n{failure.traceback}")
    return error
