"""The structure of what is published: a pickle with a number in the place of each remote tensor.

`load` is the only function of the master that unpickles. It is called with what a trusted key has signed, and
with nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import cloudpickle
import torch

from ..errors import NotSupportedError, ProtocolError, UsageError
from ..log.handle import Place
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor
from ..wire.codec import bytes_tensor, dtype_name, tensor_bytes
from ..wire.units import count_text

# These attributes of a proxy do not travel as attributes.
_OWN = ("_handle", "_is_param")

Leaf = torch.Tensor | Place


@dataclass(frozen=True)
class Structure:
    """What `dump` made: the bytes, and the leaf for each number in them.

    A leaf is a remote tensor, a local one of one element, or a place.
    """

    pickled: bytes
    leaves: list[Leaf]


def dump(thing: object, place_of: Callable[[torch.device], Place | None]) -> Structure:
    """Take a module, an optimizer, or a tree of them and of remote tensors apart.

    `place_of` tells the place that a remote device means; devices are numbered anew in each session.

    Raises:
        UsageError: a local tensor of more than one element, which stays where it is, or what cannot be
            pickled. The text says where it is.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, place_of)
    try:
        pickler.dump(thing)
        told = 0
        # A tensor in an attribute may have attributes itself.
        while told < len(pickler.leaves):
            more = dict(enumerate(pickler.leaves[told:], told))
            told += len(more)
            pickler.dump(
                {
                    k: own
                    for k, leaf in more.items()
                    if isinstance(leaf, torch.Tensor) and (own := _attributes(leaf))
                }
            )
        pickler.dump(None)
    except _Refused as refused:
        raise _unfit(thing, refused.args[0]) from None
    except UsageError:
        raise
    except Exception as error:
        # Any class of the user's may raise anything while it is pickled.
        raise UsageError(
            f"{_article(thing)} cannot be published: {type(error).__name__}: {error}. You can "
            "publish a module, an optimizer, or lists and dicts of remote tensors, such as a state_dict(). "
            "Pickle must take whatever else is in them"
        ) from None
    return Structure(file.getvalue(), pickler.leaves)


def load(pickled: bytes, leaves: Sequence[object]) -> object:
    """Put together what `dump` has taken apart.

    This RUNS CODE that is in `pickled`: call it only with what a trusted key has signed.
    """
    unpickler = _Unpickler(io.BytesIO(pickled), leaves)
    try:
        thing = unpickler.load()
        while (attributes := unpickler.load()) is not None:
            for k, own in attributes.items():
                leaves[k].__dict__.update(own)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"what was published needs the module {error.name!r}, which cannot be imported here: put it "
            "where Python finds it. Classes defined in a script or a notebook travel themselves"
        ) from None
    except AttributeError as error:
        raise UsageError(f"what was published does not fit the code that is here: {error}") from None
    return thing


class _Refused(Exception):
    """A local tensor is in what is published."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, place_of: Callable[[torch.device], Place | None]) -> None:
        super().__init__(file, protocol=5)
        self.leaves: list[Leaf] = []
        self._place_of = place_of
        # The keys are identities of tensors, and places. `leaves` keeps the tensors alive.
        self._numbers: dict[int | Place, int] = {}

    def persistent_id(self, thing: object) -> int | None:
        """Return the number of what does not travel as it is, else None."""
        if isinstance(thing, torch.Tensor):
            known = self._numbers.get(id(thing))
            return self._add(id(thing), _fit(thing)) if known is None else known
        if type(thing) is torch.device:
            place = self._place_of(thing)
            if place is not None:
                known = self._numbers.get(place)
                return self._add(place, place) if known is None else known
        return None

    def _add(self, key: int | Place, leaf: Leaf) -> int:
        self._numbers[key] = len(self.leaves)
        self.leaves.append(leaf)
        return len(self.leaves) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[object]) -> None:
        super().__init__(file)
        self._leaves = leaves

    def persistent_load(self, number: int) -> object:
        """Return the leaf at a number."""
        return self._leaves[number]


def _fit(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be published as it is; raise for any other."""
    if isinstance(tensor, (DistributedTensor, UnevenTensor)):
        if tensor.place.members:
            raise NotSupportedError(
                f"a tensor on a mesh ({tensor.place}) cannot be published as one: publish its members' "
                "shards, dr.publish(name, [x.member(k) for k in range(mesh.size())]), and put them "
                "together with dr.from_shards"
            )
        return tensor
    if isinstance(getattr(tensor, "_local_tensor", None), (DistributedTensor, UnevenTensor)):
        raise NotSupportedError(
            "a DTensor cannot be published as one: publish the shards of its local tensor, "
            "[x.to_local().member(k) for k in range(mesh.size())], and put them together with "
            "dr.from_shards and DTensor.from_local"
        )
    if (
        tensor.numel() == 1
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    ):
        return tensor
    raise _Refused(tensor)


