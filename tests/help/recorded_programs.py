"""Random programs for `dr.program`: one list of acts, called as it is and replayed, each on state of its own.

An act takes values of one place (a node, the other node, a mesh), and may be on another stream. It writes in
place, makes views, draws, carries state from call to call, goes backward, copies between places, reduces over
members, records events and waits for them. A list of acts follows from its seed. One program in five also
reads state of this process, of the kinds in `program_states`, that changes between its calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import distruntime as dr
from agree import REMOTE
from as_program import equal, read
from program_states import DRAWN, tame
from state_kinds import CHANGES, Here
from state_kinds import KINDS as STATES

# These are for any place.
_HERE = (
    "add mul mm relu number iadd imul icopy fill view t row irow dropout rand normal sum drop carry swap "
    "grad split fail"
).split()
_STREAMS = "event wait_stream".split()
_NODES = "send copy_over both".split()
_MESH = "reduce gather scatter member shards".split()
# Each kind of program has these places, and so many streams at each node.
KINDS: dict[str, tuple[Sequence[str], int]] = {
    "one stream": (("0",), 0),
    "streams": (("0",), 2),
    "nodes": (("0", "1"), 0),
    "mesh": (("mesh",), 0),
    "nodes and streams": (("0", "1"), 2),
    "mesh and streams": (("mesh",), 1),
    "all": (("0", "1", "mesh"), 1),
}


@dataclass(frozen=True)
class Act:
    """One act: its place and stream, and what it picks."""

    name: str
    place: str
    stream: int
    i: int
    j: int
    f: float


def acts_of(seed: int, kind: str) -> list[Act]:
    """Return the acts of a program."""
    choose = random.Random(seed)
    places, streams = KINDS[kind]
    names = [*_HERE, *(_STREAMS * 2 if streams else ())]
    found = []
    for _ in range(choose.randrange(5, 26)):
        place = choose.choice(places)
        here = [*names, *(_MESH * 2 if place == "mesh" else _NODES * 3 if "1" in places else ())]
        if place == "mesh" and "1" not in places:
            here = [name for name in here if name != "shards"]
        stream = choose.randrange(-1, streams) if streams and choose.random() < 0.6 else -1
        found.append(
            Act(
                choose.choice(here),
                place,
                stream,
                choose.randrange(1 << 20),
                choose.randrange(1 << 20),
                round(choose.random(), 3),
            )
        )
    return found


@dataclass(frozen=True)
class Varying:
    """The kinds of state that a program reads, and which of them change before a call, as at which number.

    With `turns` the first number decides in which order the acts are done.
    """

    names: tuple[str, ...] = ()
    changes: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    turns: bool = False


def varying_of(seed: int, calls: int) -> Varying:
    """Return the state of a program: one in five reads some."""
    choose = random.Random(f"state of {seed}")
    if seed % 5 != 4:
        return Varying()
    names = choose.sample(DRAWN, choose.randrange(1, 4))
    # A plan was replayed by the fifth call.
    at = sorted(choose.sample(range(5, calls), 2))
    changes = {
        k: (number, tuple(choose.sample(range(len(names)), choose.randrange(1, len(names) + 1))))
        for k, number in zip(at, CHANGES)
    }
    return Varying(tuple(names), changes, choose.random() < 0.5)


class Home:
    """A place with its streams, and what a program keeps there between its calls."""

    def __init__(self, name: str, device: Any, streams: Sequence[dr.Stream]) -> None:
        self.name, self.device, self.streams = name, device, streams
        self.w, self.s, self.v = (torch.randn(4, 4).to(device) for _ in range(3))
        self.p = torch.nn.Parameter(torch.randn(4, 4).to(device))
        self.kept = torch.zeros(4, 4).to(device)

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return the context of one of its streams, or of the current one."""
        return self.streams[stream] if 0 <= stream < len(self.streams) else nullcontext()


