"""Who may import whom. A module, or an import, that is missing from the table fails: a new one is a decision."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"distruntime": ROOT / "distruntime", "distruntime_worker": ROOT / "worker" / "distruntime_worker"}

# From the bottom up: a module imports only modules of the rows above it, so there is no cycle.
MASTER = {
    "errors": "",
    "wire": "",
    "wire.messages": "",
    "wire.codec": "errors wire.messages",
    "spec": "wire.codec",
    "opaque": "",
    "propagate": "errors spec",
    "wire.connections": "",
    "wire.shared": "errors",
    "wire.shield": "",
    "stretches": "",
    "text": "",
    "context": "errors",
    "wire.address": "errors",
    "wire.keys": "errors wire.address",
    "launch": "wire.keys",
    "wire.inbox": "wire.connections",
    "wire.wake": "",
    "wire.channel": "errors wire.address wire.connections wire.inbox wire.keys wire.shield wire.wake",
    "replies": "errors wire.codec",
    "node": "errors replies wire.channel wire.codec wire.messages",
    "handle": "node spec",
    "holders": "handle node",
    "failure": "errors holders node text wire.messages",
    "line": "node",
    "stall": "errors line node text",
    "announce": "node",
    "requests": "announce errors node replies wire.codec wire.shared",
    "issue": "context handle node spec wire.codec",
    "order": "handle node spec stretches wire.messages",
    "queues": "context errors handle node order",
    "wrap": "handle spec",
    "places": "context errors handle node",
    "wait": "errors",
    "session": "errors failure handle launch line node places "
    "requests stall wait wire.channel wire.codec wire.messages wire.shared wire.shield",
    "placing": "context errors handle session",
    "load": "session",
    "table": "handle node session text",
    "memory": "handle holders session table text",
    "entries": "errors handle issue node propagate session spec wire.codec wrap",
    "wire.data_channel": "errors",
    "meeting": "errors node requests session wire.address wire.messages",
    "group": "errors handle issue line meeting node requests session spec wait wire.data_channel wire.messages wire.shield",
    "team": "errors handle node session wire.channel wire.codec wire.messages wire.shield",
    "shards": "handle issue line spec team wire.messages",
    "transfer": "errors handle issue line requests shards spec stall wire.codec wire.messages wire.shared",
    "render": "failure handle shards spec stall text transfer wire.codec",
    "learn": "entries errors handle issue node propagate requests shards spec stall wire.messages wrap",
    "first": "entries errors handle learn line node propagate session spec transfer wire.messages wrap",
    "joint": "errors first group handle issue line spec wire.codec wire.shield",
    "special": "errors first group handle joint learn line session shards spec transfer wrap",
    "dispatch": "entries errors first handle line special wrap",
    "plans": "errors handle",
    "storage": "entries errors issue line",
    "tensor": "context dispatch errors handle render session shards storage transfer wrap",
    "composite": "dispatch entries first handle issue learn line spec stall tensor transfer wrap",
    "factories": "context errors handle session tensor",
    "fetch": "errors failure line node requests spec stall tensor transfer wait",
    "functions": "entries errors handle issue line node spec tensor wire.messages",
    "random": "functions handle session spec tensor transfer wrap",
    "config": "errors functions node session",
    "uninitialized": "tensor",
    "autocast": "composite first handle propagate tensor wrap",
    "event": "entries errors group handle issue line node queues requests session spec stall tensor transfer wait wire.messages wrap",
    "stream": "context errors event handle line node queues session wait wire.messages",
    "device_module": "context event handle placing random session stream tensor",
    "install": "autocast composite context device_module dispatch errors first handle load opaque session tensor uninitialized",
    "connect": "errors group install launch node replies session table wait wire.channel wire.codec wire.keys wire.messages wire.shared",
    "members": "errors group handle session spec tensor",
    "functional": "errors group handle joint members spec tensor wrap",
    "work": "context errors event handle stream tensor transfer wait",
    "collective": "errors event functional group joint line members node stream tensor wait work",
    "point_to_point": "errors group handle line members node session tensor work",
    "partition": "errors fetch group handle members plans session tensor",
    "primitives": "errors functional group handle joint partition plans special tensor",
    "lines": "errors first group handle issue joint line members shards spec team tensor transfer wire.messages wrap",
    "member_ints": "context errors handle lines shards tensor wrap",
    "process_group": "errors lines team tensor",
    "functional_collectives": "lines process_group special",
    "fully_shard": "errors event member_ints process_group",
    "dtensor": "composite context errors first fully_shard functional_collectives member_ints process_group tensor",
    "layout": "errors",
    "mesh": "context dtensor entries errors fetch group handle issue layout "
    "line lines member_ints process_group session shards team tensor transfer wrap",
    "": "collective config connect errors event factories fetch functional group handle layout members memory "
    "mesh partition placing point_to_point primitives random session stall stream table tensor wire.data_channel work",
    "__main__": "distruntime",
    "demo": "distruntime",
    "testing": "group session wire.data_channel distruntime",
}
WORKER = {
    "": "",
    "config": "",
    "settings": "",
    "devices": "settings",
    "objects": "",
    "staging": "",
    "template": "",
    "streams": "",
    "functions": "settings streams",
    "address": "config",
    "data_channel": "",
    "data_channel.gloo": "",
    "data_channel.mpi": "",
    "data_channel.nccl": "",
    "data_channel.tcp": "",
    "groups": "data_channel devices",
    "collectives": "groups",
    "peers": "",
    "team": "functions objects streams template",
    "state": "collectives devices objects streams team template",
    "instructions": "functions objects staging state streams team template",
    "look": "state streams",
    "answers": "look objects state streams",
    "waits": "state streams",
    "joint": "collectives groups objects state",
    "lanes": "collectives objects team",
    "cancel": "collectives lanes look objects state streams team template waits",
    "executor": "answers cancel collectives devices functions instructions joint lanes look state streams team template waits",
    "daemon": "address config data_channel devices executor objects peers settings streams",
    "cli": "config daemon",
    "__main__": "cli",
}
WORKER_MAY_USE = {"distruntime.errors", "distruntime.wire"}  # of the master's side; with everything below them

# Who may touch what reaches outside; a prefix stands for all below it.
OUTSIDE = {
    "zmq": {"distruntime.wire.channel", "distruntime.wire.connections", "distruntime.wire.inbox", "distruntime.wire.keys"},
    "pickle": {"distruntime_worker.groups"},  # nothing is unpickled on the master, and nothing before authentication on a worker
    "cloudpickle": {"distruntime.group"},
    # Module.to swaps parameters in place and refuses objects that have weak references, so never to a proxy
    "weakref": {"distruntime.handle", "distruntime.places", "distruntime.shards", "distruntime.wire.channel", "distruntime.wire.shared"},
}
WIRE_WITH_TORCH = {"distruntime.wire.codec", "distruntime.wire.data_channel"}

Import = tuple[str, int, bool]  # module, line, inside a function


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(module: str) -> list[Import]:
    """Every import of `module`, as the module that it names: `from .wire import codec` is `distruntime.wire.codec`."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            deeper = [f"{name}.{alias.name}" for alias in node.names if f"{name}.{alias.name}" in MODULES]
            found.extend((target, node.lineno, inside) for target in deeper or [name])
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def _ours(module: str) -> set[str]:
    return {name for name, _, _ in _imports(module) if name.split(".")[0] in SOURCES}


