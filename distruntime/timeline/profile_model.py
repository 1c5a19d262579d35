"""`dr.profiler.profile_model`: what each module of a model takes, in time on its worker and in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError, without_our_frames
from ..log.handle import Place
from ..session.tables import Rows, table_html, table_text
from ..streams.stream import Event, current_stream
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, members_of
from ..wire.units import size_text


@dataclass(frozen=True)
class ModuleProfile:
    """What one module took. Times are milliseconds on its worker, memory is bytes at its place.

    Attributes:
        name: its path in the model; "" for the model itself.
        kind: its class.
        place: where it computes; None if it has neither a parameter nor an argument there.
        calls: how often it was called.
        parameters: bytes of its parameters and its children's.
        saved: bytes that it and its children keep for the backward pass, besides parameters.
        forward: time of its forward passes, with its children's.
        backward: time of its backward passes, or None.
    """

    name: str
    kind: str
    place: Place | None
    calls: int
    parameters: int
    saved: int
    forward: float
    backward: float | None


@final
class ModelProfile(tuple[ModuleProfile, ...]):
    """One `ModuleProfile` for each module that was called, in the order of the model; shown as a table."""

    def _rows(self) -> Rows:
        head = ["module", "class", "place", "calls", "parameters", "saved", "forward ms", "backward ms"]
        rows, above = [head], list[str]()
        for one in self:
            # A container such as `ModuleList` is not called, and has no row.
            while above and not one.name.startswith(above[-1]):
                above.pop()
            own = one.name.removeprefix(above[-1]) if above else ""
            depth = len(above)
            above.append(f"{one.name}." if one.name else "")
            rows.append(
                [
                    "  " * depth + (own or "the model"),
                    one.kind,
                    "" if one.place is None else str(one.place),
                    str(one.calls),
                    size_text(one.parameters),
                    size_text(one.saved),
                    f"{one.forward:.3f}",
                    "" if one.backward is None else f"{one.backward:.3f}",
                ]
            )
        return rows

    def __repr__(self) -> str:
        return table_text(self._rows())

    def _repr_html_(self) -> str:
        return table_html(self._rows())


@dataclass
class _Backward:
    """The moments between which the backward pass of one call runs."""

    begin: Event | None = None
    end: Event | None = None


class _Span:
    """What was seen of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.home = _home_of(module.parameters())
        self.calls = self.saved = 0
        self.forward: list[tuple[Event, Event]] = []
        self.open: list[Event] = []
        # The backward pass of a call begins with the first gradient of what it returned. It ends with the
        # last one of what it got, or of a parameter.
        self.backward: list[_Backward] = []


