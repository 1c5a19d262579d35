"""What is to happen when a library is imported, before or after the session began."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

Hook = Callable[[ModuleType], None]

_hooks: dict[str, Hook] = {}


class _Loader(Loader):
    """Loads a module as its own loader does, and calls the hook."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module is as if nobody had watched.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = _hooks.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, hook)
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module: now if it has been imported, and otherwise when it is."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    _hooks[name] = hook
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
