"""What `dr.workers.ship` has brought to this worker, and how the processes of its members import it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

# What unpacks a package here is code of the master's (`sent_code.py`), which keeps its state under this name.
_STATE = "_distruntime_shipped"


class Package(NamedTuple):
    """A package that was shipped: its digest, its folder, and the names that are imported of it."""

    digest: str
    folder: str
    tops: Iterable[str]


def shipped() -> dict[str, Package]:
    """Return what was shipped to this worker."""
    state = sys.modules.get(_STATE)
    known: Mapping[str, tuple[str, str, list[str]]] = {} if state is None else state.__dict__["known"]
    return {name: Package(*one) for name, one in known.items()}


def follow(before: Mapping[str, Package], now: Mapping[str, Package]) -> None:
    """Have this process import what was shipped since, and forget what it has imported of that before."""
    for name, package in now.items():
        if before.get(name) == package:
            continue
        if name in before:
            # A function may have taken it out.
            with suppress(ValueError):
                sys.path.remove(before[name].folder)
        sys.path.insert(0, package.folder)
        for module in [m for m in sys.modules if m.partition(".")[0] in package.tops]:
            del sys.modules[module]
    importlib.invalidate_caches()