@final
class _Watching:
    """Hooks on each module of a model, while it runs once."""

    def __init__(self, model: nn.Module) -> None:
        self.spans = {name: _Span(module) for name, module in model.named_modules()}
        self._stack: list[_Span] = []
        self._known = {_memory(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._follow(module, self.spans[name])

    def _follow(self, module: nn.Module, span: _Span) -> None:
        def enters(_module: nn.Module, args: object, kwargs: object) -> None:
            outer = self._stack[-1].home if self._stack else None
            span.home = span.home or _home_of(tree_leaves([args, kwargs])) or outer
            self._stack.append(span)
            span.calls += 1
            span.backward.append(_Backward())
            for given in _differentiated([args, kwargs]):
                self._hooks.append(given.register_hook(partial(ends, span.backward[-1])))
            span.open.append(_now(span.home))

        def leaves(_module: nn.Module, _args: object, result: object) -> None:
            self._stack.pop()
            span.forward.append((span.open.pop(), _now(span.home)))
            for made in _differentiated(result):
                self._hooks.append(made.register_hook(partial(begins, span.backward[-1])))

        def begins(call: _Backward, _gradient: object) -> None:
            call.begin = call.begin or _now(span.home)

        def ends(call: _Backward, _gradient: object) -> None:
            call.end = _now(span.home)

        def all_end(_parameter: torch.Tensor) -> None:
            for call in span.backward:
                call.end = _now(span.home)

        self._hooks += [
            module.register_forward_pre_hook(enters, with_kwargs=True),
            module.register_forward_hook(leaves),
            # Torch's own hooks of a module's backward pass refuse modules that work in place.
            *(
                parameter.register_post_accumulate_grad_hook(all_end)
                for parameter in module.parameters()
                if parameter.requires_grad
            ),
        ]

    def saves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd keeps, each memory once, for every module that runs now."""
        memory = _memory(tensor)
        if memory not in self._known:
            self._known.add(memory)
            for span in self._stack:
                span.saved += _bytes(tensor)
        return tensor

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()


@without_our_frames
def profile_model(model: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> ModelProfile:
    """Call a model once, and return what each of its modules took. Block until that has run.

    Events around each module take the times on the workers, so the times do not hold what this process takes
    to issue, if the workers have enough to do. Call the model once before: the first call takes longer.

    Args:
        args, kwargs: what the model is called with.
        backward: run the backward pass of the sum of what it returns, too. Gradients stay as they were.

    Raises:
        UsageError: `model` is no module, or returns nothing that has a gradient with `backward`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"profile_model takes an nn.Module and its arguments, got {model!r:.80}")
    watching = _Watching(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(saved_tensors_hooks(watching.saves, _unpacked))
            result = model(*args, **kwargs)
        if backward:
            for parameter, _ in gradients:
                parameter.grad = None
            _run_backward(result)
    finally:
        watching.remove()
        if backward:
            for parameter, gradient in gradients:
                parameter.grad = gradient
    return ModelProfile(
        _seen(name, module, watching.spans[name], backward)
        for name, module in model.named_modules()
        if watching.spans[name].calls
    )


def _run_backward(result: object) -> None:
    outputs = _differentiated(result)
    if not outputs:
        raise UsageError("the model returned nothing that has a gradient: leave backward= out")
    torch.autograd.backward([output.sum() for output in outputs])


def _seen(name: str, module: nn.Module, span: _Span, backward: bool) -> ModuleProfile:
    parameters = {_memory(p): _bytes(p) for p in module.parameters()}
    return ModuleProfile(
        name,
        type(module).__name__,
        span.home.place if span.home is not None else None,
        span.calls,
        sum(parameters.values()),
        span.saved,
        _milliseconds(span.forward),
        _milliseconds([(c.begin, c.end) for c in span.backward if c.begin and c.end]) if backward else None,
    )


def _milliseconds(pairs: Sequence[tuple[Event, Event]]) -> float:
    return sum(start.elapsed_time(end) for start, end in pairs)


@dataclass(frozen=True)
class _Home:
    """Where a module computes: its place, and the device that torch knows it by."""

    place: Place
    device: torch.device


def _differentiated(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _local(tensor: object) -> object:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _home_of(leaves: Iterable[object]) -> _Home | None:
    """Return where the first remote tensor lives."""
    for leaf in map(_local, leaves):
        if isinstance(leaf, (DistributedTensor, UnevenTensor)):
            return _Home(leaf.place, leaf.device)
    return None


def _now(home: _Home | None) -> Event:
    """Return an event of the moment that the current stream of a home, or else of this place, has come to."""
    event = Event(enable_timing=True)
    event.record(None if home is None else current_stream(home.device))
    return event


def _memory(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    if isinstance(local, UnevenTensor):
        # The first member has the largest shard, or as large a one as any.
        local = members_of(local)[0]
    if isinstance(local, DistributedTensor):
        return id(local._handle.storage)
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    if isinstance(local, UnevenTensor):
        return max(t.untyped_storage().nbytes() for t in members_of(local))
    assert isinstance(local, torch.Tensor)
    return local.untyped_storage().nbytes()


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
