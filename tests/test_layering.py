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
    "wire.unsaid": "",
    "wire.codec": "errors wire.messages",
    "spec": "wire.codec",
    "opaque": "",
    "propagate": "errors spec wire.unsaid",
    "wire.descriptors": "errors",
    "wire.shared": "errors wire.descriptors",
    "wire.strangers": "",
    "wire.tally": "",
    "wire.connections": "wire.descriptors wire.strangers",
    "wire.shield": "",
    "stretches": "",
    "text": "",
    "context": "errors",
    "wire.address": "errors",
    "wire.keys": "errors wire.address",
    "wire.frames": "",
    "wire.inbox": "wire.connections wire.frames",
    "wire.wake": "",
    "wait": "errors",
    "wire.data_channel": "errors",
    "layout": "errors",
    "registry": "errors wire.keys",
    "wire.deadlines": "errors",
    "launch": "wire.deadlines wire.keys",
    "wire.identity": "",
    "scratch": "wire.identity",
    "wire.link": "errors",
    "wire.channel": "errors wire.address wire.connections wire.descriptors wire.frames wire.inbox wire.keys wire.link wire.shield "
    "wire.wake",
    "signing": "errors wire.keys",
    "envelope": "errors signing",
    "tree": "errors",
    "replies": "errors wire.codec",
    "node": "errors replies wire.codec wire.link wire.messages",
    "handle": "node spec",
    "line": "node",
    "stall": "errors line node text",
    "announce": "node",
    "requests": "announce errors node replies wire.codec wire.shared",
    "order": "handle node spec stretches wire.messages",
    "queues": "context errors handle node order",
    "wrap": "handle spec",
    "places": "context errors handle node",
    "plans": "errors handle",
    "read_only": "errors handle node spec",
    "issue": "context handle node read_only spec wire.codec",
    "wire.units": "",
    "holders": "handle node wire.units",
    "failure": "errors holders node wire.messages wire.units",
    "session": "errors failure handle holders launch line node places replies requests "
    "stall wait wire.channel wire.codec wire.deadlines wire.identity wire.link wire.messages wire.shared wire.shield wire.tally",
    "placing": "context errors handle session",
    "table": "handle node session text wire.deadlines wire.units",
    "memory": "handle holders session table text wire.units",
    "meeting": "errors node requests session wire.address wire.deadlines wire.messages",
    "team": "errors handle node session wire.channel wire.codec wire.messages wire.shield",
    "known": "handle node session",
    "publications": "errors handle node session text wire.units",
    "keeper": "errors node session wire.address wire.channel wire.identity wire.messages",
    "begin": "errors keeper launch node publications registry replies scratch session wire.channel wire.keys wire.messages",
    "restart": "errors node session wire.deadlines wire.messages",
    "entries": "errors handle issue node propagate session spec wire.codec wrap",
    "moment": "errors wire.shield",
    "group": "errors handle issue line meeting moment node requests session spec wait wire.data_channel wire.deadlines wire.messages",
    "shards": "handle issue line spec team wire.messages",
    "transfer": "errors handle issue line read_only requests shards spec stall wire.codec wire.link wire.messages wire.shared",
    "render": "failure handle shards spec stall transfer wire.codec wire.deadlines wire.units",
    "learn": "entries errors handle issue node propagate read_only requests shards spec stall wire.messages wrap",
    "first": "entries errors handle learn line node propagate read_only session spec transfer wire.messages wrap",
    "joint": "errors first group handle issue line moment read_only spec wire.codec",
    "special": "errors first group handle joint learn line session shards spec transfer wrap",
    "dispatch": "entries errors first handle line special wrap",
    "storage": "entries errors issue line",
    "tensor": "context dispatch errors handle render session shards storage transfer wrap",
    "composite": "dispatch entries first handle issue learn line spec stall tensor transfer wrap",
    "factories": "context errors handle session tensor",
    "fetch": "errors failure line node requests spec stall tensor transfer wait",
    "functions": "entries errors handle issue line node spec tensor wire.messages",
    "structure": "errors handle tensor wire.codec wire.units",
    "publishing": "envelope errors handle issue known line node publications read_only session spec structure tensor wire.messages wrap",
    "random": "functions handle session spec tensor transfer wrap",
    "config": "errors functions node session",
    "uninitialized": "tensor",
    "autocast": "composite first handle propagate tensor wrap",
    "event": "entries errors group handle issue line node queues requests session spec stall tensor transfer wait wire.messages wrap",
    "stream": "context errors event handle line node queues session wait wire.messages",
    "device_module": "context event handle placing random session stream tensor",
    "members": "errors group handle session spec tensor",
    "functional": "errors group handle joint members spec tensor wrap",
    "work": "context errors event handle stream tensor transfer wait",
    "collective": "errors event functional group joint line members node stream tensor wait wire.deadlines work",
    "point_to_point": "errors group handle line members node session tensor work",
    "partition": "errors fetch group handle members plans session tensor",
    "primitives": "errors functional group handle joint partition plans special tensor",
    "lines": "errors first group handle issue joint line members moment shards spec team tensor transfer wire.messages wrap",
    "member_ints": "context errors handle lines shards tensor wrap",
    "process_group": "errors lines team tensor",
    "functional_collectives": "lines process_group special",
    "fully_shard": "errors event member_ints process_group",
    "dtensor": "composite context errors first fully_shard functional_collectives member_ints process_group tensor",
    "mesh": "context dtensor entries errors fetch group handle issue layout line "
    "lines member_ints process_group session shards team tensor transfer wrap",
    "map_location": "session",
    "install": "autocast composite context device_module dispatch errors first handle map_location opaque session tensor uninitialized",
    "connect": "begin errors group install registry session table wire.deadlines wire.descriptors wire.shared",
    "saving": "errors failure handle node requests session wait wire.shield",
    "checkpoint": "errors functions handle line node saving session shards spec stall tensor transfer tree wire.codec wrap",
    "loading": "checkpoint errors fetch functions handle node saving session shards spec stall tensor transfer tree wire.codec wrap",
    "restarts": "checkpoint errors handle loading random restart saving session",
    "": "checkpoint collective config connect errors event factories fetch functional group handle "
    "layout loading members memory mesh partition placing point_to_point primitives publications publishing "
    "random restart restarts session stall stream table tensor wire.data_channel work",
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
    "checkpoint": "streams",
    "checkpoint_folder": "checkpoint objects",
    "functions": "checkpoint settings streams",
    "address": "config",
    "store": "",
    "interfaces": "",
    "listening": "",
    "data_channel": "",
    "data_channel.gloo": "listening",
    "data_channel.mpi": "",
    "data_channel.nccl": "interfaces",
    "data_channel.private": "",
    "data_channel.proof": "",
    "data_channel.sockets": "data_channel.private data_channel.proof listening",
    "data_channel.tcp": "data_channel.sockets",
    "data_channel.tls": "data_channel.proof data_channel.sockets",
    "groups": "data_channel devices store",
    "collectives": "groups",
    "peers": "listening",
    "team": "functions objects streams template",
    "budget": "devices functions objects streams team",
    "lanes": "collectives objects team",
    "draws": "functions template",
    "turns": "",
    "state": "budget collectives devices objects streams team template turns",
    "guard": "collectives functions lanes objects state team template",
    "instructions": "functions objects staging state streams team template",
    "look": "state streams",
    "answers": "look objects state streams",
    "waits": "state streams",
    "joint": "collectives groups objects state",
    "cancel": "collectives lanes look objects state streams team template waits",
    "read_only": "collectives functions lanes objects state team template",
    "published": "objects read_only state",
    "executor": "answers budget cancel collectives devices draws functions guard instructions joint "
    "lanes look published state streams team template turns waits",
    "session": "budget devices executor objects peers published settings streams turns",
    "daemon": "address budget checkpoint_folder config data_channel devices executor objects published session settings turns",
    "cli": "config daemon",
    "__main__": "cli",
}
WORKER_MAY_USE = {"distruntime.errors", "distruntime.wire"}  # of the master's side; with everything below them

# Who may touch what reaches outside; a prefix stands for all below it.
OUTSIDE = {
    "zmq": {
        "distruntime.wire.channel",
        "distruntime.wire.connections",
        "distruntime.wire.frames",
        "distruntime.wire.inbox",
        "distruntime.wire.keys",
    },
    # On the master nothing is unpickled but what a trusted key has signed, and on a worker nothing before authentication.
    "pickle": {"distruntime.structure", "distruntime_worker.groups"},
    "cloudpickle": {"distruntime.group", "distruntime.structure"},
    "nacl": {"distruntime.signing"},
    "cryptography": {"distruntime_worker.data_channel.tls"},
    "ssl": {"distruntime_worker.data_channel.tls"},
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
