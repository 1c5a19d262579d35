"""Who may import whom: rooms stand one above the other, and a room imports only rooms below it."""

from __future__ import annotations

import ast
import re
from collections import Counter

from rooms import MODULES, ROOMS, imports, ours, room

MOST_ROOMS = {"distruntime": 23, "distruntime_worker": 10}
MOST_FILES = 21
# These are modules of the master's side, with everything below them.
WORKER_MAY_USE = {
    "distruntime.errors",
    "distruntime.version",
    "distruntime.wire",
}

# Who may touch what reaches outside; a prefix stands for all below it.
OUTSIDE = {
    "zmq": {
        "distruntime.wire.channel",
        "distruntime.wire.keys",
        "distruntime.wire.zeromq.connections",
        "distruntime.wire.zeromq.frames",
        "distruntime.wire.zeromq.inbox",
        "distruntime.wire.zeromq.options",
        "distruntime.wire.zeromq.sender",
        "distruntime.wire.zeromq.zero_copy",
    },
    # On the master nothing is unpickled but what a trusted key has signed, and the copy of an object that the
    # user asks a worker with the key for. On a worker nothing is unpickled before authentication, and nothing
    # at all with --no-functions. `torch_save` only walks through what `torch.save` is to pickle.
    "pickle": {
        "distruntime.backend.files.torch_save",
        "distruntime.publishing.structure",
        # It compares the pickles of what only C sees, and reads none.
        "distruntime.guards.captured",
        "distruntime.python.pickling",
        "distruntime_worker.collectives.groups",
        "distruntime_worker.python.calls",
        # A worker and the processes that it has started exchange pickles.
        "distruntime_worker.programs.compiler",
        "distruntime_worker.python.handing",
        "distruntime_worker.python.skeleton",
    },
    # A worker pickles the copy of an object that its master has asked for.
    "cloudpickle": {
        "distruntime.collectives.data_channels",
        "distruntime.publishing.structure",
        "distruntime.guards.own_code",
        "distruntime.python.pickling",
        "distruntime_worker.python.calls",
        "distruntime_worker.python.operations",
        "distruntime_worker.python.member",
        "distruntime_worker.python.members",
    },
    "nacl": {"distruntime.publishing.signing"},
    "cryptography": {"distruntime_worker.collectives.data_channel.tls"},
    "ssl": {"distruntime_worker.collectives.data_channel.tls"},
    # Module.to swaps parameters in place and refuses objects that have weak references, so never to a proxy
    "weakref": {
        "distruntime.backend.generators",
        # It refers to graphs, to tell of those that somebody may call.
        "distruntime.compiled.graph",
        # It refers to groups, which are closed once nobody holds them.
        "distruntime.collectives.groups",
        "distruntime.log.storage",
        "distruntime.log.handle",
        "distruntime.log.uses",
        "distruntime.guards.anchors",
        # It knows the type of a weak reference that a function of the user's calls.
        "distruntime.guards.functions",
        # It tells whether an object that was read is the one that was read before.
        "distruntime.guards.unchanged",
        # It refers to generators.
        "distruntime.programs.side_effects",
        # It refers to programs and graphs, which let go of a session that ends.
        "distruntime.session.ending",
        "distruntime.session.places",
        "distruntime.log.shards",
        "distruntime.wire.shared",
        "distruntime.wire.zeromq.sender",
        "distruntime_worker.python.kept",
        "distruntime_worker.python.members",
        # It refers to a program that is compiled: nobody may want it any more.
        "distruntime_worker.programs.inductor",
    },
}
# These know the kinds of accelerators: four modules of the worker, and its data channels that are for one
# kind. "simulate_cuda" is an option's name.
KNOWS_ACCELERATORS = (
    "distruntime_worker.machine.accelerator",
    "distruntime_worker.machine.hardware",
    "distruntime_worker.machine.random_states",
    "distruntime_worker.machine.ranges",
    "distruntime_worker.collectives",
    "distruntime_worker.programs.cuda_graphs",
)
KIND = re.compile(r"(?<!simulate[-_])cuda|\bxpu\b|\bmps\b", re.IGNORECASE)
WIRE_WITH_TORCH = {"distruntime.wire.codec", "distruntime.wire.data_channel"}


def _package(module: str) -> str:
    return module.split(".")[0]


def test_every_module_is_in_a_room_and_no_folder_is_crowded() -> None:
    for package, rooms in ROOMS.items():
        found = {room(module) for module in MODULES if _package(module) == package}
        assert found == set(rooms) and len(rooms) <= MOST_ROOMS[package]
    # A room may have a folder inside, for one part of what it owns.
    files = Counter(path.parent for path in MODULES.values())
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def test_a_room_imports_only_rooms_below_it() -> None:
    upward = []
    for module in MODULES:
        rooms = ROOMS[_package(module)]
        own = {name for name in ours(module) if _package(name) == _package(module)}
        upward += [(module, name) for name in own if rooms.index(room(name)) > rooms.index(room(module))]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    below = {module: ours(module) for module in MODULES}
    while free := [module for module, names in below.items() if not names & below.keys()]:
        for module in free:
            del below[module]
    assert below == {}


def test_the_worker_knows_the_wire_and_the_errors_only_and_the_master_does_not_know_the_worker() -> None:
    for module in MODULES:
        foreign = {name for name in ours(module) if _package(name) != _package(module)}
        assert not foreign or _package(module) == "distruntime_worker", module
        more = {
            n for n in foreign if not any(f"{n}.".startswith(f"{allowed}.") for allowed in WORKER_MAY_USE)
        }
        assert not more, module


def test_no_import_inside_a_function() -> None:
    found = [(module, *found) for module in MODULES for found in imports(module)]
    assert [f"{name} in {module}, line {line}" for module, name, line, inside in found if inside] == []


def test_what_reaches_outside_stays_in_its_place() -> None:
    for module in MODULES:
        roots = {name.split(".")[0] for name, _, _ in imports(module)}
        out_of_place = [name for name, allowed in OUTSIDE.items() if name in roots and module not in allowed]
        assert out_of_place == [], module
        if module.startswith("distruntime.wire"):
            assert "torch" not in roots or module in WIRE_WITH_TORCH, module


def test_only_these_modules_of_the_worker_know_the_kinds_of_accelerators() -> None:
    found = {
        module: named
        for module in MODULES
        if _package(module) == "distruntime_worker" and not module.startswith(KNOWS_ACCELERATORS)
        if (named := _accelerators(module))
    }
    assert found == {}


def _accelerators(module: str) -> list[str]:
    """Return the names and texts of a module that name a kind of accelerator."""
    said = []
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant()):
                # It is a docstring.
                node.value.value = ""
            case ast.Attribute(attr=text) | ast.Name(id=text) | ast.arg(arg=text) | ast.keyword(arg=text):
                said.append(text)
            case ast.Constant(value=str(text)):
                said.append(text)
    return [text for text in said if text and KIND.search(text)]
