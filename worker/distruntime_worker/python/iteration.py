"""Iterators of the user's own: what `for` and `async for` over an object's proxy do on its worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol, final, runtime_checkable

from ..values.step import Operator


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
NAMED: dict[str, Operator] = {"iter": iter, "next": advance, "ahead": _Item, "aiter": _aiter}
