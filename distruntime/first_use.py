"""Public names that are imported when they are first used."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import final

# These commands have no function of their name.
_COMMANDS = ("demo", "key", "launch", "repl", "run", "sessions", "status", "stop", "top")


def lend(package: str, modules: Collection[str] = (), moved: str = "", hooks: Collection[str] = ()) -> None:
    """Import the public names of a module when they are first used, and let `dir` tell of them alone.

    The one `if` of the module's file has their imports, which only type checkers run, and so `__all__` is
    made here. `modules` are names that are modules below it. `moved` is a module that says where other names
    are now: their old spellings work, and each warns at the line that uses it. `hooks` are names that another
    program looks for, and no user.
    """
    module = sys.modules[package]
    sources = _sources(str(module.__file__))
    public = sorted({*sources, *modules} - {*hooks})

    def get(name: str) -> object:
        if name in sources or name in modules:
            # The imports take long.
            with importlib.import_module("distruntime.backend.on_import").rare_collections():
                found = _imported(module, *sources.get(name, (".", name)), below=name in modules)
            setattr(module, name, found)
            return found
        # Libraries ask each module for private names: pytest a thousand times, 3 ms each.
        private = name.startswith("_")
        parts: Mapping[str, str] = importlib.import_module(moved).PARTS if moved and not private else {}
        if name in parts:
            now = f"{package}.{parts[name]}"
            text = f"{package}.{name} is deprecated: write {now}.{name}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(now), name)
        spellings = {} if private else {name: name for name in public}
        spellings.update({name: f"{part}.{name}" for name, part in parts.items()})
        try:
            raise AttributeError(_missing(package, name, spellings), name=name, obj=None)
        except AttributeError as error:
            # A bare `raise` then adds no frame of this file.
            importlib.import_module("distruntime.errors").forget_traceback(error)
            raise

    def offered() -> list[str]:
        # Completion at a prompt offers these.
        return sorted([*public, *(name for name in vars(module) if name.startswith("__"))])

    vars(module).update(__getattr__=get, __dir__=offered, __all__=public)


def _sources(file: str) -> dict[str, tuple[str, str]]:
    """Return where each name comes from that the one `if` of a file imports: a module, and the name there."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    (block,) = (statement for statement in tree.body if isinstance(statement, ast.If))
    return {
        alias.asname or alias.name: ("." * statement.level + (statement.module or ""), alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def _imported(module: ModuleType, where: str, name: str, below: bool) -> object:
    # `from . import data` names a module.
    if below or where == ".":
        return importlib.import_module(f"{module.__name__}.{name}")
    return getattr(importlib.import_module(where, module.__package__), name)


def _missing(package: str, name: str, spellings: Mapping[str, str]) -> str:
    """Return what is said of a name that a package does not have. It names the one that is most alike.

    Python's own suggestion would do at a plain prompt, and IPython shows none.
    """
    text = f"module {package!r} has no attribute {name!r}"
    gone: Mapping[str, str] = importlib.import_module("distruntime.old_names").GONE
    if name in gone:
        return f"{text} any more: {gone[name]}"
    if package == "distruntime" and name in _COMMANDS:
        return f"{text}. It is a command: python -m {package} {name}"
    alike = difflib.get_close_matches(name, spellings, n=1)
    return f"{text}. Did you mean {spellings[alike[0]]!r}?" if alike else text


@final
class _PublicModules(MetaPathFinder, Loader):
    """Lets users import a module by its public name. It is one module, whichever name it is imported by."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._modules[spec.name])
        # Python gives the module the spec of its public name, and `exec_module` gives its own back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def publish(package: str, modules: Mapping[str, str]) -> None:
    """Give modules deep in a package public names right below it."""
    sys.meta_path.append(
        _PublicModules({f"{package}.{name}": f"{package}.{where}" for name, where in modules.items()})
    )
