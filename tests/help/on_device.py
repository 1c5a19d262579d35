"""What tests ask of a worker's simulated device: its counts, and how long its kernels take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

import distruntime as dr
from device_counts import Counts
from distruntime.log.handle import Place, new_value
from distruntime.log.issue import issue_default
from distruntime.log.line import user_line
from distruntime.log.spec import NO_TENSOR
from distruntime.operators.signatures import template
from distruntime.session.requests import Request
from distruntime.session.session import active_session
from distruntime.tensors.tensor import DistributedTensor
from distruntime.wire.messages import LEARN
from processes import STARTING


def counts(node: int = 0) -> Counts:
    """Return the counts of a worker's devices, when everything issued so far has been launched.

    This waits for the worker and not for a device: the worker asks its device in an instruction.
    """
    (found,) = cast("list[list[int]]", _call(node, "simulated::counted", (), 1))
    return Counts(*found[1:])


def set_delay(node: int, microseconds: int) -> None:
    """Let each kernel of a worker take at least so long from here on."""
    _tell(node, "simulated::set_delay", microseconds)
    dr.synchronize(node)


@contextmanager
def held(node: int) -> Iterator[None]:
    """No kernel of a default stream of a worker begins within the block."""
    # Otherwise kernels from before the block would be held, too.
    dr.synchronize(node)
    _tell(node, "simulated::hold", True)
    try:
        yield
    finally:
        _tell(node, "simulated::hold", False)


def _tell(node_number: int, name: str, to: int) -> None:
    node = active_session().nodes[node_number]
    number, words = template(None, DistributedTensor, (to,), {}, 0, node, name=name)
    issue_default([number, *words], [], (), node, user_line())
    node.flush()


def _call(node_number: int, name: str, args: Sequence[object], results: int) -> list[object]:
    session = active_session()
    node = session.nodes[node_number]
    number, words = template(None, DistributedTensor, args, {}, results, node, name=name)
    with node.lock:
        request: Request[list[object]] = session.requests.new(node, "specs")
        home = session.places.residence(Place(node.index, session.places.devices(node.index)[0]))
        kept = new_value(NO_TENSOR, home)
        issue_default([LEARN, request.number, number, *words, kept.ref], [kept], (), node, user_line())
        node.flush()
    return session.value(request)


_running: list[int] = []


def _usable(nodes: int) -> bool:
    if _running != [nodes] or not dr.is_initialized():
        return False
    try:
        return all(torch.ones((), device=dr.place(k, 0)).item() == 1.0 for k in range(nodes))
    except (dr.errors.NodeFailed, dr.errors.SessionClosed, RuntimeError):
        return False


def start(nodes: int) -> None:
    """Begin a session of so many local workers, unless there is one whose devices are well."""
    if not _usable(nodes):
        dr.shutdown()
        dr.init_master_worker(world_size=nodes, timeout=STARTING, quiet=True)
        _running[:] = [nodes]


def forget() -> None:
    """Let the next test begin a session of its own."""
    _running.clear()
