"""Public names that are imported when they are first used."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import final

# These commands have no function of their name.
_COMMANDS = ("demo", "key", "launch", "repl", "run", "sessions", "status", "stop", "top")


def sources(file: str) -> dict[str, tuple[str, str]]:
    """Return where each public name of a package comes from: a module, and the name there.

    `file` is the package's `__init__.py`. Its one `if` holds imports that only type checkers run.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    (block,) = (statement for statement in tree.body if isinstance(statement, ast.If))
    return {
        alias.asname or alias.name: (f".{statement.module}", alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def missing(package: str, name: str, names: Sequence[str]) -> str:
    """Return what is said of a name that a package does not have. It names the one that is most alike.

    Python's own suggestion would do at a plain prompt, and IPython shows none.
    """
    text = f"module {package!r} has no attribute {name!r}"
    if name in _COMMANDS:
        return f"{text}. It is a command: python -m {package} {name}"
    # Libraries ask each module for such names: pytest a thousand times, 3 ms each.
    private = name.startswith("_")
    alike = [] if private else difflib.get_close_matches(name, names, n=1)
    return f"{text}. Did you mean {alike[0]!r}?" if alike else text


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
