"""What is worked out once for each code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

from ..log.line import as_key

T = TypeVar("T")
# So many codes are remembered by each function.
_MOST = 16384


def once(find: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """Remember what a function finds, by the code that it was given.

    `dis` shows each constant by its `repr`, which of a remote tensor among the globals would read a value. So
    the function does not see what `as_key` leaves out.
    """
    kept = functools.lru_cache(maxsize=_MOST)(find)

    @functools.wraps(find)
    def found(code: CodeType) -> T:
        return kept(as_key(code))

    return found