def _full(package: str, table: dict[str, str]) -> dict[str, set[str]]:
    def name(short: str) -> str:
        return package if short in ("", package) else f"{package}.{short}"

    return {name(row): {name(target) for target in targets.split()} for row, targets in table.items()}


TABLE = {**_full("distruntime", MASTER), **_full("distruntime_worker", WORKER)}


def test_the_table_has_every_module_and_no_other() -> None:
    assert set(TABLE) == set(MODULES)


@pytest.mark.parametrize("module", TABLE)
def test_a_module_imports_what_its_row_says(module: str) -> None:
    package = module.split(".")[0]
    own = {name for name in _ours(module) if name.split(".")[0] == package}
    rows = list(TABLE)
    assert own == TABLE[module]
    assert all(rows.index(name) < rows.index(module) for name in own), "imports run downwards only"


@pytest.mark.parametrize("module", MODULES)
def test_the_worker_knows_the_wire_and_the_errors_only_and_the_master_does_not_know_the_worker(module: str) -> None:
    package = module.split(".")[0]
    foreign = {name for name in _ours(module) if name.split(".")[0] != package}
    assert not foreign or package == "distruntime_worker"
    assert all(any(f"{name}.".startswith(f"{allowed}.") for allowed in WORKER_MAY_USE) for name in foreign)


@pytest.mark.parametrize("module", MODULES)
def test_no_import_inside_a_function(module: str) -> None:
    assert [f"{name}, line {line}" for name, line, inside in _imports(module) if inside] == []


@pytest.mark.parametrize("module", MODULES)
def test_what_reaches_outside_stays_in_its_place(module: str) -> None:
    roots = {name.split(".")[0] for name, _, _ in _imports(module)}
    assert [name for name, allowed in OUTSIDE.items() if name in roots and module not in allowed] == []
    if module.startswith("distruntime.wire"):
        assert "torch" not in roots or module in WIRE_WITH_TORCH
