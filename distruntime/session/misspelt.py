"""Functions with many arguments: a misspelt one is told which is meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import of_caller

P = ParamSpec("P")
R = TypeVar("R")


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function's `TypeError` about an unknown keyword name the one that is most alike."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                alike = difflib.get_close_matches(name, known, n=1)
                raise of_caller(
                    TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}. "
                        + (f"Did you mean {alike[0]!r}?" if alike else f"It has {', '.join(known)}")
                    )
                )
        return function(*args, **kwargs)

    return call