def _attributes(tensor: torch.Tensor) -> dict[str, object]:
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}


# -- local leaves as they travel -----------------------------------------------------------------------------


def pack_local(tensor: torch.Tensor) -> list[object]:
    """Return a one-element local tensor in its wire form."""
    flags = bool(tensor.requires_grad), isinstance(tensor, torch.nn.Parameter)
    return [dtype_name(tensor.dtype), list(tensor.shape), bytes(tensor_bytes(tensor)), *flags]


def unpack_local(fields: list[object]) -> torch.Tensor:
    """Return the tensor that `pack_local` packed; raise `ProtocolError` for anything else."""
    match fields:
        case [str(dtype), list(sizes), bytes(data), bool(wants_grad), bool(is_parameter)]:
            tensor = bytes_tensor(dtype, sizes, data)
        case _:
            raise ProtocolError("what should be a local tensor of a publication is none")
    return (
        torch.nn.Parameter(tensor, requires_grad=wants_grad)
        if is_parameter
        else tensor.requires_grad_(wants_grad)
    )


# -- in words ------------------------------------------------------------------------------------------------


def described(thing: object) -> str:
    """Return what something is in a few words: "Linear, 8.0 B parameters".

    A dict or a list shows what is in it.
    """
    if isinstance(thing, torch.nn.Module):
        count = sum(p.numel() for p in thing.parameters())
        return f"{type(thing).__name__}, {count_text(count)} parameter{'' if count == 1 else 's'}"
    if isinstance(thing, torch.Tensor):
        return f"tensor {tuple(thing.shape)} {dtype_name(thing.dtype)}"
    if isinstance(thing, (dict, list, tuple)):
        items = list(thing.values() if isinstance(thing, dict) else thing)
        names = [f"{key}: " for key in thing] if isinstance(thing, dict) else [""] * len(items)
        shown = "; ".join(f"{str(name)[:30]}{_short(item)}" for name, item in zip(names[:4], items))
        return f"{type(thing).__name__} of {len(items)} ({shown}{', …' if len(items) > 4 else ''})"
    return type(thing).__name__


def _short(thing: object) -> str:
    return (
        f"{type(thing).__name__} of {len(thing)}"
        if isinstance(thing, (dict, list, tuple))
        else described(thing)
    )


def _article(thing: object) -> str:
    name = type(thing).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _unfit(thing: object, tensor: torch.Tensor) -> UsageError:
    where = _where(thing, tensor, set())
    here = "it" if not where else f"its {where.removeprefix('.')}"
    return UsageError(
        f"{_article(thing)} cannot be published: {here} is a local tensor, {tuple(tensor.shape)} "
        f"{dtype_name(tensor.dtype)} on {tensor.device}, and what is published stays where it is, on "
        'workers. Send it first: .to("remote")'
    )


def _where(thing: object, wanted: object, seen: set[int]) -> str | None:
    """Return the way from something to what is in it, or None if that is not in there.

    It is spelled as in a program: ".model.weight" or "['opt'].state[...]".
    """
    if thing is wanted:
        return ""
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    for name, item in _inside(thing):
        if (rest := _where(item, wanted, seen)) is not None:
            return name + rest
    return None


def _inside(thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, torch.nn.Module):
        items: list[tuple[str, object]] = [
            *thing.named_parameters(recurse=False),
            *thing.named_buffers(recurse=False),
            *thing.named_children(),
        ]
        listed = {id(item) for _, item in items}
        items += [
            (name, item)
            for name, item in vars(thing).items()
            if not name.startswith("_") and id(item) not in listed
        ]
        return [(f".{name}", item) for name, item in items]
    if isinstance(thing, torch.optim.Optimizer):
        return [(".param_groups", thing.param_groups), (".state", thing.state)]
    if isinstance(thing, Mapping):
        pairs = [
            (f"[{key!r}]" if not isinstance(key, torch.Tensor) else "[...]", item)
            for key, item in thing.items()
        ]
        return [*pairs, *((" key", key) for key in thing if isinstance(key, torch.Tensor))]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [(f"[{k}]", item) for k, item in enumerate(thing)]
    if isinstance(thing, torch.Tensor) or not hasattr(thing, "__dict__") or isinstance(thing, type):
        return []
    return [(f".{name}", item) for name, item in vars(thing).items()]
