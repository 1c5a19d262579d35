"""`dr.profiler.detect_nan`: which operator was the first to give NaN, in which module, and on which line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..errors import NonFiniteError, without_our_frames
from ..log.current import current_streams
from ..log.line import Line, line_text, user_line
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, members_of

# So many flags are joined into one tensor, so that the workers hold few small ones.
_JOINED = 256
# So many forward operators are remembered, for those of the backward pass to name.
_MOST_FORWARD = 1_000_000

_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
    )
)

Key = tuple[object, ...]


@dataclass(frozen=True)
class _Seen:
    """An operator that was looked at: what it is, the module that called it, and the line."""

    operator: str
    module: str
    line: Line
    # A backward operator has the forward one here.
    forward: _Seen | None = None

    def told(self) -> str:
        where = f"\n  in {self.module}" if self.module else ""
        text = f"{where}\n  issued at {line_text(self.line)}"
        if self.forward is not None:
            text += f"\n  it is the gradient of {self.forward.operator}"
            text += f"{self.forward.told()}"
        return text


@dataclass
class _Flags:
    """Whether each operator of one stream gave what is looked for, in the order of the operators."""

    new: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    joined: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)

    def join(self) -> None:
        if self.new:
            numbers, flags = [number for number, _ in self.new], [flag for _, flag in self.new]
            self.joined.append((numbers, torch.stack(flags)))
            self.new = []

    def take(self) -> list[tuple[list[int], torch.Tensor]]:
        self.join()
        taken, self.joined = self.joined, []
        return taken


@final
class detect_nan(TorchDispatchMode):
    """Find the first operator that gives NaN to a remote tensor in a `with` block, on its worker.

    Two more operators look at each operator of the block where it runs, and nobody waits. The block's end
    waits, and raises if there was a NaN. Programs run op by op in the block, so that it sees their operators,
    too. It sees neither local tensors nor the bodies of `dr.remote` functions. Outside of the block it costs
    nothing.

    Args:
        overflow: find operators, too, that give an infinity, and get finite tensors only. Those that make
            one on purpose are left out: factories, and those with an infinite argument, as masks have.

    Raises (at the end of the block, or in `check`):
        NonFiniteError: it names the operator, the module, and the line that issued it. In the backward pass
            it names those of the forward operator, too.
    """

    def __init__(self, *, overflow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overflow = overflow
        self._seen: list[_Seen] = []
        self._flags: dict[Key, _Flags] = {}
        self._forward: dict[int, _Seen] = {}
        self._modules: list[tuple[nn.Module, str]] = []
        self._hooks: list[RemovableHandle] = []

    # -- the block -------------------------------------------------------------------------------------------

    def __enter__(self) -> detect_nan:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @without_our_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self.check()

    @without_our_frames
    def check(self) -> None:
        """Raise `NonFiniteError` if an operator so far gave NaN. Block until all of them have run."""
        taken = [one for flags in self._flags.values() for one in flags.take()]
        found = fetch([_by_member(flags) for _, flags in taken])
        bad = {
            number
            for (numbers, _), members in zip(taken, found, strict=True)
            for flags in members
            for number, is_bad in zip(numbers, flags.tolist(), strict=True)
            if is_bad
        }
        if not bad:
            return
        first = self._seen[min(bad)]
        what = "NaN or an infinity" if self._overflow else "NaN"
        more = f", and {len(bad) - 1} more gave it" if len(bad) > 1 else ""
        self._seen, self._flags, self._forward = [], {}, {}
        raise NonFiniteError(f"{first.operator} was the first to give {what}{more}{first.told()}")

    # -- the modules -----------------------------------------------------------------------------------------

    def _enters(self, module: nn.Module, arguments: object) -> None:
        del arguments
        outer, path = self._modules[-1] if self._modules else (None, "")
        name = "" if outer is None else _name_within(outer, module)
        self._modules.append((module, f"{path}.{name}".strip(".")))

    def _leaves(self, module: nn.Module, arguments: object, result: object) -> None:
        del arguments, result
        if self._modules and self._modules[-1][0] is module:
            self._modules.pop()

    def _module(self) -> str:
        if not self._modules:
            return ""
        module, path = self._modules[-1]
        root = type(self._modules[0][0]).__name__
        return f"{root}.{path} ({type(module).__name__})" if path else root

    # -- the operators ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        # What has just been allocated may have any values.
        if func.overloadpacket._qualified_op_name in _UNINITIALISED:
            return func(*args, **named)
        finite: dict[object, torch.Tensor] = {}
        if self._overflow and not _has_infinity([args, named]):
            # The operator may write over what it is given.
            finite = _finite(_remote([args, named]))
        result = func(*args, **named)
        # The optimizers' operators on lists return nothing.
        made = _remote(result) or _remote(_written(func, args, named))
        if made:
            self._look(str(func), made, finite)
        return result

    def _look(
        self, operator: str, made: Iterable[DistributedTensor], finite: Mapping[object, torch.Tensor]
    ) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            seen = _Seen(operator, self._module(), user_line())
            if len(self._forward) < _MOST_FORWARD:
                self._forward[torch.autograd._get_sequence_nr() - 1] = seen
        else:
            forward = self._forward.get(node._sequence_nr())
            seen = _Seen(f"{operator} ({node.name()})", "", user_line(), forward)
        number = len(self._seen)
        self._seen.append(seen)
        for tensor in made:
            bad = torch.isnan(tensor).any()
            if tensor._handle.place in finite:
                bad = bad | (torch.isinf(tensor).any() & finite[tensor._handle.place])
            key = (
                tensor._handle.place,
                current_streams.get().get((tensor.place.node, tensor.place.local_device)),
            )
            flags = self._flags.setdefault(key, _Flags())
            flags.new.append((number, bad))
            if len(flags.new) >= _JOINED:
                flags.join()


def _remote(tree: object) -> list[DistributedTensor]:
    """Return the remote tensors of numbers with fractions in a tree, those of DTensors too."""
    found = []
    for leaf in tree_leaves(tree):
        local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        for t in members_of(local) if isinstance(local, UnevenTensor) else [local]:
            if isinstance(t, DistributedTensor) and t.numel():
                if t.is_floating_point() or t.is_complex():
                    found.append(t)
    return found


def _written(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments that an operator writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | dict(kwargs)
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
    ]


def _finite(given: Iterable[DistributedTensor]) -> dict[object, torch.Tensor]:
    """Return, for each place that has some of these, whether all numbers of them there are finite."""
    flags: dict[object, list[torch.Tensor]] = {}
    for tensor in given:
        flags.setdefault(tensor._handle.place, []).append(torch.isfinite(tensor).all())
    return {home: torch.stack(found).all() for home, found in flags.items()}


def _by_member(flags: torch.Tensor) -> list[torch.Tensor]:
    """Return the flags of each member of a mesh, or those of a place."""
    assert isinstance(flags, DistributedTensor)
    members = len(flags._handle.place.place.members)
    return [flags.member(k) for k in range(members)] if members else [flags]


def _has_infinity(tree: object) -> bool:
    infinity = float("inf")
    return any(isinstance(leaf, float) and leaf in (infinity, -infinity) for leaf in tree_leaves(tree))


def _name_within(outer: nn.Module, inner: nn.Module) -> str:
    """Return the path of a module in another one; its class where it stands elsewhere."""
    return next((name for name, one in outer.named_modules() if one is inner), type(inner).__name__)
