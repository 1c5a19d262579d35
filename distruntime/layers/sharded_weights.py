"""Weights that live in parts, each where it is used, for layers that are too large for one place.

The layer's `state_dict` has the whole weights, as the serial layer's has. Its parameters are the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

import torch

from .weights import Copies

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
