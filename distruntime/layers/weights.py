"""The weights of layers over partitioned tensors: they live whole on one place, as in the serial layer.

Those of layers that are too large for one place live in parts, each where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TypeVar

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plan import Size
from ..collectives.plans import balanced, coordinates, number
from ..errors import NotSupportedError, UsageError

T = TypeVar("T")
# Sums of many numbers of these types are made in float32, as torch makes them.
NARROW = (torch.float16, torch.bfloat16)


def widened(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors whose sums are those that torch makes."""
    return [x.float() if x.dtype in NARROW else x for x in xs]


class Copies:
    """Copies of a value from where it lives to all places of a partition.

    It lives whole on the first place, or in parts, each on the first place that uses it.

    Args:
        along: for each dimension of the value, the dimension of the partition that cuts it, or None. A place
            then gets its balanced part.
        fused: so many values stand one after the other along dimension 0. Each of them is cut, and a place
            gets a part of each.
    """

    def __init__(self, on: Partition, along: Sequence[int | None], fused: int = 1) -> None:
        self.on, self._fused = on, fused
        used = [d if d is not None and d < on.dim else None for d in along]
        if fused > 1:
            used = [None, *used]
        self.cut = any(d is not None and on.shape[d] > 1 for d in used)
        first = on.places[:1]
        self._whole = Partition(first, (1,) * (len(used) if self.cut else on.dim))
        self.parts = self._whole
        if self.cut:
            self.parts, self._corner, self._order = _corner(on, used)

    def __call__(self, value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each place's copy, or its part, of a whole or of parts. Return at once."""
        if not self.cut:
            assert isinstance(value, torch.Tensor)
            return primitives.broadcast([value], self._whole, self.on)
        if isinstance(value, torch.Tensor):
            opened = [self._opened(value)]
            value = [self._closed(t) for t in primitives.repartition(opened, self._whole, self.parts)]
        return primitives.broadcast([value[k] for k in self._order], self._corner, self.on)

    def back(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value on the first place, of copies that are equal where they should be."""
        if not self.cut:
            return copies[0]
        return self.joined([copies[self.on.places.index(place)] for place in self.parts.places])

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole on the first place, of its parts."""
        opened = [self._opened(part) for part in parts]
        return self._closed(primitives.repartition(opened, self.parts, self._whole)[0])

    def split(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a whole that is here or on any place, where they live."""
        return [self._closed(part) for part in self.parts.scatter(self._opened(value))]

    def sizes(self, whole: torch.Size) -> list[torch.Size]:
        """Return the sizes of the parts."""
        if not self.cut:
            return [whole]
        if self._fused == 1:
            return self.parts.shapes(whole)
        opened = self.parts.shapes((self._fused, whole[0] // self._fused, *whole[1:]))
        return [torch.Size((size[0] * size[1], *size[2:])) for size in opened]

    def _opened(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._fused == 1 else value.unflatten(0, (self._fused, -1))

    def _closed(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._fused == 1 else value.flatten(0, 1)


def _corner(on: Partition, used: Sequence[int | None]) -> tuple[Partition, Partition, list[int]]:
    """Return the places that have a part first: as the value is cut, and as `on` is cut.

    The numbers say which part each place of the second has.
    """
    shape = tuple(1 if d is None else on.shape[d] for d in used)
    rest = tuple(n if d in used else 1 for d, n in enumerate(on.shape))
    parts = []
    for at in coordinates(shape):
        index = [0] * on.dim
        for d, c in zip(used, at):
            if d is not None:
                index[d] = c
        parts.append(number(tuple(index), on.shape))
    corner = sorted(parts)
    places = on.places
    return (
        Partition([places[k] for k in parts], shape),
        Partition([places[k] for k in corner], rest),
        [parts.index(k) for k in corner],
    )


def partition(value: object, name: str = "P") -> Partition:
    """Return `value`; raise `UsageError` if it is no partition."""
    if not isinstance(value, Partition):
        raise UsageError(
            f"{name}, the first argument of a layer, is a distruntime.mesh.Partition, "
            f"got {type(value).__name__}"
        )
    return value


def each(value: int | Sequence[int], count: int, name: str) -> Size:
    """Return a number for each dimension, of one for all or of one each."""
    found = (value,) * count if isinstance(value, int) else tuple(value)
    if len(found) != count or not all(type(n) is int for n in found):
        raise UsageError(f"{name} is a number, or {count} of them, got {value!r}")
    return found


def require_balanced(lengths: Size, layer: str, dim: int) -> None:
    """Raise `UsageError` for a dimension that is not cut as `P.scatter` cuts it."""
    if lengths != balanced(sum(lengths), len(lengths)):
        raise UsageError(
            f"{layer} cuts its weights as P.scatter cuts dimension {dim}, into "
            f"{balanced(sum(lengths), len(lengths))}; the shards are {lengths} long there: "
            "dr.primitives.repartition(xs, P, P) balances them"
        )


def require_dims(dims: int, layer: str, expected: int) -> None:
    """Raise `UsageError` for shards of other dimensions than a layer takes."""
    if dims != expected:
        raise UsageError(
            f"{layer} takes shards of {expected} dimensions (batch, channels and {expected - 2} of space), "
            f"got {dims}"
        )


def require_default(value: T, default: T, name: str, layer: str) -> None:
    """Raise `NotSupportedError` for an argument that only the serial layer takes."""
    if value != default:
        raise NotSupportedError(
            f"{layer} over a partition takes {name}={default!r} only, got {value!r}: "
            "gather the tensor on one place for the serial layer"
        )


# Each weight has the copies that it feeds, and its size as a whole.
Feeds = Mapping[str, tuple[Copies, torch.Size]]


class ShardedWeights(torch.nn.Module):
    """A layer whose weights live whole on one place, or in parts: `layer.weight` is then a list."""

    # It is empty where weights live whole.
    _feeds: Feeds = MappingProxyType({})

    def _cut_up(self, copies: Mapping[str, Copies]) -> None:
        """Put parts in the place of weights that torch has made without memory, and draw them."""
        feeds = dict[str, tuple[Copies, torch.Size]]()
        for name, own in copies.items():
            whole = self._parameters[name]
            if whole is None:
                # torch's layer has none, and shows that so.
                continue
            del self._parameters[name]
            feeds[name] = own, whole.shape
            places = own.parts.homes
            for key, size, home in zip(_names(name, own), own.sizes(whole.shape), places, strict=True):
                part = torch.empty(size, dtype=whole.dtype, device=home.device)
                self.register_parameter(key, torch.nn.Parameter(part))
        self._feeds = feeds
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights as torch draws them.

        A part is drawn on the first place, by the size of the whole, and goes to its own. So no place has the
        whole, and parts on different places have different numbers.
        """
        if not self._feeds:
            super().reset_parameters()  # type: ignore[misc]
        for name, (own, _) in self._feeds.items():
            for key in _names(name, own):
                part = self._parameters[key]
                assert part is not None
                drawn = torch.empty_like(part, device=own.on.homes[0].device)
                self._draw(drawn, name)
                part.copy_(drawn)

    def _draw(self, part: torch.Tensor, name: str) -> None:
        bound = prod(self._feeds["weight"][1][1:]) ** -0.5
        part.uniform_(-bound, bound)

    def __getattr__(self, name: str) -> torch.Tensor | torch.nn.Module:
        feeds: Feeds = self.__dict__.get("_feeds", {})
        if name not in feeds or not feeds[name][0].cut:
            return super().__getattr__(name)
        parts: torch.Tensor = [self._parameters[key] for key in _names(name, feeds[name][0])]  # type: ignore[assignment]
        return parts

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (own, _) in self._feeds.items():
            parts = [destination.pop(prefix + key) for key in _names(name, own)]
            destination[prefix + name] = own.joined(parts) if own.cut else parts[0]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        for name, (own, size) in self._feeds.items():
            if not own.cut:
                continue
            value = found.pop(prefix + name, None)
            # What does not fit leaves the parts as they are.
            parts: Sequence[torch.Tensor | None] = [self._parameters[key] for key in _names(name, own)]
            if value is None:
                missing_keys += [prefix + name] if strict else []
            elif value.shape != size:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: copying a param with shape {value.shape} from "
                    f"checkpoint, the shape in current model is {size}."
                )
            else:
                parts = own.split(value)
            for key, part in zip(_names(name, own), parts):
                assert part is not None
                found[prefix + key] = part
        super()._load_from_state_dict(
            found, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _names(name: str, own: Copies) -> list[str]:
    return [f"{name}_{k}" for k in range(len(own.parts))] if own.cut else [name]
