"""Numbers that differ from member to member, and the few steps of torch that depend on the rank.

In a program of one rank per process, a rank is an int. Here one process speaks for all members, so what
depends on the rank is a symbolic int that knows each member's value: torch has one, for its
single-process debugging class LocalTensor, and marks the functions of DTensor that are to run once for
each rank (`maybe_run_for_local_tensor`). On a mesh's tensors these run once for each member, on the
members' own shards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import _local_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import NotSupportedError, UsageError
from ..log.current import current_member
from ..log.handle import Residence
from ..log.mesh_log import MeshLog
from ..log.shards import member_of, mesh_of
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..tensors.tensor import DistributedTensor

_MOST_RESULTS = 1024
# A mesh keeps so many tensors of one number for each member.
_MOST_NUMBERS = 64


class _Varying(_local_tensor.LocalIntNode):
    """torch's own node, but it refuses questions that have no one answer. torch's node answers: not equal."""

    def int_(self) -> NoReturn:
        raise self._refused("one int was asked of it")

    guard_int = int_

    def _refused(self, what: str) -> UsageError:
        shown = ", ".join(f"member {k}: {n}" for k, n in list(self._local_ints.items())[:4]) + (
            ", ..." if len(self._local_ints) > 4 else ""
        )
        return UsageError(
            f"this number differs from member to member ({shown}), and {what}: one program speaks "
            "for all members, and takes one way. "
            "Compute with the tensor that it is, mesh.coordinate(dim), and torch.where, or with "
            "one member's tensors, t.member(k)"
        )


class _Undecided:
    """Whether such a number equals another: this differs, too. Whoever needs one answer gets an error."""

    def __init__(self, error: UsageError) -> None:
        self._error = error

    def __repr__(self) -> str:
        return "<differs from member to member>"

    _graph_repr = __repr__

    def bool_(self) -> NoReturn:
        raise self._error

    def guard_bool(self, file: str, line: int) -> NoReturn:
        raise self._error

    expect_true = guard_size_oblivious = guard_bool

    def guard_or_false(self, file: str, line: int) -> bool:
        """Return False, for those who look for a shorter way: a slice for whether it is everything."""
        return False

    statically_known_true = guard_or_false

    def guard_or_true(self, file: str, line: int) -> bool:
        """Return True."""
        return True

    def is_bool(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_symbolic = is_constant = is_nested_int = is_int

    def sym_not(self) -> _Undecided:
        return self


def _computed(name: str) -> Callable[..., Any]:
    method = getattr(_local_tensor.LocalIntNode, name)

    def compute(self: _Varying, *others: Any) -> Any:
        found = method(self, *others)
        return _Varying(found._local_ints) if type(found) is _local_tensor.LocalIntNode else found

    return compute


def _compared(name: str, sign: str) -> Callable[..., Any]:
    compare = getattr(operator, name)

    def ask(self: _Varying, other: Any) -> Any:
        others = getattr(other, "_local_ints", None)
        answers = {
            compare(n, other.maybe_as_int() if others is None else others[k])
            for k, n in self._local_ints.items()
        }
        if len(answers) > 1:
            return _Undecided(self._refused(f"so does whether it is {sign} {other}"))
        return torch._C._get_constant_bool_symnode(answers.pop())

    return ask


for _name in ("add", "sub", "mul", "mod", "neg", "floordiv", "int_floordiv", "sym_max", "sym_min", "sym_sum"):
    setattr(_Varying, _name, _computed(_name))
for _name, _sign in {
    "eq": "equal to",
    "ne": "unlike",
    "lt": "below",
    "le": "at most",
    "gt": "above",
    "ge": "at least",
}.items():
    setattr(_Varying, _name, _compared(_name, _sign))


def varying(values: Sequence[int]) -> Any:
    """Return the int that is `values[k]` on member k; a plain one where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return torch.SymInt(_Varying(dict(enumerate(values))))


def numbers(home: Residence, values: tuple[int, ...], stay_on_cpu: bool = False) -> DistributedTensor:
    """Return a tensor on a mesh, of one int64 that is `values[k]` on member k. Return at once.

    The mesh keeps the tensor for the next call with these values, so nobody may write it. See `upload` for
    `stay_on_cpu`.
    """
    kept, key = home.numbers, (stay_on_cpu, values)
    found = kept.get(key)
    if not isinstance(found, DistributedTensor):
        if len(kept) >= _MOST_NUMBERS:
            kept.clear()
        mesh_log = home.node
        assert isinstance(mesh_log, MeshLog)
        places = [mesh_log.session.places.residence(place, numbered=False) for place in mesh_log.members]
        handles = [
            upload(torch.tensor(n, device="cpu"), place, stay_on_cpu=stay_on_cpu)
            for n, place in zip(values, places)
        ]
        found = kept[key] = wrap(DistributedTensor, mesh_of(mesh_log, home, handles))
    return found


def varies(value: Any) -> bool:
    """Whether a value is an int that differs from member to member."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, _local_tensor.LocalIntNode)


def home_of(value: Any) -> Residence | None:
    """Return where the members of a mesh's tensor are; None of anything else."""
    if not isinstance(value, DistributedTensor) or not value._handle.place.node.members:
        return None
    home: Residence = value._handle.place
    return home


def _at(value: Any, k: int) -> Any:
    if isinstance(value, DistributedTensor) and value._handle.place.node.members:
        return wrap(type(value), member_of(value._handle, k))
    return value.node._local_ints[k] if varies(value) else value


