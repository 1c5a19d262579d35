"""How long a wait may last: what users give as a limit, and the moment at which it ends."""

from __future__ import annotations

import threading
import time
from numbers import Real
from typing import overload

from ..errors import UsageError


def is_timeout(timeout: object) -> bool:
    """Whether a wait can last so long: nothing ever exceeds nan, and clocks overflow past the longest."""
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        return False
    return 0 <= timeout <= threading.TIMEOUT_MAX  # type: ignore[operator]


def checked(timeout: float | None) -> float | None:
    """Return a wait's limit in seconds, or None, which is no limit; raise `UsageError` for anything else."""
    if timeout is None:
        return None
    if not is_timeout(timeout):
        raise UsageError(
            "a timeout is a number of seconds from 0 on, or None to wait as long as it takes; got "
            f"{timeout!r}"
        )
    return float(timeout)


@overload
def deadline_in(timeout: float) -> float: ...
@overload
def deadline_in(timeout: float | None) -> float | None: ...
def deadline_in(timeout: float | None) -> float | None:
    """Return the moment (monotonic) that is `timeout` seconds from now. None has no end."""
    return None if timeout is None else time.monotonic() + timeout


@overload
def left_until(deadline: float) -> float: ...
@overload
def left_until(deadline: float | None) -> float | None: ...
def left_until(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 when it has passed. None has no end."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