class Box:
    """All that a program of one kind keeps."""

    def __init__(self, seed: int, kind: str, mesh: dr.mesh.DeviceMesh | None) -> None:
        torch.manual_seed(seed)
        places, streams = KINDS[kind]
        self.mesh = mesh
        self.homes: dict[str, Home] = {}
        for name in places:
            device = mesh.device if name == "mesh" and mesh is not None else dr.place(int(name), "cpu")
            count = streams if name != "mesh" else min(streams, 1)
            self.homes[name] = Home(name, device, [dr.Stream(device) for _ in range(count)])

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """Return all that it keeps."""
        for home in self.homes.values():
            yield from (home.w, home.s, home.v, home.p, home.kept, home.p.grad)


Pools = dict[str, list[torch.Tensor]]


def run(acts: Sequence[Act], box: Box, xs: dict[str, torch.Tensor], indices: dict[str, torch.Tensor]) -> Any:
    """Do the acts; return some of what they have made."""
    pools: Pools = {name: [xs[name], h.w, h.s, h.v] for name, h in box.homes.items()}
    for act in acts:
        home, pool = box.homes[act.place], pools[act.place]
        u, v = pool[act.i % len(pool)], pool[act.j % len(pool)]
        own = (home.w, home.s, home.v)[act.i % 3]
        with home.on(act.stream):
            if act.name in _MESH or act.name in _NODES or act.name in _STREAMS:
                _across(act, box, pools, home, u, v, own)
            else:
                _here(act, home, pool, u, v, own, indices[act.place])
    return [pool[-1] for pool in pools.values()], [pool[4:6] for pool in pools.values()]


def _here(
    act: Act,
    home: Home,
    pool: list[torch.Tensor],
    u: torch.Tensor,
    v: torch.Tensor,
    own: torch.Tensor,
    index: torch.Tensor,
) -> None:
    f = act.f
    match act.name:
        case "add":
            pool.append(u + v)
        case "mul":
            pool.append(torch.tanh(u * v))
        case "mm":
            pool.append(torch.tanh(u @ v))
        case "relu":
            pool.append(torch.relu(u))
        case "number":
            pool.append(u * f + f)
        case "iadd":
            own.add_(torch.tanh(v), alpha=f)
        case "imul":
            own.mul_(0.5)
        case "icopy":
            own.copy_(torch.tanh(v))
        case "fill":
            own.fill_(f)
        case "view":
            pool.append(own.view(16).view(4, 4) if own.is_contiguous() else own.clone())
        case "t":
            pool.append(own.t())
        case "row":
            pool.append(own[act.i % 4].clone().expand(4, 4))
        case "irow":
            own[act.i % 4].add_(f)
        case "dropout":
            pool.append(torch.nn.functional.dropout(u, 0.3))
        case "rand":
            pool.append(torch.rand_like(u))
        case "normal":
            own.normal_()
        case "sum":
            pool.append(torch.tanh(u.sum()).expand(4, 4))
        case "drop" if len(pool) > 5:
            pool.pop(4)
        case "carry":
            home.kept = torch.tanh(home.kept + u)
            pool.append(home.kept)
        case "swap":
            home.s, home.v = home.v, home.s
        case "split":
            pool.append(torch.cat(u.split(2)[::-1]))
        case "fail":
            pool.append(u[index])
        case "grad":
            (torch.tanh(home.p) * v.detach()).sum().backward()  # type: ignore[no-untyped-call]
            assert home.p.grad is not None
            pool.append(home.p.grad.clone())
            if act.i % 2:
                home.p.grad = None