def run_for_each(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function once for each member, on its shards and its numbers; return the results as a mesh's."""
    flat, shape = tree_flatten((list(args), kwargs))
    homes = [
        t._handle.place for t in flat if isinstance(t, DistributedTensor) and t._handle.place.node.members
    ]
    name = getattr(function, "__qualname__", str(function))
    if not homes and all(value is None or isinstance(value, int) or varies(value) for value in flat):
        return _computed_once(function, flat, shape, name)
    once = _AT_ONCE.get(name)
    if once is not None and homes and (done := once(function, *args, **kwargs)) is not NotImplemented:
        return done
    count = len(homes[0].node.members) if homes else len(next(v for v in flat if varies(v)).node._local_ints)
    found = []
    with torch.no_grad():
        for k in range(count):
            own, named = tree_unflatten([_at(value, k) for value in flat], shape)
            token = current_member.set(_member(homes[0], k) if homes else None)
            try:
                found.append(function(*own, **named))
            finally:
                current_member.reset(token)
    return _joined(found, homes[0] if homes else None, name)


def _member(home: Any, k: int) -> Any:
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    return mesh_log.session.places.residence(mesh_log.members[k], numbered=False)


# -- where shards are uneven ---------------------------------------------------------------------------------


def _on(value: Any, t: Any) -> Any:
    """Return a number that differs as a tensor where `t` is."""
    return numbers(t._handle.place, tuple(value.node._local_ints.values())) if varies(value) else value


def pick(tensor: Any, dim: int, parts: int, index: Any, stretches: int = 1) -> Any:
    """Return each member's part of an even cut of a dimension, or of its stretches; or NotImplemented."""
    if tensor.size(dim) % (parts * stretches):
        return NotImplemented
    with torch.no_grad():
        rows = tensor.unflatten(dim, (stretches, parts, tensor.size(dim) // (parts * stretches)))
        return rows.index_select(dim + 1, _on(index, tensor).reshape(1)).flatten(dim, dim + 2)


def _select_split(function: Any, shard: Any, tensor: Any, num_chunks: int, index: Any, **options: Any) -> Any:
    return pick(tensor, shard.dim, num_chunks, index, getattr(shard, "split_factor", 1))


def _unpad_new_dim(
    function: Any, shape: Any, tensor: Any, num_chunks: int, old: int, new: int, rank: Any
) -> Any:
    return NotImplemented if shape[old] % num_chunks or shape[new] % num_chunks else tensor


def _unpad_sizes(function: Any, dim: int, tensor: Any, pads: Any, rank: Any, make_contiguous: bool) -> Any:
    return NotImplemented if any(pads) else tensor


def _mask(function: Any, tensor: Any, offset: Any, size: Any) -> Any:
    offset, size = _on(offset, tensor), _on(size, tensor)
    mask = (tensor < offset) | (tensor >= offset + size)
    # torch's own function writes by the mask, and would ask each member where it is true.
    return mask, (tensor - offset).masked_fill(mask, 0)


_AT_ONCE: dict[str, Callable[..., Any]] = {
    "Shard._select_split_tensor": _select_split,
    "_StridedShard._select_split_tensor": _select_split,
    "Shard._unpad_for_new_shard_dim": _unpad_new_dim,
    "Shard._maybe_unpad_tensor_with_sizes": _unpad_sizes,
    "_MaskPartial._mask_tensor": _mask,
}

# DTensor does the same arithmetic on ranks and sizes with every operator.
_results: dict[Any, Any] = {}


def _computed_once(function: Callable[..., Any], flat: list[Any], shape: Any, name: str) -> Any:
    values = [tuple(v.node._local_ints.values()) if varies(v) else v for v in flat]
    key = function, shape, tuple(values)
    found = _results.get(key)
    if found is None:
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        each = []
        for k in range(len(next(v for v in values if type(v) is tuple))):
            own, named = tree_unflatten([v[k] if type(v) is tuple else v for v in values], shape)
            each.append(function(*own, **named))
        found = _joined(each, None, name)
        _results[key] = found
    return found


def _joined(found: list[Any], home: Any, name: str) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor):
        shapes = [tuple(t.shape) for t in found]
        if len(set(shapes)) > 1:
            shown = ", ".join(f"member {k}: {shape}" for k, shape in enumerate(shapes[:4])) + (
                ", ..." if len(shapes) > 4 else ""
            )
            raise NotSupportedError(
                f"the members' shards would have different shapes ({shown}), and a mesh's tensor "
                "has one. Make the size a multiple "
                "of the number of members, or use lists of tensors, which may be uneven: "
                "distruntime.primitives"
            )
        # A model on the meta device has no memory yet.
        if all(t.device.type == "meta" for t in found):
            return first
        if home is None or not all(isinstance(t, DistributedTensor) for t in found):
            if all(t.device.type == "cpu" and torch.equal(first, t) for t in found):
                return first
            raise NotSupportedError(
                f"{name}: torch asks for this process's own part here, and this process speaks for "
                "all members of a mesh. "
                "distruntime.fetch(x) gives the whole of a DTensor, "
                "distruntime.fetch(model.state_dict()) of a model"
            )
        # Views must stay views, as what is written to them goes to the tensor.
        alike = len({t.stride() for t in found}) == 1
        handles = [(t if alike else t.contiguous())._handle for t in found]
        return wrap(DistributedTensor, mesh_of(home.node, home, handles))
    if isinstance(first, int) and not isinstance(first, bool):
        return varying(found)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items), home, name) for items in zip(*found))
    return first


def per_member(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that depends on the rank, and runs for each member of a mesh."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        if any(varies(value) for value in flat):
            return run_for_each(function, args, kwargs)
        return function(*args, **kwargs)

    return choose
