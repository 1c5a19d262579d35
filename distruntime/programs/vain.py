"""Recordings in vain: a kind of call that is recorded again and again runs plainly, and its user is told.

A recording takes as long as some plain calls. It is in vain if it brings no plan that does something new, and
no call was replayed since.
"""

from __future__ import annotations

import warnings

from ..log.line import line_number, user_line

# So many recordings in vain are made of a kind of call, and behind so many plain calls two more. Behind those
# come twice as many plain calls.
_MOST, _PLAIN, _AGAIN = 5, 100, 2


class Tries:
    """How the recordings of one kind of call have fared."""

    def __init__(self) -> None:
        # A replay sets it back.
        self.in_vain = 0
        self.why = ""
        self._plain, self._wait, self._told = 0, _PLAIN, False

    def note(self, brought_a_plan: bool, why: str) -> None:
        """Note a recording, and why the call was not replayed."""
        if not brought_a_plan:
            self.in_vain += 1
            self.why = why

    def over(self) -> bool:
        """Whether this call is to run plainly."""
        if self.in_vain < _MOST:
            return False
        self._plain += 1
        if self._plain <= self._wait:
            return True
        self._plain, self._wait, self.in_vain = 0, 2 * self._wait, _MOST - _AGAIN
        return False

    def tell(self, name: str) -> None:
        """Warn at the user's line, once."""
        if self._told:
            return
        self._told = True
        _, call, at = user_line()
        file, number = (
            ("<unknown>", 0) if call is None else (call.code.co_filename, line_number(call.code, at))
        )
        text = (
            f"the program {name!r} was recorded {_MOST} times, and no call was replayed: such calls run "
            f"plainly from now on, as without dr.program. {self.why}\n"
            "  pass what changes as an argument, or keep it in a remote tensor; "
            "if it must change, leave dr.program out"
        )
        warnings.warn_explicit(text, UserWarning, file, number)
