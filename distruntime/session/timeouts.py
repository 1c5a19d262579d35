"""What a wait takes as its limit."""

from __future__ import annotations

import threading
from numbers import Real

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
