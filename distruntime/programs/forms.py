"""A program as workers learn it, and what they know of the arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from types import MethodType
from typing import NamedTuple, final

import msgpack

from ..log.log import Log
from ..wire.messages import PROGRAM


class Form:
    """A program as a log's workers learn it. They forget it when nobody holds this."""

    def __init__(self, log: Log, definition: list[object], options: Mapping[str, object]) -> None:
        self.fields: list[object] = [PROGRAM, definition, dict(options), 0]
        self.key: bytes = msgpack.packb(self.fields)
        self._taught = Taught(log, self.key)


class Taking(NamedTuple):
    """The form that takes arguments, with their numbers and their positions among the operands.

    Threads may replay a program at the same time, and so this is one value.
    """

    arguments: Set[int]
    positions: Sequence[int]
    form: Form
    # These contain the arguments. Most calls say these.
    known: Set[int]


@final
class Taught:
    """Stands for what a worker has learnt of a program: it forgets that when nobody holds this, or its equal.

    The collector may run the finalizer inside any lock, so it only appends, as that of a `Handle` does.
    """

    __slots__ = ("__del__",)

    __del__: Callable[[], object]

    def __init__(self, log: Log, key: bytes) -> None:
        self.__del__ = MethodType(log.dropped.append, key)
        with log.lock:
            log.templates.hold(key)
