"""Memory that may be read only: what another session has published for its readers."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UsageError
from .handle import Storage
from .line import Line, line_text
from .spec import Spec


class ReadOnlyStorage(Storage):
    """The memory of a value of another session.

    A class of its own, so that storages that may be written pay nothing for it.
    """

    __slots__ = ("name",)

    def __init__(self, spec: Spec, name: str) -> None:
        super().__init__(spec)
        self.name = name


def require_writable(storages: Iterable[object], line: Line) -> None:
    """Raise `UsageError` if one of them may be read only; `line` is who wants to write it."""
    for storage in storages:
        if type(storage) is ReadOnlyStorage:
            raise UsageError(
                f"a tensor of {storage.name!r} cannot be written: "
                "another session has published it, and shares it for reading\n"
                f"  written at {line_text(line)}\n"
                "  write to a copy of your own: x.clone(), or copy.deepcopy(model); "
                "a model that is only evaluated: model.eval()"
            )
