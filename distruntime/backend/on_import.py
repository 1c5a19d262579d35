"""What is to happen when a library is imported, before or after the session began."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

# So many new objects lie between two looks for garbage while much is imported.
_RARE = 100_000

Hook = Callable[[ModuleType], None]

_hooks: dict[str, list[Hook]] = {}


class _Loader:
    """A module's own loader in all but this: it calls the hooks behind the module's code."""

    def __init__(self, loader: Loader, hooks: Sequence[Hook]) -> None:
        self._loader, self._hooks = loader, hooks

    def __getattr__(self, name: str) -> object:
        # `python -m`, inspect and importlib.resources ask for more than an import does.
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module is as if nobody had watched.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for hook in self._hooks:
            _call(hook, module)


def _call(hook: Hook, module: ModuleType) -> None:
    """Call a hook. The import is somebody else's, so it goes on if the hook fails."""
    try:
        hook(module)
    except Exception as error:
        version = getattr(sys.modules.get(module.__name__.partition(".")[0]), "__version__", "")
        warnings.warn(
            f"distruntime could not teach {module.__name__} {version} about remote tensors, and leaves it as "
            f"it is: {type(error).__name__}: {error}. Perhaps distruntime does not know this version yet",
            stacklevel=3,
        )


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hooks = _hooks.get(name)
        if hooks is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, hooks)  # type: ignore[assignment]
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module: now if it has been imported, and otherwise when it is.

    If the hook fails, warn with the cause.
    """
    module = sys.modules.get(name)
    if module is not None:
        # Another thread may be amid its import. This waits for the end of it.
        _call(hook, importlib.import_module(name))
        return
    _hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage seldom while much is imported.

    What an import makes stays, and to look through it again and again takes up to a fifth of its time.
    """
    first, *others = gc.get_threshold()
    rare = (_RARE, *others)
    if not 0 < first < _RARE:
        # The user wants none at all, or even fewer.
        yield
        return
    gc.set_threshold(*rare)
    try:
        yield
    finally:
        # Another thread may have chosen other ones meanwhile, or may be importing, too.
        if gc.get_threshold() == rare:
            gc.set_threshold(first, *others)
