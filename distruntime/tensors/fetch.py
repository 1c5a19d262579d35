"""Reading values: `fetch` waits for a whole tree, `fetch_async` gives a future for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, overload

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import DistruntimeError, WaitTimeout, without_our_frames
from ..log.line import line_text, user_line
from ..log.spec import Spec
from ..operators.transfer import request, tensor_from
from ..session.failures import remote_error
from ..session.requests import Request
from ..session.session import session_of_log
from ..session.stalls import note_wait
from ..session.timeouts import checked, deadline_in, left_until
from .parameters import without_shape
from .tensor import DistributedTensor
from .uneven import UnevenTensor

log = logging.getLogger("distruntime")
T = TypeVar("T")


class Arriving(Protocol):
    """A copy of something that is on its way here, and the request that is answered next."""

    request: Request[object]

    def rest(self) -> Request[object] | None:
        """Return the request for what the first reply has told of; None where that was all."""

    def value(self) -> object:
        """Return the copy, once it is here."""


class Fetchable:
    """Something on a worker, besides tensors, of which `fetch` brings a copy."""

    __slots__ = ()

    def _copy(self) -> Arriving:
        """Ask for a copy of it as it is after everything issued so far. Return at once."""
        raise NotImplementedError


class Fetched(concurrent.futures.Future[T]):
    """A future of local values. `result()` blocks, `await` does not block the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[Request[object]] = []

    @without_our_frames
    def result(self, timeout: float | None = None) -> T:
        """Block for the values, at most `timeout` seconds; raise what poisoned them, or `WaitTimeout`."""
        # The waiting thread reads the socket itself: handing over from another would cost half a round trip
        # more.
        timeout = checked(timeout)
        deadline = deadline_in(timeout)
        try:
            for reply in self._pending:
                left = left_until(deadline)
                if not session_of_log(reply.node).result(reply, left):
                    break
            return super().result(left_until(deadline))
        except concurrent.futures.TimeoutError:
            # The outcome may be a `TimeoutError` itself, or have come at this moment.
            if self.done():
                return super().result()
            raise _late(timeout) from None
        finally:
            # Otherwise the error that is raised would hold this frame, the future, and so itself.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block for the outcome, at most `timeout` seconds; return what poisoned the values, None if nothing.

        Raise `WaitTimeout` after `timeout` seconds.
        """
        timeout = checked(timeout)
        try:
            return super().exception(timeout)
        except concurrent.futures.TimeoutError:
            raise _late(timeout) from None

    def set_outcome(self, value: T | None, error: BaseException | None) -> None:
        """Set the outcome, unless somebody has cancelled the future meanwhile.

        asyncio does so past a deadline.
        """
        try:
            if error is not None:
                self.set_exception(error)
            else:
                # Without an error there is a value, which `None` may be.
                self.set_result(value)  # type: ignore[arg-type]
        except concurrent.futures.InvalidStateError:
            log.debug("a value came for a future that was cancelled")
        finally:
            # Otherwise it would hold this frame and itself.
            del error

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(self).__await__()


def _late(timeout: float | None) -> WaitTimeout:
    # In Python 3.10 the TimeoutError that futures raise is not the builtin one.
    return WaitTimeout(
        f"the values did not come within {timeout:g} s\n  waited for at {line_text(user_line())}\n"
        "  dr.nodes() shows what the workers do; a future of dr.fetch_async can be asked again"
    )


@without_our_frames
@overload
def fetch_async(tree: torch.Tensor) -> Fetched[torch.Tensor]: ...


@overload
def fetch_async(tree: T) -> Fetched[T]: ...


def fetch_async(tree: T) -> Fetched[T]:
    """Start reading every remote tensor and object in `tree`; return a future of the tree with local ones.

    Return at once.

    The values are those at this point of the program, whatever is issued afterwards. Lists, tuples, dicts and
    their like are opened.
    """
    flat, shape = tree_flatten(tree)
    asked = _Asked([*map(_whole, flat)])
    future: Fetched[T] = Fetched()
    future._pending = [*asked.replies.values(), *(copy.request for copy in asked.copies.values())]
    left = [len(future._pending)]

    def finish() -> None:
        bad = next((r for r in future._pending if r.cause is not None or r.lost is not None), None)
        if bad is not None:
            future.set_outcome(
                None, remote_error(bad.node, bad.cause) if bad.cause is not None else bad.node.lost_error()
            )
            return
        try:
            found = asked.leaves()
        except DistruntimeError as error:
            # Whoever waits must hear of it.
            future.set_outcome(None, error.with_traceback(None))
            return
        future.set_outcome(tree_unflatten(found, shape), None)

    def arrived(_: Request[object]) -> None:
        left[0] -= 1
        if left[0] == 0:
            finish()

    def told(copy: Arriving, _: Request[object]) -> None:
        more = None if copy.request.cause is not None or copy.request.lost is not None else copy.rest()
        if more is None:
            arrived(copy.request)
        else:
            future._pending.append(more)
            more.when_done(arrived)

    if not left[0]:
        finish()
    for reply in list(asked.replies.values()):
        reply.when_done(arrived)
    for copy in asked.copies.values():
        copy.request.when_done(partial(told, copy))
    return future


def _whole(leaf: object) -> object:
    """Return what is fetched of a leaf: a DTensor comes as its whole value."""
    held = getattr(leaf, "_local_tensor", None)
    within = isinstance(held, (DistributedTensor, UnevenTensor))
    whole: object = leaf.full_tensor() if within else leaf  # type: ignore[attr-defined]
    if isinstance(whole, UnevenTensor):
        whole._refused("fetch")
    return whole


class _Asked:
    """What was asked of workers for the leaves of a tree. It holds those that are local, and no others."""

    def __init__(self, leaves: Sequence[object]) -> None:
        # The keys are storage and metadata, so that tied tensors travel once and stay tied.
        self.replies: dict[tuple[int, Spec], Request[object]] = {}
        self.copies: dict[int, Arriving] = {}
        self._wanted = [*map(self._ask, leaves)]
        self._rest = [leaf if want is None else None for want, leaf in zip(self._wanted, leaves)]

    def _ask(self, leaf: object) -> _Wanted | None:
        if isinstance(leaf, Fetchable) and id(leaf) not in self.copies:
            self.copies[id(leaf)] = leaf._copy()
        if not isinstance(leaf, DistributedTensor):
            return None
        handle = leaf._handle
        key = id(handle.storage), handle.spec
        if key not in self.replies:
            self.replies[key] = request(handle, "tensor")
        return _Wanted(key, id(leaf), Kind.of(leaf))

    def leaves(self) -> list[object]:
        """Return the leaves of what was fetched, once all replies are here."""
        data = {key: tensor_from(reply, key[1]) for key, reply in self.replies.items()}
        objects = {key: copy.value() for key, copy in self.copies.items()}
        same: dict[int, torch.Tensor] = {}
        for want in self._wanted:
            if want is not None and want.leaf not in same:
                same[want.leaf] = want.kind.made_of(data[want.key].detach())
        return [
            objects.get(id(leaf), leaf) if want is None else same[want.leaf]
            for want, leaf in zip(self._wanted, self._rest)
        ]


@dataclass(frozen=True)
class Kind:
    """What a local copy of a remote tensor is: its class, and whether it is a parameter (then: with gradient
    or without).
    """

    cls: type[torch.Tensor]
    param: bool | None

    @classmethod
    def of(cls, leaf: DistributedTensor) -> Kind:
        """Return the kind of a remote tensor's copy."""
        param = leaf.requires_grad if isinstance(leaf, torch.nn.Parameter) else None
        return cls(getattr(leaf, "origin", torch.Tensor), param)

    def made_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value as one of this kind."""
        if issubclass(self.cls, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            return without_shape(self.cls, bool(self.param), value)
        if self.param is not None and issubclass(self.cls, torch.nn.Parameter):
            return self.cls(value, self.param)
        if self.cls is torch.Tensor:
            return value if self.param is None else torch.nn.Parameter(value, requires_grad=self.param)
        own = value.as_subclass(self.cls)
        if self.param is not None:
            # torch's constructor calls the class's own functions, and they may ask for what it has not yet.
            with torch._C.DisableTorchFunctionSubclass():
                own.requires_grad_(self.param)
            own._is_param = True
        return own


@dataclass(frozen=True)
class _Wanted:
    """One remote leaf of a tree: which value it is, which object, and its kind."""

    key: tuple[int, Spec]
    leaf: int
    kind: Kind


@overload
def fetch(tree: torch.Tensor, timeout: float | None = None) -> torch.Tensor: ...


@overload
def fetch(tree: T, timeout: float | None = None) -> T: ...


@without_our_frames
def fetch(tree: T, timeout: float | None = None) -> T:
    """Return `tree` with every remote tensor, and every remote object, as a local one.

    Block until all are here; they travel together. Tied tensors stay tied; parameters stay parameters. Raise
    what poisoned the first poisoned one, or `WaitTimeout` after `timeout` seconds.
    """
    started, timeout = time.perf_counter(), checked(timeout)
    future = fetch_async(tree)
    travels = bool(future._pending)
    try:
        return future.result(timeout)
    finally:
        # Otherwise the error that is raised would hold this frame, the future, and so itself.
        del future
        if travels:
            note_wait("explicit fetch", started)
