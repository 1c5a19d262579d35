"""Failures of a worker as exceptions of the master: in their original class, with the line that issued them."""

from __future__ import annotations

import builtins
from functools import lru_cache

import torch

from .errors import InternalError, NodeFailed, NotSupportedError, RemoteError, StreamCancelled, WaitTimeout
from .node import Cause, Node


class WorkerTraceback(Exception):
    """The worker's own traceback, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]).rstrip()


# What a reply may become: nothing else is looked up, and nothing is unpickled.
_KNOWN: dict[str, type[BaseException]] = {
    name: cls
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, UnicodeError)
}
_KNOWN["torch.OutOfMemoryError"] = torch.OutOfMemoryError
_KNOWN["torch._C._LinAlgError"] = _KNOWN["torch.linalg.LinAlgError"] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
_KNOWN["distruntime.errors.NotSupportedError"] = NotSupportedError
for _own in (InternalError, NodeFailed, StreamCancelled, WaitTimeout):
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
                "__str__": BaseException.__str__,  # KeyError's own would show the text's repr
            },
        )
    except TypeError:  # the two classes' layouts do not mix
        return RemoteError
    return made


def remote_error(node: Node, cause: Cause) -> RemoteError:
    """Return the exception for a failure; raise it where the call stands, so that no local keeps it."""
    failure = cause.failure
    known = failure.kind in _KNOWN
    text = failure.text if known else f"{failure.kind}: {failure.text}"
    lines = [text, f"  {failure.op} on {node}" + (f", operands: {failure.operands}" if failure.operands else "")]
    if cause.line:
        lines.append(f"  issued at {cause.line}")
    error = _class(failure.kind)("\n".join(lines))
    error.__cause__ = WorkerTraceback(f"### worker traceback, {node}\n{failure.traceback}")
    return error
