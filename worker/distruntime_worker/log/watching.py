"""Hears what a kernel warns of, so that the master can show it.

torch's kernels warn through a handler of the thread, which only torch's Python functions set for as long as
they run: an operator that is called by its name warns on stderr. `Tensor.apply_` is such a function, and it
calls Python. To run an instruction inside it costs 0.1 us.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple, TextIO

import torch

from ..values.objects import class_name

# Whoever runs the user's Python hears here what that warns of, and says whether it does.
hear_others: list[Callable[[str, str], bool]] = []
# The master is told so many warnings of one instruction, and so many characters of each.
MOST_WARNINGS, _MOST_TEXT = 16, 2000
# The log gets so many different ones that no instruction has caused.
_MOST_LOGGED = 1000


class Heard(NamedTuple):
    """A warning: the name of its class, and its text."""

    kind: str
    text: str


class _Listening(threading.local):
    """What this thread's instruction has warned of; None while it runs none that is watched."""

    heard: list[Heard] | None = None


_listening = _Listening()
_one = torch.zeros(1)
_logged: set[Heard] = set()
_log = warnings.showwarning


def install_watching() -> None:
    """Have this process's warnings come here, each as often as it is raised."""
    warnings.simplefilter("always")
    # Python 3.12 says so of each fork of a process with threads, as those of a `DataLoader` are. A worker has
    # threads, and nobody can change that.
    warnings.filterwarnings("ignore", r"This process .* is multi-threaded", DeprecationWarning)
    warnings.showwarning = _show


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    warning = Heard(class_name(category), str(message)[:_MOST_TEXT])
    if _listening.heard is not None:
        _listening.heard.append(warning)
    elif any(hear(*warning) for hear in hear_others):
        return
    elif warning not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(warning)
        _log(message, category, filename, lineno, file, line)


def watched(run: Callable[[], int]) -> tuple[int, list[Heard]]:
    """Call `run`; return what it returns, and what it has warned of, each once."""
    found: list[int] = []

    def call(_: float) -> float:
        found.append(run())
        return 0.0

    before, _listening.heard = _listening.heard, []
    try:
        _one.clone().apply_(call)
        heard = list(dict.fromkeys(_listening.heard))
    finally:
        _listening.heard = before
    return found[0], heard[:MOST_WARNINGS]
