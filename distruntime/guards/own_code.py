"""Whose code a function's is: the user's, whose values travel, or a library's, which workers have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

import cloudpickle

from ..log.line import of_a_library
from ..wire.shield import RLock

PACKAGE = "distruntime."
# Modules of this package that travel with their bodies, so that a worker needs no part of the master's side.
_SENT = f"{PACKAGE}python.sent_"
# The modules that were looked at, and whether they travel with their bodies.
_seen: dict[str, bool] = {}
# Cloudpickle's registry is one for the process, and so is what is known of its modules. Threads take turns.
_registering = RLock()
# Packages that are on all workers by now, and so travel by their names.
_shipped: set[str] = set()

# Who has one of these pickles something else in its place.
NOT_SENT = ("threading", "_thread", "io", "_io", "asyncio", "weakref", "_weakref", "ctypes", "distruntime")


def is_own(module: ModuleType) -> bool:
    """Whether a module is the user's own: of no package that is installed."""
    # Some modules inside a package say nothing of their folder, as `torch.classes`.
    package = sys.modules.get(module.__name__.partition(".")[0], module)
    files = [getattr(one, "__file__", None) for one in (module, package)]
    if package is not module and files[1] is None:
        # A package without `__init__.py` has no file.
        files.pop()
    return all(isinstance(f, str) and not of_a_library(os.path.abspath(f)) for f in files)


def send_by_name(package: str) -> None:
    """Have what is in a package travel by its name from now on: every worker has the package."""
    with _registering:
        _shipped.add(package)
        for name in _seen:
            if name.partition(".")[0] == package:
                _seen[name] = False


def _is_sent(name: str) -> bool:
    """Whether what is in a module travels with its body."""
    found, module = _seen.get(name), sys.modules.get(name)
    if found is None and isinstance(module, ModuleType):
        with _registering:
            own = is_own(module) and name != "__main__" and name.partition(".")[0] not in _shipped
            found = _seen[name] = (own or name.startswith(_SENT)) and module.__name__ == name
    return bool(found)


@contextmanager
def own_by_value() -> Iterator[None]:
    """Have cloudpickle send what is in the user's own modules with its body, for as long as this lasts.

    What else is pickled in this process, by the user or by a data channel, is pickled as before.
    """
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        for name in list(sys.modules):
            if name not in _seen:
                _is_sent(name)
        taken = [sys.modules[name] for name, own in _seen.items() if own and name in sys.modules]
        taken = [module for module in taken if module.__name__ not in known]
        for module in taken:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in taken:
                cloudpickle.unregister_pickle_by_value(module)


def has_body(thing: FunctionType | type | ModuleType) -> bool:
    """Whether a function, a class or a module travels with what is in it, and not by its name."""
    if isinstance(thing, ModuleType):
        return sys.modules.get(thing.__name__) is not thing or _is_sent(thing.__name__)
    name = str(thing.__module__)
    found: object = sys.modules.get(name)
    if found is None or name == "__main__" or _is_sent(name):
        return True
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not thing
