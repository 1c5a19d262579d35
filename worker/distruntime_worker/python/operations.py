"""What an object's proxy calls by name; everything else that is called was sent.

Among these are `for` and `async for` over iterators of the user's own, and a module that lives here and whose
parameters a master trains: the other end of `dr.RemoteModule`.
"""

from __future__ import annotations

import asyncio
import copy
import io
import operator
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, final, runtime_checkable

import cloudpickle
import torch

from ..values.step import Operator


class Hosted:
    """A module, and the tensors of it that a master has proxies of."""

    def __init__(self, module: object) -> None:
        if not isinstance(module, torch.nn.Module):
            kind = type(module).__name__
            raise TypeError(
                f"dr.RemoteModule takes what makes a torch.nn.Module, and got one that makes a {kind}"
            )
        self.module = module
        self._names = [name for name, _ in module.named_parameters()]

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, object]]:
        """Return the parameters, the buffers, and what a state dict makes of their names."""
        parameters: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        state = self.module.state_dict(keep_vars=True)
        first = {id(parameter): name for name, parameter in parameters.items()}
        every = self.module.named_parameters(remove_duplicate=False)
        ties = {name: first[id(parameter)] for name, parameter in every if name not in parameters}
        return (
            parameters,
            buffers,
            {
                "parts": [name for name, _ in self.module.named_modules()],
                "ties": ties,
                "kept": [name for name in buffers if name in state],
                "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
            },
        )

    def forward(
        self, parameters: Sequence[torch.Tensor], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the module with these parameters, which are in its own memory and may want gradients."""
        given = dict(zip(self._names, parameters))
        return torch.func.functional_call(self.module, given, tuple(args), dict(kwargs))

    def train(self, mode: bool, part: str = "") -> None:
        """Set the mode of the module, or of a part."""
        self.module.get_submodule(part).train(mode)

    def requires_grad_(self, requires_grad: bool, part: str = "") -> None:
        """Set whether the parameters of the module, or of a part, require grad."""
        self.module.get_submodule(part).requires_grad_(requires_grad)

    def set_attribute(self, part: str, name: str, value: object) -> None:
        """Set an attribute of a part."""
        setattr(self.module.get_submodule(part), name, value)

    def assign(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have parameters be in other memory."""
        for name, tensor in parameters.items():
            self.module.get_parameter(name).data = tensor

    def to(self, dtype: torch.dtype) -> None:
        """Convert the parameters and buffers."""
        self.module.to(dtype)

    def packed(self) -> torch.Tensor:
        """Return the module as it moves to another worker."""
        file = io.BytesIO()
        # A class that came with the module is no module's of this worker.
        torch.save(self.module, file, pickle_module=cloudpickle)
        return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpack(packed: torch.Tensor, device: torch.device) -> Hosted:
    """Return a module that has come from another worker, by order of a master that has the key."""
    module: torch.nn.Module = torch.load(
        io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=False
    )
    return Hosted(module.to(device))


HOSTED: dict[str, Operator] = {"host": Hosted, "unpack": unpack}


@final
class _End:
    """What `advance` returns at the end of an iterator."""


PAST_END = _End()


def advance(iterator: Iterator[object]) -> object:
    """Return the next item, or `PAST_END`."""
    return next(iterator, PAST_END)


@final
class _Item:
    """The next item of an iterator, which has been made. It is an iterator itself, of one item at most."""

    def __init__(self, iterator: Iterator[object]) -> None:
        item = advance(iterator)
        self._items = [] if item is PAST_END else [item]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if not self._items:
            raise StopIteration
        return self._items.pop()


@runtime_checkable
class _Asynchronous(Protocol):
    """An object whose items come by `async for`."""

    def __aiter__(self) -> AsyncIterator[object]:
        """Return the iterator."""


@final
class _Awaiting:
    """The items of an asynchronous iterator, each awaited in an event loop of the iterator's own."""

    def __init__(self, given: _Asynchronous) -> None:
        self._iterator, self._loop = aiter(given), asyncio.new_event_loop()

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        try:
            return self._loop.run_until_complete(self._following())
        except StopAsyncIteration:
            raise StopIteration from None

    async def _following(self) -> object:
        return await anext(self._iterator)

    def __del__(self) -> None:
        # A generator that is left half-way is closed as Python's own loops do it.
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _aiter(given: Iterable[object] | _Asynchronous) -> Iterator[object]:
    return _Awaiting(given) if isinstance(given, _Asynchronous) else iter(given)


# What the proxies of objects and of iterators call by name.
ITERATED: dict[str, Operator] = {"iter": iter, "next": advance, "ahead": _Item, "aiter": _aiter}


def named(name: str) -> Operator:
    """Return what an object's proxy names: "getitem", "method step", "getattr count"."""
    what, _, attribute = name.partition(" ")
    found = _NAMED[what]
    return partial(found, attribute) if attribute else found


def _method(name: str, thing: object, *args: object, **kwargs: object) -> object:
    return getattr(thing, name)(*args, **kwargs)


def _call(thing: Operator, *args: object, **kwargs: object) -> object:
    return thing(*args, **kwargs)


def _getattr(name: str, thing: object) -> object:
    return getattr(thing, name)


def _setattr(name: str, thing: object, value: object) -> None:
    setattr(thing, name, value)


def _delattr(name: str, thing: object) -> None:
    delattr(thing, name)


def _reflected(what: str, right: object, left: object) -> object:
    return _NAMED[what](left, right)


def _callable(name: str, thing: object) -> bool:
    return callable(getattr(thing, name))


# What an object's proxy calls by name. Everything else that is called was sent.
_NAMED: dict[str, Operator] = {
    **HOSTED,
    **ITERATED,
    "method": _method,
    "reflected": _reflected,
    "call": _call,
    "getattr": _getattr,
    "setattr": _setattr,
    "delattr": _delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "callable": _callable,
    "len": len,
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
    "str": str,
    "repr": repr,
    **{
        name: getattr(operator, name)
        for name in (
            "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos abs invert "
            "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift "
            "lt le eq ne gt ge"
        ).split()
    },
}
