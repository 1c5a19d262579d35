"""Settings of torch for a whole process that sessions follow: deterministic algorithms, the default dtype.

`torch.use_deterministic_algorithms` and what belongs to it are forwarded to the workers in order. A worker
raises, warns and fills memory as this process would. It does so for its own kernels: what a meta kernel says
here is about CUDA's.

A worker's own default dtype is float32 and stays so, as its sessions share it. What depends on this process's
default is said to it: see `operators/explicit.py`. Each place's tables of signatures follow it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._prims_common as prims

from ..log.node import Node
from ..operators.propagate import predicting
from ..session.session import Session, active
from ..tensors.worker_functions import issue_function


def install_determinism() -> None:
    """Have the workers follow this process's switches, from now on."""
    # torch's own functions and properties call these two, whoever has imported them by name.
    for name in ("_set_deterministic_algorithms", "_set_deterministic_fill_uninitialized_memory"):
        setattr(torch._C, name, _followed(getattr(torch._C, name)))
    alert = prims.alert_not_deterministic

    def alert_of_local(caller: str) -> None:
        # Its own kernel on the worker knows.
        if not predicting.now:
            alert(caller)

    prims.alert_not_deterministic = alert_of_local


def follow_determinism(session: Session) -> None:
    """Tell the workers of a new session what this process has switched on, and those that come later."""
    for node in session.nodes:
        _tell_what_is_on(node)
    session.on_return.append(_tell_what_is_on)


def _followed(change: Callable[..., None]) -> Callable[..., None]:  # type: ignore[explicit-any]
    # torch's functions take arguments of their own.
    def changed(*args: object, **kwargs: object) -> None:
        before = _switches()
        change(*args, **kwargs)
        # Dynamo sets them to what they are after each compilation. Workers would look through their kernels'
        # warnings anew, import Dynamo for the call, and lose what `dr.config` has set.
        if _switches() == before:
            return
        if active and active[0].closed is None and not active[0].foreign:
            session = active[0]
            # Two threads that switch at the same time come to every node in one order.
            with session.lock:
                for node in session.nodes:
                    _tell(node)
            # The first call of each signature brings its kernel's warnings, and these are others now.
            session.places.forget()

    return changed


def _switches() -> dict[str, object]:
    """Return this process's switches, by their names in `dr.config`."""
    return {
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch._C._get_deterministic_fill_uninitialized_memory(),
    }


def _tell(node: Node) -> None:
    if node.failed is None:
        issue_function(node, "config", (), _switches())


def _tell_what_is_on(node: Node) -> None:
    # What `dr.config` has set in a session that is resumed stays where this process says nothing.
    switches = _switches()
    if switches["use_deterministic_algorithms"] or not switches["fill_uninitialized_memory"]:
        _tell(node)


def install_default_dtype() -> None:
    """Have this process's places follow torch's default dtype, from now on.

    torch's functions are Python code that calls these two, whoever has imported them by name.
    """
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        setattr(torch._C, name, _dtype_followed(getattr(torch._C, name)))


def _dtype_followed(change: Callable[[object], None]) -> Callable[[object], None]:
    def changed(default: object) -> None:
        change(default)
        for session in list(active):
            session.places.follow_default_dtype()

    return changed
