"""How a remote tensor prints: values as torch prints them, in one round trip and within a time budget."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import _tensor_str
from torch.autograd import forward_ad

from ..log.handle import Handle
from ..log.mesh_log import MeshLog
from ..log.shards import member_of
from ..log.spec import Spec
from ..operators.transfer import request
from ..session.failures import remote_error
from ..session.session import session_of_log
from ..session.stalls import before_wait, note_wait
from ..wire.codec import dtype_name
from ..wire.deadlines import REPR
from ..wire.messages import AskStatus, Plain
from ..wire.units import operator_text, printable, size_text

_DEFAULT_DTYPES = (torch.int64, torch.bool)


# Code of libraries that takes the text of a function for a name, which nobody reads. The function is
# a `functools.partial`, and if it holds a tensor, its values would be fetched for that name.
_NAMES = (os.path.join("transformer_lens", "hook_points.py"),)


def _where(handle: Handle) -> str:
    """Return the place as the device that torch takes, and in parentheses what it stands for."""
    place = handle.place
    if place.node.members:
        return f"device='remote:{place.number}' (member 0 of {len(place.node.members)})"
    return f"device='remote:{place.number}' ({place.place})"


def summary(spec: Spec, where: str, state: str) -> str:
    """Return the short form: `<remote 3x3 float32, 36 B, node 0 cpu: ...>`."""
    shape = "x".join(map(str, spec.size)) or "scalar"
    return f"<remote {shape} {dtype_name(spec.dtype)}, {size_text(spec.nbytes)}, {where}: {state}>"


def _status(handle: Handle) -> str:
    node = handle.place.worker
    session = session_of_log(node)
    asked = session.ask(node, AskStatus)
    if not session.result(asked, 0.5) or asked.value is None:
        return f"no answer from {node} yet. .cpu() waits, Ctrl-C returns"
    position, op, seconds = asked.value
    with node.lock:
        ahead = sum(
            1
            for flight in node.flights
            for line in flight.line_table
            if position < line[0] <= handle.ready_at
        )
    name = operator_text(str(op)) if op else "nothing"
    return (
        f"computing ({ahead} ahead of it, {name} for {float(seconds):.1f} s).  .cpu() waits, Ctrl-C returns"
    )


def render(tensor: torch.Tensor, handle: Handle, suffixes: list[str]) -> str:
    """Return the text of a remote tensor.

    Block for two seconds at most, never raise for what is wrong on a worker.
    """
    whole, home, session, spec = handle, handle.place, session_of_log(handle.place.node), handle.spec
    where = str(home.place)
    # The first member's values stand for all of them.
    node = home.node.lanes[0][0] if isinstance(home.node, MeshLog) else home.worker
    if session.closed is not None or session.foreign:
        return summary(spec, where, "its session has ended")
    if node.failed is not None:
        return summary(spec, where, f"lost, {node} {node.failed}")
    if node.presence.absence is not None:
        return summary(spec, where, node.presence.absence.text)
    if home.node.members:
        handle = member_of(whole, 0)
        where = f"member 0 of {len(home.node.members)}, {handle.place.place}"
    # This is whoever calls `repr` of the tensor: a partial's own is C, and has no frame.
    if sys._getframe(2).f_code.co_filename.endswith(_NAMES):
        return summary(spec, where, "not fetched for a hook's name")
    options = _tensor_str.PRINT_OPTS
    asked: dict[str, Plain] = {
        "precision": options.precision,
        "threshold": int(min(options.threshold, 1 << 62)),
        "edgeitems": options.edgeitems,
        "linewidth": options.linewidth,
        "sci_mode": options.sci_mode,
        "indent": len("tensor("),
    }
    before_wait("repr")
    reply = request(handle, "text", asked)
    started = time.perf_counter()
    try:
        answered = session.result(reply, REPR.get())
    finally:
        note_wait("repr", started)
    if not answered:
        session.requests.discard(reply)
        return summary(spec, where, _status(handle))
    if reply.lost is not None:
        return summary(spec, where, f"lost, {node} {reply.lost}")
    if reply.cause is not None:
        lines = str(remote_error(node, reply.cause)).splitlines()
        return summary(
            spec,
            where,
            "poisoned: " + lines[0] + "".join(f" ({t.strip()})" for t in lines[1:] if "issued at" in t),
        )
    return _text(tensor, whole, printable(str(reply.value)), suffixes)


def _text(tensor: torch.Tensor, handle: Handle, body: str, suffixes: list[str]) -> str:
    """Return the text around the values, as torch's own has it, with the place."""
    spec = handle.spec
    if spec.size.numel() == 0:
        body = "[]"
        if tensor.dim() != 1:
            suffixes = [f"size={tuple(spec.size)}", *suffixes]
    floating = spec.dtype in (
        torch.get_default_dtype(),
        torch.complex64 if torch.get_default_dtype() is torch.float32 else torch.complex128,
    )
    if not floating and not (spec.dtype in _DEFAULT_DTYPES and spec.size.numel()):
        suffixes = [*suffixes, f"dtype={spec.dtype}"]
    text: str = _tensor_str._add_suffixes(
        "tensor(" + body, [_where(handle), *suffixes], len("tensor("), force_newline=False
    )
    return text


def suffixes_of(tensor: torch.Tensor) -> list[str]:
    """Return what torch appends about autograd, and the tangent of a dual number."""
    found: list[str] = []
    if tensor.grad_fn is not None:
        found.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        found.append("requires_grad=True")
    # Where nobody is in a level of forward mode, this asks nothing else.
    if forward_ad._current_level >= 0 and (tangent := forward_ad.unpack_dual(tensor).tangent) is not None:
        found.append(f"tangent={tangent}")
    return found
