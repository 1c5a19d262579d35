"""The rooms of both packages: which module is in which, and who imports whom. `make rooms` prints it."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"distruntime": ROOT / "distruntime", "distruntime_worker": ROOT / "worker" / "distruntime_worker"}

# The rooms stand from the bottom up: a room imports only rooms that stand before it. "face" is what stands
# outside the folders.
ROOMS = {
    "distruntime": (
        "errors first_use wire log session operators tensors streams guards programs publishing collectives "
        "backend compiled mesh python layers parallel launching cluster timeline checkpoint face"
    ).split(),
    "distruntime_worker": (
        "machine values log checkpoint collectives publishing python programs session face"
    ).split(),
}
# Modules outside the folders that others import: each is a room of its own.
SINGLE = {
    "distruntime.errors",
    # Rooms that are parts of the public names use it.
    "distruntime.first_use",
}

# Folders that stand with the face, above all rooms: the suites for plug points.
FACING = {"testing"}

# It has the module, the line, and whether it stands inside a function.
Import = tuple[str, int, bool]


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def room(module: str) -> str:
    """Return the room of a module: the first folder that it is in."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if first in FACING:
        return "face"
    return first if ((SOURCES[package] / first).is_dir() and first) or module in SINGLE else "face"


@cache
def imports(module: str) -> list[Import]:
    """Return every import of `module`, as the module that it names: `from .wire import codec` is
    `distruntime.wire.codec`.
    """
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            deeper = [f"{name}.{alias.name}" for alias in node.names if f"{name}.{alias.name}" in MODULES]
            found.extend((target, node.lineno, inside) for target in deeper or [name])
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def ours(module: str) -> set[str]:
    """Return the modules of both packages that `module` imports."""
    return {name for name, _, _ in imports(module) if name in MODULES and name != module}


def arrows(package: str) -> Counter[tuple[str, str]]:
    """Return how many imports go from each room of a package to each other one."""
    found: Counter[tuple[str, str]] = Counter()
    for module in MODULES:
        if module.split(".")[0] == package:
            targets = [name for name in ours(module) if name.split(".")[0] == package]
            found.update((room(module), room(name)) for name in targets if room(name) != room(module))
    return found


def main() -> None:
    """Print each room with its files, lines, and the rooms that it imports."""
    for package, rooms in ROOMS.items():
        counted = arrows(package)
        print(
            f"{package}: {len(rooms)} rooms, {len(counted)} arrows between them, {counted.total()} imports "
            f"across"
        )
        for name in reversed(rooms):
            files = [
                path
                for module, path in MODULES.items()
                if module.split(".")[0] == package and room(module) == name
            ]
            lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
            below = ", ".join(
                f"{target} {counted[name, target]}" for target in reversed(rooms) if (name, target) in counted
            )
            print(
                f"  {name:<12}{len(files):>3} files {lines:>6,} lines{'   imports ' + below if below else ''}"
            )


if __name__ == "__main__":
    main()