def _across(
    act: Act, box: Box, pools: Pools, home: Home, u: torch.Tensor, v: torch.Tensor, own: torch.Tensor
) -> None:
    """Do what names more than one stream of one place."""
    pool, other = pools[act.place], "0" if act.place == "1" else "1"
    lines = box.mesh.lines() if box.mesh is not None and act.place == "mesh" else None
    match act.name:
        case "event":
            event = dr.Event()
            event.record(home.streams[act.i % len(home.streams)])
            target = box.homes[[*box.homes][act.j % len(box.homes)]]
            event.wait(target.streams[act.j % len(target.streams)])
        case "wait_stream":
            home.streams[act.j % len(home.streams)].wait_stream(dr.current_stream(home.device))
        case "send":
            pools[other].append(u.to(box.homes[other].device))
        case "copy_over":
            box.homes[other].w.copy_(torch.tanh(u))
        case "both":
            mine, theirs = torch.tanh(u), pools[other][act.j % len(pools[other])] * 0.5
            dr.distributed.all_reduce([mine, theirs])
            pool.append(mine)
            pools[other].append(theirs)
        case "reduce":
            pool.append(torch.tanh(dr.lines.all_reduce(lines, u)))  # type: ignore[arg-type]
        case "gather":
            pool.append(dr.lines.all_gather(lines, u[:2]))  # type: ignore[arg-type]
        case "scatter":
            rows = dr.lines.reduce_scatter(lines, torch.tanh(v))  # type: ignore[arg-type]
            own.copy_(torch.cat([rows, rows]))
        case "member":
            member = own.member(act.i % 2)  # type: ignore[attr-defined]
            member.mul_(0.75)
            if str(act.i % 2) in pools:
                pools[str(act.i % 2)].append(torch.tanh(member))
        case "shards":
            parts = [pools[name][act.j % len(pools[name])] + 1 for name in ("0", "1")]
            pool.append(dr.from_shards(parts, box.mesh))  # type: ignore[arg-type]


def compare(
    seed: int,
    kind: str,
    calls: int,
    bad: int = -1,
    before: Callable[[int], None] = lambda k: None,
    turns: bool = False,
    zeroed: bool = False,
    varying: Varying | None = None,
) -> Any:
    """Call a random program so often, as it is and replayed; raise `AssertionError` where they differ.

    In the call `bad` an index is out of range. `before` is called before each replayed call with its number.
    With `turns`, each other call is of another kind and does the acts from the last to the first. With
    `zeroed`, each call finds no gradient. `varying` is the state that it reads. Return the program.
    """
    mesh = dr.init_device_mesh("cpu", (2,)) if "mesh" in KINDS[kind][0] else None
    acts, seen, varying = acts_of(seed, kind), [], varying or Varying()
    for replayed in (False, True):
        box = Box(seed, kind, mesh)
        data = {name: [torch.randn(4, 4).to(h.device) for _ in range(3)] for name, h in box.homes.items()}
        index = {
            name: [torch.tensor([0, k, 1, 2]).to(h.device) for k in (3, 9)] for name, h in box.homes.items()
        }
        dr.manual_seed(seed)
        with Here(REMOTE) as here:
            made = [STATES[name].make(here) for name in varying.names]
            step = _step(acts, box, [read for read, _ in made], varying.turns)
            act: Any = dr.program(step) if replayed else step
            found: list[object] = []
            for k in range(calls):
                if replayed:
                    before(k)
                number, changed = varying.changes.get(k, (k, ()))
                for one in changed:
                    made[one][1](number)
                xs = {name: tensors[k % 3] for name, tensors in data.items()}
                order = -1 if turns and k % 2 else 1
                out = act(xs, {name: tensors[k == bad] for name, tensors in index.items()}, order)
                leaves = torch.utils._pytree.tree_leaves(out)
                found += [k, *read((*leaves, *box.tensors()))]
                del out, leaves
                for home in box.homes.values() if zeroed else ():
                    home.p.grad = None
        seen.append(found)
    for one, other in zip(*seen, strict=True):
        if isinstance(one, int):
            at = one
        assert equal(one, other), f"seed {seed}, {kind}, call {at}: {one}, then {other}\n{acts}\n{varying}"
    return act


def _step(
    acts: Sequence[Act], box: Box, reads: Sequence[Callable[[], Any]], turning: bool
) -> Callable[..., Any]:
    """Return a random program as a function of tensors, indices, and the order of its acts."""

    def step(xs: dict[str, torch.Tensor], indices: dict[str, torch.Tensor], order: int) -> Any:
        numbers = [tame(read()) for read in reads]
        for number in numbers:
            xs = {name: x * number + number for name, x in xs.items()}
        turned = turning and numbers[0] > 0.5
        # Few acts may use what was computed with the numbers, so it is returned too.
        given = [x * 1 for x in xs.values()] if numbers else []
        return run(acts[:: -order if turned else order], box, xs, indices), given

    return step
