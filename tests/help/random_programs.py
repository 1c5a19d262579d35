"""Random programs of every kind of operation, run twice at the same time: on workers, and here, one operation
after the other.

A program is 20 to 70 operations. Each takes values, does something to them on their workers, and does the
same at once to their local twins; whatever is read must be the twin, bit for bit. Numbers wrap around (int64)
or are computed element by element (float32), so equal means equal. A failure is an operation too: it poisons
its results and what is computed of them, and nothing else.

A program follows from its seed. Its operation k draws from a generator of its own, so one that is left out
changes no other's draws. Programs of several threads share a session's places, groups and meshes, and no
values.

A new kind of operation is one method with a weight, `@operation(3)`, in the class of its subject:
it picks values (`any`, `like`), does the thing on `value.remote` within `self.where(value.place)` and on
`value.local`, and keeps the result (`keep`).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import itertools
import math
import random
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import AsyncIterable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import distruntime as dr
from agree import REMOTE
from distruntime.tensors.tensor import DistributedTensor
from early_channel import Late
from in_shares import InShares, Partial

Method = TypeVar("Method", bound=Callable[..., None])
Act = Callable[[Any], Any]

# Collectives take tensors of this length: 2, 3 and 4 members can share it.
LENGTH = 12
# A read may take so many seconds.
PATIENCE = 60.0
# So many seconds lie between two reports of a long run.
REPORT = 60.0
SIZES = ((1,), (3,), (8,), (LENGTH,), (LENGTH,), (4, 6), (200,))
# The operations that fail on their worker, and those that are cancelled there, raise these.
FAILED = (IndexError, torch.linalg.LinAlgError, dr.errors.StreamCancelled)
# This is beyond what travels in the log itself, and through shared memory.
LARGE = (70_000,)

# No other message has this tag.
_tag = itertools.count().__next__


def _steps(t: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions along which anybody steps: torch itself lets the others' float."""
    return [step for step, size in zip(t.stride(), t.shape) if size > 1]


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if torch.equal(got, expected):
        return True
    # NaN is equal to nothing.
    holes, expected_holes = got.isnan(), expected.isnan()
    return torch.equal(holes, expected_holes) and torch.equal(got[~holes], expected[~expected_holes])


def operation(weight: float) -> Callable[[Method], Method]:
    """Mark a method as an operation; it is chosen in proportion to its weight."""

    def mark(method: Method) -> Method:
        method.weight = weight  # type: ignore[attr-defined]
        return method

    return mark


# -- what programs are about ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Memory:
    """What views share: whether it is poisoned, and the meshes of whose tensors it is a shard."""

    poisoned: bool = False
    meshes: set[int] = field(default_factory=set)
    # An object has handed it out, so that this process may know two tensors in it for two memories.
    lent: bool = False


@dataclass(eq=False)
class Value:
    """A tensor of one place, and its local twin."""

    name: str
    place: dr.types.Place
    remote: Any
    local: torch.Tensor
    memory: Memory

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Whole:
    """A tensor on a mesh, and the local twins of its shards."""

    name: str
    mesh: int
    remote: Any
    locals: list[torch.Tensor]
    memories: list[Memory]

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Kept:
    """An object on a worker, and its local twin."""

    place: dr.types.Place
    remote: Any
    local: Total


@dataclass(eq=False)
class Keeping:
    """An object on a worker that holds memory of one of the program's values, and its local twin."""

    place: dr.types.Place
    remote: Any
    local: Keeper
    memory: Memory


@dataclass(eq=False)
class Wanted:
    """Something that has been asked for and will be read: what it must be."""

    name: str
    read: Callable[[], torch.Tensor]
    expected: torch.Tensor
    poisoned: bool


class World:
    """What programs that run side by side share: places, groups, meshes, a folder; and a lock for what a
    session has only one of.
    """

    def __init__(
        self,
        folder: Path,
        real: bool = False,
        about: str = "",
        streams: int | None = None,
        shared: bool = False,
    ) -> None:
        """`real` says that what is no CPU is a device of its own, with its own draws and its own failures.

        `shared` says that other masters use the workers, and may change the settings of their processes.
        Programs are `about` the operations of the class of this name, besides the plain ones, and have so
        many `streams` of each place; otherwise each program draws that.
        """
        self.about, self.of_each, self.shared = about, streams, shared
        table = dr.nodes()
        self.folder = folder
        self.nodes = len(table)
        self.places = [dr.place(node.index, device.name) for node in table for device in node.devices]
        # These draw what this process draws, and an index out of range costs no more than its result there.
        self.forgiving = [p for p in self.places if p.local_device == "cpu" or not real]
        self.real = real
        cpus, gpus = ([p for p in self.places if (p.local_device == "cpu") is want] for want in (True, False))
        # Some of its operations are always under way, as on a GPU.
        dr.distributed.register_data_channel("Late", Late)
        self.groups = [dr.distributed.new_group(cpus), dr.distributed.new_group(cpus[::-1])]
        self.groups += [dr.distributed.new_group(cpus, backend=backend) for backend in ("Late", "relay")]
        self.meshes: list[Any] = [dr.init_device_mesh("cpu", (self.nodes,))]
        # Each mesh has the meshes that are parts of it, and their members' ranks in it.
        self.parts: dict[int, dict[int, range]] = {}
        if gpus:
            self.groups.append(dr.distributed.new_group(gpus[:4]))
            self.groups.append(
                dr.distributed.new_group(self.places[:6] if len(self.places) > 4 else self.places)
            )
            each = len(gpus) // self.nodes
            grid = dr.init_device_mesh("accelerator", (self.nodes, each), mesh_dim_names=("dp", "tp"))
            self.meshes += [grid, *(grid.select(dp=k) for k in range(self.nodes))]
            self.parts[1] = {2 + k: range(k * each, (k + 1) * each) for k in range(self.nodes)}
        choose = random.Random(0)
        # These groups overlap.
        for size in (2, 3, 3) if len(self.places) > 2 else ():
            self.groups.append(dr.distributed.new_group(choose.sample(self.places, size)))
        self.lines = [
            [mesh.lines()] + [mesh.lines(k) for k in range(len(mesh.shape)) if len(mesh.shape) > 1]
            for mesh in self.meshes
        ]
        # Members have processes of their own, which all programs share.
        self.ranks = dr.spmd(self.meshes[0], _ranks)
        self.failing_ranks = dr.spmd(self.meshes[0], _fails_on_one, returns=torch.empty(5, dtype=torch.int64))
        # Whoever has it may seed the workers' generators, draw, or set what is torch's own.
        self.seed = threading.Lock()
        # Functions that `torch.compile` has seen, which all programs share.
        self.compiled: dict[tuple[object, ...], Callable[..., Any]] = {}
        self.compiling = threading.Lock()

    def streams(self, mesh: Any) -> bool:
        """Whether a mesh can have a stream: no stream is of several real devices of one node."""
        return not self.real or len({place.node for place in mesh.places}) == len(mesh.places)


@dataclass
class Wrong:
    """A program that went wrong: how to run it again, and what it did last."""

    seed: int
    what: str
    said: list[str]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what}\n  its last operations:\n    " + "\n    ".join(self.said[-12:])


class Tally:
    """Counts, and what went wrong; any thread may write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.wrong: list[Wrong] = []

    def add(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def note(self, program: Program) -> None:
        with self._lock:
            self.counts.update(programs=1, operations=len(program.chosen), checks=program.checks)
            self.operations.update(program.chosen)
            self.wrong += program.wrong

    def __str__(self) -> str:
        named = {"programs": 0, "operations": 0, "checks": 0, **self.counts, "wrong": len(self.wrong)}
        return ", ".join(f"{count} {name}" for name, count in named.items())


class Labelled(torch.Tensor):
    """A tensor of a user's class."""


# -- a program -----------------------------------------------------------------------------------------------


class Base:
    """What operations are made of. Values are picked, and kept; what is read is compared."""

    def __init__(self, seed: int, world: World) -> None:
        self.seed, self.world = seed, world
        self.random = random.Random(seed)
        self.values: list[Value] = []
        self.wholes: list[Whole] = []
        self.wanted: list[Wanted] = []
        self.objects: list[Kept] = []
        self.keepers: list[Keeping] = []
        self.works: list[Any] = []
        self.events: list[dr.Event] = []
        self.mail: list[tuple[int, dr.types.Place, Value]] = []
        self.generators: dict[dr.types.Place, tuple[torch.Generator, torch.Generator]] = {}
        self.groups: list[dr.distributed.ProcessGroup] = list(world.groups)
        self.said: list[str] = []
        self.chosen: list[str] = []
        self.checks = 0
        self.wrong: list[Wrong] = []
        self._name = itertools.count().__next__
        streams = self.random.choice((0, 1, 2, 2))
        streams = streams if world.of_each is None else world.of_each
        self.streams = {place: [dr.Stream(place) for _ in range(streams)] for place in world.places}
        self.mesh_streams = [
            [dr.Stream(mesh.device)] if streams and self.random.random() < 0.5 and world.streams(mesh) else []
            for mesh in world.meshes
        ]

    # -- what an operation says of itself is kept, for the day when it is wrong
    # ----------------------------------

    def say(self, *words: object) -> None:
        self.said[-1] += " " + " ".join(map(str, words))

    def where(self, place: dr.types.Place) -> AbstractContextManager[object]:
        """Return a context in which new tensors go to a place, and what runs there runs on one of its
        streams.
        """
        stream = self.random.choice([None, *self.streams[place]])
        return dr.on(place) if stream is None else dr.stream(stream)

    def device(self, place: dr.types.Place) -> Any:
        """Return a spelling of a place, which is current, for whatever takes a device."""
        return self.random.choice([REMOTE, place, place.device, f"remote:{place.number}"])

    def where_mesh(self, number: int) -> AbstractContextManager[object]:
        return dr.stream(self.random.choice([None, *self.mesh_streams[number]]))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def place(self) -> dr.types.Place:
        return self.random.choice(self.world.places)

    def numbers(self, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return a local tensor of drawn numbers."""
        count = math.prod(shape)
        drawn = torch.tensor(
            [self.random.randrange(-1 << 40, 1 << 40) for _ in range(min(count, LENGTH))], dtype=torch.int64
        )
        whole = drawn.repeat(count // len(drawn) + 1)[:count].reshape(tuple(shape))
        return whole if dtype == torch.int64 else (whole % 1000).to(dtype) / 7

    def new(
        self, place: dr.types.Place, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Value:
        """Send a new value to a place."""
        if shape is None:
            shape = LARGE if self.chance(0.02) else self.random.choice(SIZES)
        if dtype is None:
            dtype = torch.float32 if self.chance(0.3) else torch.int64
        local = self.numbers(shape, dtype)
        with self.where(place):
            remote = local.to(self.device(place))
        return self.keep(place, remote, local)

    def keep(
        self,
        place: dr.types.Place,
        remote: Any,
        local: torch.Tensor,
        *operands: Value,
        view_of: Value | None = None,
    ) -> Value:
        """Note a new value, poisoned if one of its operands is; or a view, which shares the memory."""
        memory = (
            view_of.memory
            if view_of is not None
            else Memory(any(value.memory.poisoned for value in operands))
        )
        found = Value(f"v{self._name()}", place, remote, local, memory)
        self.values.append(found)
        self.say("->", found, f"on {place}", f"{tuple(local.shape)}")
        return found

    def keep_whole(
        self, mesh: int, remote: Any, locals_: list[torch.Tensor], memories: list[Memory]
    ) -> Whole:
        found = Whole(f"m{self._name()}", mesh, remote, locals_, memories)
        for memory in memories:
            memory.meshes.add(mesh)
        self.wholes.append(found)
        self.say("->", found, f"on mesh {mesh}")
        return found

    def any(
        self,
        place: dr.types.Place | None = None,
        dtype: torch.dtype | None = None,
        healthy: bool = False,
        places: Sequence[dr.types.Place] = (),
    ) -> Value:
        """Pick a value, of that kind, at one of `places` if there are some; make one where there is none."""

        def good(value: Value) -> bool:
            return (
                (place is None or value.place == place)
                and (not places or value.place in places)
                and (dtype is None or value.local.dtype == dtype)
                and not (healthy and value.memory.poisoned)
            )

        found = [value for value in self.values if good(value)]
        if found:
            return self.random.choice(found)
        return self.new(place or self.random.choice(places or self.world.places), dtype=dtype)

    def like(self, value: Value, place: dr.types.Place, apart: Collection[Memory] = ()) -> Value:
        """Pick a value of another's shape and dtype, at a place, that shares no memory with some; make one
        where there is none.
        """

        def good(other: Value) -> bool:
            alike = other.local.shape == value.local.shape and other.local.dtype == value.local.dtype
            return alike and other.place == place and other.memory not in apart

        found = [other for other in self.values if good(other)]
        return (
            self.random.choice(found)
            if found
            else self.new(place, tuple(value.local.shape), value.local.dtype)
        )

    def write(self, target: Value, act: Act, *operands: Value) -> None:
        """Do something in place, there and here. What reads poison poisons all of the memory."""
        with self.where(target.place):
            act(target.remote)
        self.written(target, *operands)

    def written(self, target: Value, *operands: Value) -> None:
        target.memory.poisoned |= any(value.memory.poisoned for value in operands)

    # -- reading
    # -------------------------------------------------------------------------------------------------

    def check(self, wanted: Wanted) -> None:
        """Read, and compare: what is poisoned must raise, anything else be its twin."""
        self.checks += 1
        try:
            got = wanted.read()
        except FAILED as error:
            if not (
                wanted.poisoned and isinstance(error, (dr.errors.RemoteError, dr.errors.StreamCancelled))
            ):
                self.differs(f"{wanted.name} raised {type(error).__name__}: {str(error)[:300]}")
            return
        expected = wanted.expected
        if wanted.poisoned:
            self.differs(f"{wanted.name} must be poisoned, and reads {got.flatten()[:8].tolist()}")
        elif not _same(got, expected):
            self.differs(
                f"{wanted.name} reads {got.dtype} {tuple(got.shape)} {got.flatten()[:8].tolist()}, "
                f"expected {expected.dtype} {tuple(expected.shape)} {expected.flatten()[:8].tolist()}"
            )

    def read(self, name: str, value: Value, read: Callable[[], torch.Tensor]) -> None:
        self.check(Wanted(f"{name} of {value}", read, value.local, value.memory.poisoned))

    def differs(self, what: str) -> None:
        self.wrong.append(Wrong(self.seed, what, list(self.said)))

    @contextmanager
    def failures_of_others(self) -> Iterator[None]:
        """Let pass what `synchronize` raises of another program's operations, or of this one's: the first
        failure that nobody has read.
        """
        try:
            yield
        except FAILED as error:
            if not isinstance(error, (dr.errors.RemoteError, dr.errors.StreamCancelled)):
                raise


class Elementwise(Base):
    """New values of values, in place, through views, by `out=`."""

    UNARY: dict[str, Callable[[Any, int], Any]] = {  # noqa: RUF012 - a table
        "times and plus": lambda x, k: x * k + 1,
        "negative": lambda x, k: -x,
        "flip": lambda x, k: x.flip(0),
        "abs": lambda x, k: x.abs(),
        "where": lambda x, k: torch.where(x > 0, x, x - k),
        "sort": lambda x, k: x.sort(0).values,
        "roll": lambda x, k: x.roll(k),
        "clone": lambda x, k: x.clone(),
        "cat": lambda x, k: torch.cat([x, x + k])[: x.shape[0]].clone(),
        "contiguous": lambda x, k: x.contiguous() + 0,
    }
    BINARY: dict[str, Callable[[Any, Any], Any]] = {  # noqa: RUF012
        "+": lambda x, y: x + y,
        "*": lambda x, y: x * y,
        "-": lambda x, y: x - y,
        "maximum": lambda x, y: torch.maximum(x, y),
        "where": lambda x, y: torch.where(x < y, x, y),
    }
    WRITES: dict[str, Callable[[Any, int], Any]] = {  # noqa: RUF012
        "add_": lambda x, k: x.add_(k),
        "mul_": lambda x, k: x.mul_(3),
        "neg_": lambda x, k: x.neg_(),
        "every second": lambda x, k: x[::2].add_(k),
        "the first": lambda x, k: x[:1].fill_(k),
        "fill_": lambda x, k: x.fill_(k),
        "zero_": lambda x, k: x.zero_(),
        "copy_ of itself": lambda x, k: x.copy_(x.flip(0)),
        "the second half": lambda x, k: x[x.shape[0] // 2 :].sub_(k),
        "clamp_": lambda x, k: x.clamp_(-1000 * k, 1000 * k),
        "masked_fill_": lambda x, k: x.masked_fill_(x > k, k),
        "setitem": lambda x, k: x.__setitem__(slice(0, k), k),
        "foreach": lambda x, k: torch._foreach_add_([x], k),
    }

    @operation(3)
    def new_value(self) -> None:
        self.new(self.place())

    @operation(1)
    def factory(self) -> None:
        place, k = self.place(), self.random.randrange(-9, 9)
        with self.where(place):
            remote = torch.full((LENGTH,), k, dtype=torch.int64, device=self.device(place))
        self.keep(place, remote, torch.full((LENGTH,), k, dtype=torch.int64))

    @operation(1)
    def count(self) -> None:
        place, k = self.place(), self.random.randrange(-9, 9)
        with self.where(place):
            remote = torch.arange(k, k + LENGTH, device=self.device(place))
        self.keep(place, remote, torch.arange(k, k + LENGTH))

    @operation(1)
    def draw(self) -> None:
        """A generator of one's own draws what a local one draws, whatever other programs draw there."""
        place = self.random.choice(self.world.forgiving)
        if place not in self.generators or self.chance(0.1):
            seed = self.random.randrange(1 << 40)
            self.generators[place] = torch.Generator(device=place), torch.Generator()
            for generator in self.generators[place]:
                generator.manual_seed(seed)
        there, here = self.generators[place]
        over = self.any(place, healthy=True) if self.chance(0.4) else None
        with self.where(place):
            if self.chance(0.3):
                # This draws from the place's own generator, and nobody looks at it.
                torch.rand(3, device=self.device(place))
            with torch.set_grad_enabled(self.chance(0.5)):
                if over is not None:
                    over.remote.random_(-99, 99, generator=there)
                else:
                    remote = torch.randint(-99, 99, (LENGTH,), generator=there, device=self.device(place))
        if over is not None:
            self.say("over", over)
            over.local.random_(-99, 99, generator=here)
            return
        local = torch.randint(-99, 99, (LENGTH,), generator=here)
        # torch's C++ refuses `out=` where there is a default device.
        if self.chance(0.2):
            torch.randperm(LENGTH, generator=there, out=remote)
            torch.randperm(LENGTH, generator=here, out=local)
        self.keep(place, remote, local)

    @operation(1)
    def of_a_class(self) -> None:
        a = self.any()
        self.say(a)
        with self.where(a.place):
            remote = a.remote.as_subclass(Labelled) * 3
            assert isinstance(remote, Labelled)
            if self.chance(0.5):
                remote = remote.as_subclass(torch.Tensor)
        self.keep(a.place, remote, a.local * 3, a)

    @operation(1)
    def factory_elsewhere(self) -> None:
        """Only the operand's shape and dtype count. Where it lives itself, its worker is asked for them."""
        a, to, k = self.any(), self.place(), self.random.randrange(-9, 9)
        self.say(a, to)
        with self.where(to):
            if self.chance(0.5):
                remote, local = (
                    torch.full_like(a.remote, k, device=self.device(to)),
                    torch.full_like(a.local, k),
                )
            else:
                remote = a.remote.new_full(a.local.shape, k, device=self.device(to))
                local = a.local.new_full(a.local.shape, k)
        self.keep(to, remote, local, *([a] if to == a.place else []))

    @operation(6)
    def unary(self) -> None:
        a, k = self.any(), self.random.randrange(1, 9)
        name, act = self.random.choice(list(self.UNARY.items()))
        self.say(name, a, k)
        with self.where(a.place):
            remote = act(a.remote, k)
        self.keep(a.place, remote, act(a.local, k), a)

    @operation(6)
    def binary(self) -> None:
        a = self.any()
        b = self.like(a, a.place)
        name, act = self.random.choice(list(self.BINARY.items()))
        self.say(a, name, b)
        with self.where(a.place):
            remote = act(a.remote, b.remote)
        self.keep(a.place, remote, act(a.local, b.local), a, b)

    @operation(8)
    def write_in_place(self) -> None:
        a, k = self.any(), self.random.randrange(1, 9)
        name, act = self.random.choice(list(self.WRITES.items()))
        self.say(name, a, k)
        self.write(a, lambda x: act(x, k))
        act(a.local, k)

    @operation(3)
    def write_another_into_it(self) -> None:
        a = self.any()
        b = self.like(a, a.place, apart=[a.memory])
        act: Callable[[Any, Any], Any] = self.random.choice(
            (lambda x, y: x.add_(y), lambda x, y: x.copy_(y), lambda x, y: x[:1].copy_(y[:1]))
        )
        self.say(b, "into", a)
        self.write(a, lambda x: act(x, b.remote), b)
        act(a.local, b.local)

    @operation(1)
    def replayed(self) -> None:
        """A program of a write and a sum, two calls of which are recorded and two replayed."""
        a, k = self.any(), self.random.randrange(1, 9)
        b = self.like(a, a.place, apart=[a.memory])
        name, act = self.random.choice(list(self.WRITES.items()))
        if not type(a.remote) is type(b.remote) is DistributedTensor:
            return

        def step(x: Any, y: Any) -> Any:
            act(x, k)
            return x + y

        self.say("a program of", name, a, k, "and", b)
        with self.where(a.place):
            program = dr.program(step)
            for _ in range(4):
                remote = program(a.remote, b.remote)
        for _ in range(4):
            local = step(a.local, b.local)
        self.written(a)
        self.keep(a.place, remote, local, a, b)

    @operation(4)
    def view(self) -> None:
        a = self.any()
        n = a.local.shape[0]
        start, step = self.random.randrange(n), self.random.choice((1, 2))
        act: Act = self.random.choice(
            (
                lambda x: x[start::step],
                lambda x: x[start::step],
                lambda x: x.detach(),
                lambda x: x.unsqueeze(0)[0],
                lambda x: x.split(max(1, n - 1))[0],
            )
        )
        self.say("of", a)
        with self.where(a.place):
            remote = act(a.remote)
        self.keep(a.place, remote, act(a.local), view_of=a)

    @operation(3)
    def out(self) -> None:
        a = self.any()
        b = self.like(a, a.place, apart=[a.memory])
        self.say(a, "into", b)
        self.write(b, lambda x: torch.add(a.remote, 5, out=x), a)
        torch.add(a.local, 5, out=b.local)

    @operation(0.6)
    def picked_by_a_mask(self) -> None:
        """The shape depends on the values: this waits for the worker."""
        a, k = self.any(healthy=True), self.random.randrange(-1000, 1000)
        if a.local.dim() == 1 and (a.local > k).any():
            with self.where(a.place):
                remote = a.remote[a.remote > k]
            self.keep(a.place, remote, a.local[a.local > k], a)

    @operation(0.6)
    def rows_added(self) -> None:
        """What training with sparse gradients does: rows come in twice, and are added into a dense tensor."""
        a, dtype = self.any(), torch.int64
        b = self.like(a, a.place, apart=[a.memory])
        if not type(a.remote) is type(b.remote) is DistributedTensor or a.local.dtype != dtype:
            return
        rows = torch.tensor([self.random.randrange(a.local.shape[0]) for _ in range(a.local.shape[0])])
        again = self.chance(0.5)

        def add(x: Any, y: Any) -> None:
            sparse = torch.sparse_coo_tensor(rows[None], y, x.shape, check_invariants=False)
            sparse = (sparse + sparse * 2) if again else sparse.coalesce()
            x.add_(sparse, alpha=3)

        self.say("of", b, "into", a, "again" if again else "summed")
        self.write(a, lambda x: add(x, b.remote), b)
        # torch's own kernel adds the offset of a view twice (2.13), so these are added one by one here.
        a.local.index_add_(0, rows, b.local, alpha=9 if again else 3)

    @operation(0.4)
    def slow(self) -> None:
        """Something that takes a while, of which nothing is read."""
        place = self.place()
        with self.where(place):
            slow = torch.ones(128, 128, dtype=torch.float32, device=REMOTE)
            for _ in range(self.random.randrange(6)):
                slow = slow @ slow / 128


class Copying(Base):
    """From here, between places, and back."""

    @operation(3)
    def upload_over(self) -> None:
        a = self.any(healthy=True)
        local = self.numbers(a.local.shape, a.local.dtype)
        self.say("over", a)
        self.write(a, lambda x: x.copy_(local))
        a.local.copy_(local)
        # The memory is the caller's again.
        local.fill_(77)

    @operation(3)
    def copy(self) -> None:
        a, to = self.any(), self.place()
        self.say(a)
        with self.where(self.random.choice((a.place, to))):
            take = self.random.choice((type(a.remote).to, torch.as_tensor, torch.asarray))
            remote = take(a.remote, device=self.random.choice([to, to.device]))
        # To the same device there is no copy, as in torch itself.
        shared = to == a.place
        self.keep(to, remote, a.local if shared else a.local.clone(), a, view_of=a if shared else None)

    @operation(2)
    def copy_into(self) -> None:
        a = self.any()
        b = self.like(a, self.place(), apart=[a.memory])
        self.say(a, "into", b)
        self.write(b, lambda x: x.copy_(a.remote), a)
        b.local.copy_(a.local)

    @operation(0.7)
    def send(self) -> None:
        a, to, tag = self.any(healthy=True), self.place(), _tag()
        if a.place != to:
            self.say(a, "to", to)
            if self.chance(0.5):
                dr.distributed.send(a.remote, to, tag=tag)
            else:
                self.works.append(dr.distributed.isend(a.remote, to, tag=tag))
            self.mail.append((tag, to, Value(a.name, a.place, None, a.local.clone(), Memory())))

    @operation(0.7)
    def receive(self) -> None:
        if self.mail:
            self._receive(*self.mail.pop(self.random.randrange(len(self.mail))))

    def _receive(self, tag: int, to: dr.types.Place, sent: Value) -> None:
        into = self.like(sent, to)
        self.say(sent, "into", into)
        with self.where(to):
            if self.chance(0.5):
                dr.distributed.recv(into.remote, tag=tag)
            else:
                self.works.append(dr.distributed.irecv(into.remote, tag=tag))
        into.local.copy_(sent.local)

    @operation(0.6)
    def burst_of_copies(self) -> None:
        """Many in a row: another thread's operations on several workers come between."""
        a, to = self.any(), self.place()
        self.say(a, "to", to)
        for _ in range(8):
            copy = a.remote.to(to)
        shared = to == a.place
        self.keep(to, copy, a.local if shared else a.local.clone(), a, view_of=a if shared else None)


class Reading(Base):
    """Values that come here, at once or later."""

    @operation(2)
    def read_one(self) -> None:
        a = self.any()
        self.say(a)
        with self.where(a.place):
            self.read("cpu", a, lambda: a.remote.cpu())

    @operation(1)
    def read_an_item(self) -> None:
        a = self.any()
        flat = a.local.reshape(-1)
        k = self.random.randrange(flat.numel())
        self.say(a, k)
        poisoned, dtype = a.memory.poisoned, a.local.dtype
        self.check(
            Wanted(
                f"item {k} of {a}",
                lambda: torch.tensor(a.remote.reshape(-1)[k].item(), dtype=dtype),
                flat[k],
                poisoned,
            )
        )

    @operation(3)
    def fetch_later(self) -> None:
        a = self.any()
        self.say(a)
        self.wanted.append(self._fetched(a))

    def _fetched(self, a: Value) -> Wanted:
        future = dr.fetch_async(a.remote)
        return Wanted(
            f"fetch_async of {a}, operation {len(self.chosen)},",
            lambda: future.result(PATIENCE),
            a.local.clone(),
            a.memory.poisoned,
        )

    @operation(2)
    def await_a_fetch(self) -> None:
        if self.wanted:
            self.check(self.wanted.pop(self.random.randrange(len(self.wanted))))

    @operation(1)
    def fetch_then_write(self) -> None:
        """A fetch is a read: what is written or freed afterwards, on whatever stream and behind whatever of a
        mesh, does not reach it.
        """
        a = self.any()
        self.say(a)
        if self.wholes:
            whole = self.random.choice(self.wholes)
            for _ in range(self.random.randrange(3)):
                whole.remote + 1
        self.wanted.append(self._fetched(a))
        self.write(a, lambda x: x.add_(4))
        a.local.add_(4)
        if self.chance(0.3):
            self.values.remove(a)

    @operation(0.7)
    def save(self) -> None:
        """A file holds the values of this moment, and who shares memory there shares it when it is loaded."""
        first = self.any(healthy=True)
        alike = [v for v in self.values if v.memory is first.memory and v.place == first.place]
        chosen = [first, *self.random.sample(alike, min(len(alike), 2)), self.any(healthy=True), first]
        place, form = self.place(), self.random.randrange(5)
        self.say(*chosen, "loaded", f"to {place}" if form else "here", f"as {form}")
        file, expected = io.BytesIO(), [value.local.clone() for value in chosen]
        torch.save(
            [chosen[0].remote, {"rest": [value.remote for value in chosen[1:]]}],
            file,
            _use_new_zipfile_serialization=self.chance(0.8),
        )
        for value in chosen:
            if self.chance(0.3):
                self.write(value, lambda x: x.add_(1))
                value.local.add_(1)
        file.seek(0)
        where = (None, place, place.device, {"cpu": place}, lambda s, _: s.to(device=place.device))[form]
        head, tail = torch.load(file, map_location=where, weights_only=False)
        loaded = [head, *tail["rest"]]
        if loaded[-1] is not head or (form and any(t.place != place for t in loaded)):
            self.differs("what was saved twice is two, or it is elsewhere")
        for value, got, wanted in zip(chosen, dr.fetch(loaded), expected):
            if not _same(got, wanted):
                self.differs(f"{value} in a file")
        for k, (value, got) in enumerate(zip(chosen, loaded)):
            here, there = value.local.untyped_storage(), got.untyped_storage()
            for other, one in zip(chosen[:k], loaded):
                shared = other.local.untyped_storage().data_ptr() == here.data_ptr()
                known = not (shared and value.memory.lent)
                if known and (one.untyped_storage().data_ptr() == there.data_ptr()) is not shared:
                    self.differs(
                        f"{other} and {value} share memory: {shared}, and in a file they do not agree"
                    )

    @operation(0.5)
    def fetch_several(self) -> None:
        chosen = [self.any(healthy=True) for _ in range(3)]
        self.say(*chosen)
        for value, got in zip(chosen, dr.fetch([value.remote for value in chosen], timeout=PATIENCE)):
            self.read("fetch", value, lambda got=got: got)  # type: ignore[misc]


class Streaming(Base):
    """Streams and events; nothing of them changes a value."""

    def stream(self) -> dr.Stream | None:
        every = [stream for streams in (*self.streams.values(), *self.mesh_streams) for stream in streams]
        return self.random.choice(every) if every else None

    @operation(3)
    def record_and_wait(self) -> None:
        one, other = self.stream(), self.stream()
        if one is not None and other is not None:
            event = dr.Event(enable_timing=self.chance(0.3))
            event.record(one)
            self.events.append(event)
            self.random.choice(self.events).wait(other)

    @operation(0.5)
    def wait_for_a_stream(self) -> None:
        one, other = self.stream(), self.stream()
        if one is not None and other is not None:
            one.wait_stream(other)

    @operation(0.3)
    def time_something(self) -> None:
        stream = self.stream()
        if stream is not None:
            begin, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
            begin.record(stream)
            if any(stream is one for streams in self.streams.values() for one in streams):
                a = self.any(stream.place)
                with dr.stream(stream):
                    a.remote + 1
            end.record(stream)
            passed = begin.elapsed_time(end)
            if not 0 <= passed < 600_000:
                self.differs(f"{passed} ms between two events in a row")

    @operation(0.3)
    def await_an_event(self) -> None:
        if self.events:
            event = self.random.choice(self.events)
            with self.failures_of_others():
                event.synchronize(timeout=PATIENCE)
                if not event.query():
                    self.differs("an event that was waited for has not happened")

    @operation(0.2)
    def synchronize(self) -> None:
        with self.failures_of_others():
            if self.chance(0.5):
                dr.synchronize(timeout=PATIENCE)
            elif (stream := self.stream()) is not None:
                stream.synchronize(PATIENCE)

    @operation(0.3)
    def record_stream(self) -> None:
        a = self.any()
        if self.streams[a.place]:
            a.remote.record_stream(self.random.choice(self.streams[a.place]))


class Together(Base):
    """Collectives of groups, in place and as new values."""

    def members(self) -> tuple[dr.distributed.ProcessGroup, list[Value]]:
        """Pick a group, and alike values of its members: of a length that they can share."""
        group = self.random.choice(self.groups)
        places = list(group.places)
        first = [v for v in self.values if v.place == places[0] and v.local.shape == (LENGTH,)]
        like = self.random.choice(first) if first else self.new(places[0], (LENGTH,))
        found = [like] + [self.like(like, place) for place in places[1:]]
        self.say(f"group {self.groups.index(group)}", *found)
        return group, found

    def options(self, group: dr.distributed.ProcessGroup) -> dict[str, Any]:
        return {"group": group, "async_op": self.chance(0.4)}

    def begun(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def kept(self, members: list[Value], remotes: Sequence[Any], locals_: Sequence[torch.Tensor]) -> None:
        for member, remote, local in zip(members, remotes, locals_):
            self.keep(member.place, remote, local.clone(), *members)

    @operation(0.1)
    def new_group(self) -> None:
        """A group of some places, in some order, that overlaps with others."""
        places = self.world.places
        self.groups.append(
            dr.distributed.new_group(self.random.sample(places, self.random.randint(1, min(4, len(places)))))
        )

    @operation(0.5)
    def await_work(self) -> None:
        if self.works:
            self.works.pop(self.random.randrange(len(self.works))).wait()

    @operation(1.2)
    def all_reduce(self) -> None:
        group, members = self.members()
        # gloo and torch make different maxima where there are NaNs.
        if any(m.local.isnan().any() for m in members):
            return
        name = self.random.choice(
            ("MIN", "MAX") if members[0].local.dtype == torch.float32 else ("SUM", "MIN", "MAX")
        )
        self.begun(
            dr.distributed.all_reduce(
                [m.remote for m in members], getattr(dr.distributed.ReduceOp, name), **self.options(group)
            )
        )
        stacked = torch.stack([m.local for m in members])
        total = {"SUM": stacked.sum(0), "MIN": stacked.amin(0), "MAX": stacked.amax(0)}[name]
        for m in members:
            m.local.copy_(total)
            self.written(m, *members)

    @operation(0.4)
    def broadcast(self) -> None:
        group, members = self.members()
        root = self.random.randrange(group.size())
        if any(m.memory.poisoned for m in members):
            return
        self.begun(
            dr.distributed.broadcast([m.remote for m in members], group_src=root, **self.options(group))
        )
        for m in members:
            m.local.copy_(members[root].local.clone())

    @operation(0.3)
    def reduce(self) -> None:
        group, members = self.members()
        if members[0].local.dtype == torch.float32 or any(m.memory.poisoned for m in members):
            return
        root = self.random.randrange(group.size())
        self.begun(dr.distributed.reduce([m.remote for m in members], group_dst=root, **self.options(group)))
        members[root].local.copy_(torch.stack([m.local for m in members]).sum(0))

    @operation(0.4)
    def new_sums(self) -> None:
        group, members = self.members()
        if members[0].local.dtype == torch.int64:
            remotes = dr.functional.all_reduce([m.remote for m in members], group=group)
            self.kept(members, remotes, [torch.stack([m.local for m in members]).sum(0)] * len(members))

    @operation(0.4)
    def all_gather(self) -> None:
        group, members = self.members()
        if self.chance(0.5):
            remotes = dr.functional.all_gather([m.remote for m in members], group)
        else:
            remotes = [m.remote.new_zeros(LENGTH * len(members)) for m in members]
            self.begun(
                dr.distributed.all_gather_into_tensor(
                    remotes, [m.remote for m in members], **self.options(group)
                )
            )
        self.kept(members, remotes, [torch.cat([m.local for m in members])] * len(members))

    @operation(0.3)
    def reduce_scatter(self) -> None:
        group, members = self.members()
        if members[0].local.dtype == torch.int64:
            parts = dr.functional.reduce_scatter([m.remote for m in members], group=group)
            self.kept(members, parts, torch.stack([m.local for m in members]).sum(0).chunk(len(members)))

    @operation(0.3)
    def all_to_all(self) -> None:
        group, members = self.members()
        n = len(members)
        if self.chance(0.5):
            remotes = dr.functional.all_to_all_single([m.remote for m in members], group=group)
        else:
            remotes = [m.remote.new_zeros(LENGTH) for m in members]
            self.begun(
                dr.distributed.all_to_all_single(remotes, [m.remote for m in members], **self.options(group))
            )
        self.kept(
            members, remotes, [torch.cat([m.local.chunk(n)[rank] for m in members]) for rank in range(n)]
        )

    @operation(0.3)
    def gather_and_scatter(self) -> None:
        group, members = self.members()
        if any(m.memory.poisoned for m in members) or len({m.memory for m in members}) < len(members):
            return
        root = self.random.randrange(group.size())
        gathered = dr.functional.gather([m.remote for m in members], group_dst=root, group=group)
        self.begun(
            dr.distributed.scatter(
                [m.remote for m in members],
                [*gathered[1:], gathered[0]],
                group_src=root,
                **self.options(group),
            )
        )
        turned = [m.local.clone() for m in (*members[1:], members[0])]
        for m, local in zip(members, turned):
            m.local.copy_(local)

    @operation(0.2)
    def barrier(self) -> None:
        with self.failures_of_others():
            self.begun(dr.distributed.barrier(self.random.choice(self.groups), async_op=self.chance(0.7)))


class Layering(Base):
    """Layers over partitions."""

    @operation(0.5)
    def windows_over_places(self) -> None:
        """The largest of each window, of shards that are as long as they happen to be."""
        count = min(len(self.world.places), self.random.randint(2, 4))
        places = self.random.sample(self.world.places, count)
        parts = [self.any(place, torch.float32, healthy=True) for place in places]
        self.say(*parts)
        kernel = self.random.randint(1, 9)
        options = {
            "stride": self.random.randint(1, 3),
            "padding": self.random.randint(0, kernel // 2),
            "overlap": self.chance(0.7),
        }
        whole = torch.cat([part.local.reshape(1, 1, -1) for part in parts], 2)
        if whole.shape[2] < kernel:
            return
        on = dr.mesh.Partition(places, (1, 1, count))
        shards = dr.nn.MaxPool1d(on, kernel, **options)([part.remote.reshape(1, 1, -1) for part in parts])
        options.pop("overlap")
        expected = torch.nn.MaxPool1d(kernel, **options)(whole)
        for place, shard, where in zip(places, shards, on.slices(expected.shape)):
            # Other operations expect some elements.
            if shard.numel():
                self.keep(place, shard.reshape(-1), expected[where].clone().reshape(-1), *parts)

    @operation(0.4)
    def convolution_over_places(self) -> None:
        """A convolution of small whole numbers, whose sums are exact, padded in any way; and a loss of it."""
        count = min(len(self.world.places), self.random.randint(2, 4))
        places = self.random.sample(self.world.places, count)
        parts = [self.any(place, torch.float32, healthy=True) for place in places]
        self.say(*parts)
        kernel, padding = self.random.randint(1, 4), self.random.randint(0, 3)
        options = {
            "stride": self.random.randint(1, 3),
            "padding": padding,
            "padding_mode": self.random.choice(["zeros", "reflect", "replicate", "circular"]),
            # Another thread may have set another default.
            "dtype": torch.float32,
        }
        # A value may have NaN and infinity, which spread in a convolution as its kernel pleases.
        small = [
            [t.nan_to_num(0, 0, 0).remainder(8).floor().reshape(1, 1, -1) for t in (part.remote, part.local)]
            for part in parts
        ]
        whole = torch.cat([local for _, local in small], 2)
        if whole.shape[2] <= max(kernel, padding):
            return
        serial, on = torch.nn.Conv1d(1, 2, kernel, **options), dr.mesh.Partition(places, (1, 1, count))
        # A new layer draws its weights.
        with self.world.seed:
            layer = dr.nn.Conv1d(on, 1, 2, kernel, **options, overlap=self.random.choice([None, True, False]))
        state = {
            name: torch.tensor([self.random.randint(-3, 3) for _ in range(p.numel())])
            .reshape(p.shape)
            .float()
            for name, p in serial.state_dict().items()
        }
        serial.load_state_dict(state)
        layer.load_state_dict(state)
        with torch.no_grad():
            shards, expected = layer([remote for remote, _ in small]), serial(whole)
            if self.chance(0.5):
                name = self.random.choice(["L1Loss", "MSELoss", "HuberLoss"])
                self.say(name)
                shards = getattr(dr.nn, name)(on, "none")(shards, [torch.zeros_like(y) for y in shards])
                expected = getattr(torch.nn, name)(reduction="none")(expected, torch.zeros_like(expected))
        for place, shard, where in zip(places, shards, on.slices(expected.shape)):
            if shard.numel():
                self.keep(place, shard.reshape(-1), expected[where].clone().reshape(-1), *parts)


class OnMeshes(Base):
    """Tensors on meshes, their members and shards, and what runs along dimensions."""

    def whole(self, mesh: int | None = None) -> Whole:
        found = [w for w in self.wholes if mesh is None or w.mesh == mesh]
        if found:
            return self.random.choice(found)
        return self.new_whole(self.random.randrange(len(self.world.meshes)) if mesh is None else mesh)

    def new_whole(self, mesh: int) -> Whole:
        locals_ = [self.numbers((5,)) for _ in self.world.meshes[mesh].places]
        with self.where_mesh(mesh):
            remote = dr.from_shards([local.clone() for local in locals_], self.world.meshes[mesh])
        return self.keep_whole(mesh, remote, locals_, [Memory() for _ in locals_])

    def along(self, w: Whole) -> Any:
        return self.random.choice(self.world.lines[w.mesh])

    @operation(0.6)
    def mesh_new(self) -> None:
        self.new_whole(self.random.randrange(len(self.world.meshes)))

    @operation(0.3)
    def mesh_upload(self) -> None:
        mesh, local = self.random.randrange(len(self.world.meshes)), self.numbers((5,))
        remote = local.to(self.world.meshes[mesh].device)
        places = self.world.meshes[mesh].places
        self.keep_whole(mesh, remote, [local.clone() for _ in places], [Memory() for _ in places])

    @operation(1)
    def mesh_compute(self) -> None:
        a = self.whole()
        b = self.whole(a.mesh)
        if a.locals[0].shape != b.locals[0].shape:
            return
        with self.where_mesh(a.mesh):
            remote = a.remote * 3 + b.remote
        memories = [Memory(x.poisoned or y.poisoned) for x, y in zip(a.memories, b.memories)]
        self.say(a, b)
        self.keep_whole(a.mesh, remote, [x * 3 + y for x, y in zip(a.locals, b.locals)], memories)

    @operation(1)
    def mesh_write(self) -> None:
        a, k = self.whole(), self.random.randrange(1, 9)
        act: Act = self.random.choice(
            (lambda x: x.add_(k), lambda x: x[1:].mul_(k), lambda x: x.neg_(), lambda x: x.copy_(x.flip(0)))
        )
        self.say(a, k)
        with self.where_mesh(a.mesh):
            act(a.remote)
        for local in a.locals:
            act(local)

    @operation(1)
    def mesh_uneven(self) -> None:
        """The first rows of each member's shard, here more and there less, are a tensor on the mesh: the same
        memory. Each operator runs for each member. Its sums have one shape again.
        """
        a, k = self.whole(), self.random.randrange(1, 9)
        if not all(local.is_contiguous() for local in a.locals):
            return
        mesh, rows = self.world.meshes[a.mesh], a.locals[0].shape[0]
        counts = [self.random.randrange(rows + 1) for _ in a.locals]
        self.say(a, counts, k)
        with self.where_mesh(a.mesh):
            part = dr.from_shards([a.remote.member(k)[:n] for k, n in enumerate(counts)], mesh)
            part.add_(k)
            scaled = part * k + part
            summed = scaled.sum(0, keepdim=True)
        locals_ = [local[:n].add_(k) for local, n in zip(a.locals, counts)]
        for at, (local, memory) in enumerate(zip(locals_, a.memories)):
            # Other operations choose a row.
            if not len(local):
                continue
            value = Value("", mesh.places[at], None, local, memory)
            # Where the counts are equal, this would be the memory of a tensor of the mesh.
            self.keep(value.place, scaled.member(at) + 0, local * k + local, value)
        sums = [(local * k + local).sum(0, keepdim=True) for local in locals_]
        self.keep_whole(a.mesh, summed, sums, [Memory(m.poisoned) for m in a.memories])

    @operation(1)
    def mesh_member(self) -> None:
        """One member's shard: the same memory."""
        a = self.whole()
        k = self.random.randrange(len(a.locals))
        self.say(a, k)
        shard = Value("", self.world.meshes[a.mesh].places[k], None, a.locals[k], a.memories[k])
        self.keep(shard.place, a.remote.member(k), shard.local, view_of=shard)

    @operation(0.5)
    def mesh_of_values(self) -> None:
        """Values of the members' places become shards: the same memory, unless they are a tensor's of this
        mesh already.
        """
        mesh = self.random.randrange(len(self.world.meshes))
        places = self.world.meshes[mesh].places
        first = self.any(places[0])
        members = [first] + [self.like(first, place) for place in places[1:]]
        self.say(*members)
        shared = all(not m.memory.meshes and m.local.is_contiguous() for m in members)
        with self.where_mesh(mesh):
            remote = dr.from_shards(
                [m.remote if shared else m.remote.clone() for m in members], self.world.meshes[mesh]
            )
        locals_ = [m.local if shared else m.local.clone() for m in members]
        self.keep_whole(
            mesh, remote, locals_, [m.memory if shared else Memory(m.memory.poisoned) for m in members]
        )

    @operation(0.4)
    def mesh_mixture(self) -> None:
        """Shards of two tensors of a mesh become a third one, by copies; all shards of one are that one
        again.
        """
        a = self.whole()
        alike = [
            w
            for w in self.wholes
            if w.mesh == a.mesh
            and (w.locals[0].shape, w.locals[0].dtype) == (a.locals[0].shape, a.locals[0].dtype)
        ]
        b = self.random.choice(alike)
        sources = [self.random.choice((a, b)) for _ in a.locals]
        shared = all(w.memories[k] is sources[0].memories[k] for k, w in enumerate(sources))
        self.say(*sources)
        with self.where_mesh(a.mesh):
            remote = dr.from_shards(
                [w.remote.member(k) for k, w in enumerate(sources)], self.world.meshes[a.mesh]
            )
        locals_ = [w.locals[k] if shared else w.locals[k].clone() for k, w in enumerate(sources)]
        memories = [
            w.memories[k] if shared else Memory(w.memories[k].poisoned) for k, w in enumerate(sources)
        ]
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.5)
    def mesh_part(self) -> None:
        """Some members' shards of a mesh's tensor become a tensor of a part of the mesh: the same memory."""
        wholes = [
            w
            for w in self.wholes
            for part in self.world.parts.get(w.mesh, {})
            if all(part not in m.meshes for m in w.memories)
        ]
        if wholes:
            a = self.random.choice(wholes)
            part, ranks = self.random.choice(list(self.world.parts[a.mesh].items()))
            self.say(a)
            with self.where_mesh(part):
                remote = dr.from_shards([a.remote.member(k) for k in ranks], self.world.meshes[part])
            self.keep_whole(part, remote, [a.locals[k] for k in ranks], [a.memories[k] for k in ranks])

    @operation(1)
    def mesh_shards(self) -> None:
        a = self.whole()
        self.say(a)
        self.read_whole("shards", a)

    def read_whole(self, name: str, a: Whole) -> None:
        if any(memory.poisoned for memory in a.memories):
            for k, (local, memory) in enumerate(zip(a.locals, a.memories)):
                self.check(
                    Wanted(f"member {k} of {a}", lambda k=k: a.remote.member(k).cpu(), local, memory.poisoned)
                )  # type: ignore[misc]
        else:
            for k, (got, local) in enumerate(zip(dr.shards(a.remote), a.locals)):
                self.check(Wanted(f"{name} {k} of {a}", lambda got=got: got, local, False))  # type: ignore[misc]

    @operation(1)
    def mesh_all_reduce(self) -> None:
        a = self.whole()
        if a.locals[0].dtype == torch.int64:
            self._sums(a, 1)

    @operation(0.6)
    def burst_along_a_mesh(self) -> None:
        a = self.whole()
        if a.locals[0].dtype == torch.int64:
            self._sums(a, 8)

    def _sums(self, a: Whole, times: int) -> None:
        lines = self.along(a)
        self.say(a, lines)
        with self.where_mesh(a.mesh):
            for _ in range(times):
                remote = dr.lines.all_reduce(lines, a.remote)
        locals_, memories = list(a.locals), list(a.memories)
        for row in lines.rows:
            total, poisoned = (
                torch.stack([a.locals[k] for k in row]).sum(0),
                any(a.memories[k].poisoned for k in row),
            )
            for k in row:
                locals_[k], memories[k] = total.clone(), Memory(poisoned)
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.4)
    def mesh_all_gather(self) -> None:
        a = self.whole()
        if a.locals[0].shape[0] > LENGTH:
            return
        lines = self.along(a)
        self.say(a, lines)
        with self.where_mesh(a.mesh):
            remote = dr.lines.all_gather(lines, a.remote)
        locals_, memories = list(a.locals), list(a.memories)
        for row in lines.rows:
            together, poisoned = (
                torch.cat([a.locals[k] for k in row]),
                any(a.memories[k].poisoned for k in row),
            )
            for k in row:
                locals_[k], memories[k] = together.clone(), Memory(poisoned)
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.4)
    def mesh_broadcast(self) -> None:
        a = self.whole()
        lines = self.along(a)
        root = self.random.randrange(lines.size)
        self.say(a, lines, root)
        with self.where_mesh(a.mesh):
            remote = dr.lines.broadcast(lines, a.remote, root)
        locals_, memories = list(a.locals), list(a.memories)
        for row in lines.rows:
            for k in row:
                locals_[k], memories[k] = a.locals[row[root]].clone(), Memory(a.memories[row[root]].poisoned)
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.4)
    def mesh_shift(self) -> None:
        a, by = self.whole(), self.random.randrange(-2, 4)
        lines, wrap = self.along(a), self.chance(0.5)
        self.say(a, lines, by, wrap)
        with self.where_mesh(a.mesh):
            remote = dr.lines.shift(lines, a.remote, by, wrap=wrap)
        locals_, memories = list(a.locals), list(a.memories)
        for row in lines.rows:
            poisoned = any(a.memories[k].poisoned for k in row)
            for rank, k in enumerate(row):
                given = a.locals[row[(rank - by) % len(row)]]
                inside = wrap or 0 <= rank - by < len(row)
                locals_[k], memories[k] = (given if inside else given * 0).clone(), Memory(poisoned)
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.3)
    def mesh_attention(self) -> None:
        """A sequence that a line cuts, compared in steps of a sixteenth."""
        number = self.random.randrange(len(self.world.meshes))
        mesh, lines = self.world.meshes[number], self.random.choice(self.world.lines[number])
        causal, balanced = self.chance(0.5), self.chance(0.5)
        self.say(f"mesh {number}", lines, causal, balanced)
        queries, keys, values = (
            [(self.numbers((1, 2, 3)) % 7 - 3).double() for _ in mesh.places] for _ in range(3)
        )
        parts = [dr.from_shards(of_all, mesh) for of_all in (queries, keys, values)]
        with self.where_mesh(number):
            found = dr.lines.attention(lines, *parts, is_causal=causal, balanced=balanced)
            # Where sums are rounded otherwise, no number is near a border.
            remote = (found * 16 + 0.1234).round().long().flatten()
        twins = [torch.empty(0)] * len(mesh.places)
        for row in lines.rows:
            at = [[k, 2 * len(row) - 1 - k] if balanced else [2 * k, 2 * k + 1] for k in range(len(row))]
            order = torch.tensor(at).flatten().argsort()
            whole = [torch.cat([of_all[k] for k in row], 1)[:, order] for of_all in (queries, keys, values)]
            out = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal)
            for k, mine in zip(row, at):
                twins[k] = (out[:, mine] * 16 + 0.1234).round().long().flatten()
        self.keep_whole(number, remote, twins, [Memory() for _ in twins])

    @operation(0.3)
    def mesh_experts(self) -> None:
        """Tokens go to experts at other members and back; whole numbers, so that sums are exact."""
        number = self.random.randrange(len(self.world.meshes))
        mesh = self.world.meshes[number]
        dim, places = self.random.randrange(len(mesh.shape)), mesh.places
        others = [d for d in range(len(mesh.shape)) if d != dim]
        count = mesh.shape[dim] * self.random.randrange(1, 3)
        choices = min(2, count)
        factors = [self.random.randrange(-3, 4) for _ in range(count)]
        every = [Times(torch.tensor([float(factor)], dtype=torch.float32)) for factor in factors]
        even = self.random.random() < 0.5
        rows = [5 if even else self.random.randrange(6) for _ in places]
        x = [(self.numbers((5, 1)) % 7 - 3).float()[:n] for n in rows]
        chosen = [
            torch.tensor([self.random.sample(range(count), choices) for _ in range(5)])[:n] for n in rows
        ]
        self.say(f"mesh {number}", dim, count, rows)
        with self.where_mesh(number):
            experts = dr.parallel.Experts(every, mesh, ep=dim, dp=others or None)
            given, to = dr.from_shards(x, mesh), dr.from_shards(chosen, mesh)
            made = experts(given, torch.ones_like(to, dtype=torch.float32), to)
            made.sum().backward()
            experts.reduce_gradients(divide_by=1)
            remote = made.detach().squeeze(1).long()
            remote = remote if even else remote.sum(0, keepdim=True)
        twins = [
            sum(one.squeeze(1) * (torch.tensor(factors)[at[:, k]] + 1) for k in range(choices)).long()  # type: ignore[union-attr]
            for one, at in zip(x, chosen)
        ]
        twins = twins if even else [twin.sum(0, keepdim=True) for twin in twins]
        self.keep_whole(number, remote, twins, [Memory() for _ in places])
        # An expert's gradient is the sum of all tokens that any member has sent to it.
        gradient = sum(one[(at == 0).any(1)].sum() for one, at in zip(x, chosen))
        weight = next(experts.parameters())
        assert weight.grad is not None
        self.keep(places[0], weight.grad.member(0) + 0, torch.as_tensor(gradient).reshape(1))  # type: ignore[attr-defined]

    @operation(0.4)
    def mesh_sum_beside(self) -> None:
        """A reduction goes to a stream of the mesh's own, between what writes its operand and reads it."""
        a, k = self.whole(), self.random.randrange(1, 9)
        if a.locals[0].dtype != torch.int64:
            return
        mesh = self.world.meshes[a.mesh]
        group = mesh.get_group(self.random.randrange(len(mesh.shape)))
        self.say(a, k)
        with self.where_mesh(a.mesh):
            remote = a.remote * k
            work = dist.all_reduce(remote, group=group, async_op=True)
            beside = a.remote + k
            work.wait()
            remote.add_(beside)
        locals_, memories = list(a.locals), list(a.memories)
        for row in group.lines.rows:
            total = torch.stack([a.locals[member] * k for member in row]).sum(0)
            poisoned = any(a.memories[member].poisoned for member in row)
            for member in row:
                locals_[member], memories[member] = total + (a.locals[member] + k), Memory(poisoned)
        self.keep_whole(a.mesh, remote, locals_, memories)

    @operation(0.8)
    def mesh_free(self) -> None:
        if len(self.wholes) > 2:
            self.wholes.pop(self.random.randrange(len(self.wholes)))


class Failing(Base):
    """Operations that fail: on their worker, or here at once."""

    @operation(0.5)
    def index_out_of_range(self) -> None:
        """Poisons what it would have made, and what is computed of that."""
        a = self.any(places=self.world.forgiving)
        with self.where(a.place):
            index = torch.tensor([a.local.shape[0] + 3], device=REMOTE)
            remote = a.remote.index_select(0, index)
        self.say(a)
        self.keep(a.place, remote, a.local[:1].clone(), a).memory.poisoned = True

    @operation(0.3)
    def write_out_of_range(self) -> None:
        """Poisons what it would have written, with all of its memory."""
        a = self.any(places=self.world.forgiving)
        if a.local.dim() == 1:
            with self.where(a.place):
                index = torch.tensor([a.local.shape[0] + 3], device=REMOTE)
                a.remote.index_fill_(0, index, 1)
            self.say(a)
            a.memory.poisoned = True

    @operation(0.3)
    def check_fails(self) -> None:
        """Poisons what was made together with what was checked, which itself stays as it is."""
        place, singular = self.place(), self.chance(0.7)
        local = torch.eye(3, dtype=torch.float32) * (0 if singular else 1)
        with self.where(place):
            remote, info = torch.linalg.inv_ex(local.to(REMOTE))
        view = remote.t() if self.chance(0.3) else None
        # A check on another stream comes before whoever reads what it checks.
        with self.where(place):
            torch._linalg_check_errors(info, "linalg.inv", is_matrix=True)
        inverse, expected = torch.linalg.inv_ex(local)
        value = self.keep(place, remote, inverse)
        value.memory.poisoned = singular
        if view is not None:
            self.keep(place, view, inverse.t(), view_of=value)
        self.wanted.append(Wanted(f"what {value} was checked by", info.cpu, expected, False))

    @operation(0.3)
    def operands_apart(self) -> None:
        """Refused here: nothing is changed."""
        a = self.any()
        elsewhere = [place for place in self.world.places if place != a.place]
        b = self.like(a, self.random.choice(elsewhere)) if elsewhere and a.local.numel() > 1 else None
        if b is not None and b.local.dim():
            self._refused(dr.errors.PlacementError, lambda: a.remote.add_(b.remote))

    @operation(0.3)
    def shapes_apart(self) -> None:
        a = self.any()
        with self.where(a.place):
            other = torch.zeros(
                a.local.shape[-1] + 1 if a.local.shape[-1] > 1 else 0, dtype=a.local.dtype, device=REMOTE
            )
            if a.local.shape[-1] > 1:
                self._refused(RuntimeError, lambda: a.remote.add_(other))

    def _refused(self, kind: type[Exception], act: Callable[[], object]) -> None:
        try:
            act()
        except kind:
            return
        self.differs(f"{kind.__name__} was expected, and nothing was raised")


class Drawing(Base):
    """Random numbers: a node's CPU draws what this process's CPU would draw. Simulated GPUs share it."""

    @operation(0.4)
    def draw(self) -> None:
        seed = self.random.randrange(1 << 40)
        made: list[tuple[dr.types.Place, Any, torch.Tensor]] = []
        generators = [torch.Generator().manual_seed(seed) for _ in range(self.world.nodes)]
        kinds: list[Callable[..., Any]] = [
            lambda **o: torch.rand(LENGTH, **o),
            lambda **o: torch.randn(20, **o),
            lambda **o: torch.randint(0, 1000, (LENGTH,), **o),
            lambda **o: torch.randperm(LENGTH, **o),
        ]
        with self.world.seed:
            torch.manual_seed(seed)
            for _ in range(self.random.randrange(1, 4)):
                place, kind = self.random.choice(self.world.forgiving), self.random.choice(kinds)
                with self.where(place):
                    remote = kind(device=self.device(place))
                made.append((place, remote, kind(generator=generators[place.node])))
            # A thread that seeds next must not come before these draws: they are in the order of the program
            # on each node.
        for place, remote, local in made:
            self.keep(place, remote, local)


class Defaulting(Base):
    """What depends on torch's default dtype, which is the whole process's: factories, and integers that
    become fractions. Each is read later, under any other default.
    """

    KINDS: dict[str, Callable[[Any, Any], Any]] = {  # noqa: RUF012 - a table
        "zeros": lambda x, device: torch.zeros(LENGTH, device=device),
        "arange": lambda x, device: torch.arange(0.0, 9.0, device=device),
        "full": lambda x, device: torch.full((LENGTH,), 2.5, device=device),
        "quarters": lambda x, device: x / 4,
        "times 2.5": lambda x, device: x * 2.5 + 1,
        "root": lambda x, device: (x % 1000).sqrt() / 3,
        "where": lambda x, device: torch.where(x > 0, x, 0.5),
    }

    @operation(0.5)
    def default_dtype(self) -> None:
        a = self.any(dtype=torch.int64)
        name, kind = self.random.choice(list(self.KINDS.items()))
        default = self.random.choice((torch.float64, torch.bfloat16, torch.float16, torch.float32))
        self.say(name, a, default)
        with self.where(a.place), self.world.seed:
            torch.set_default_dtype(default)
            try:
                made = [(kind(x, d), kind(y, "cpu")) for x, y, d in [(a.remote, a.local, REMOTE)] * 2]
            finally:
                torch.set_default_dtype(torch.float32)
        for remote, local in made:
            poisoned = a.memory.poisoned and name not in ("zeros", "arange", "full")
            self.wanted.append(Wanted(f"{name} of {a} under {default}", remote.cpu, local, poisoned))


class Determined(Base):
    """torch's switch for deterministic algorithms, which is the whole process's and every worker's."""

    @operation(0.2)
    def deterministic(self) -> None:
        if self.world.shared:
            return
        a, place = self.any(dtype=torch.int64), self.place()
        with self.world.seed:
            torch.use_deterministic_algorithms(True)
            try:
                with self.where(place):
                    filled = torch.empty(LENGTH, dtype=torch.float32, device=REMOTE)
                nan = torch.empty(LENGTH, dtype=torch.float32)
                self.write(a, lambda x: x.index_fill_(0, torch.tensor([0], device=x.device), 7))
                a.local.index_fill_(0, torch.tensor([0]), 7)
            finally:
                torch.use_deterministic_algorithms(False)
        self.wanted.append(Wanted(f"new memory on {place}", filled.cpu, nan, False))


class Deriving(Base):
    """Gradients, also through a copy between nodes and a collective."""

    @operation(0.5)
    def gradient(self) -> None:
        a = self.any(dtype=torch.float32, healthy=True)
        b, to, k = self.like(a, a.place), self.place(), float(self.random.randrange(1, 9))
        if b.memory.poisoned:
            return
        self.say(a, b, to)
        with self.where(a.place):
            x, y = (v.remote.detach().clone().requires_grad_() for v in (a, b))
            moved = (x * y + x.abs()).to(to)
            (moved * k).sum().backward()
        p, q = (v.local.detach().clone().requires_grad_() for v in (a, b))
        ((p * q + p.abs()) * k).sum().backward()
        assert p.grad is not None and q.grad is not None
        self.keep(a.place, x.grad, p.grad)
        self.keep(a.place, y.grad, q.grad)

    @operation(0.2)
    def gradient_of_a_sum(self) -> None:
        group = self.world.groups[0]
        members = [self.any(group.places[0], torch.float32, healthy=True)]
        members += [self.like(members[0], place) for place in group.places[1:]]
        # Sums of more depend on their order.
        if any(m.memory.poisoned for m in members) or len(members) > 2:
            return
        leaves = [m.remote.detach().clone().requires_grad_() for m in members]
        sums = dr.functional.all_reduce([x * x for x in leaves], group=group)
        for total, k in zip(sums, (3.0, 5.0)):
            ones = torch.ones(members[0].local.shape, dtype=torch.float32, device=total.device)
            total.backward(ones * k, retain_graph=True)
        # Each backward pass is a collective; gradients add up: 2 * x * 3, and then 2 * x * 5.
        for m, leaf in zip(members, leaves):
            twin = m.local.detach().clone().requires_grad_()
            for k in (3.0, 5.0):
                (twin * twin).backward(torch.full(twin.shape, k, dtype=torch.float32))
            assert twin.grad is not None
            self.keep(m.place, leaf.grad, twin.grad)

    @operation(0.3)
    def pipelined(self) -> None:
        """A step of a pipeline over some places, on streams of theirs."""
        places = self.random.sample(
            self.world.places, self.random.randrange(1, min(4, len(self.world.places)) + 1)
        )
        schedule = self.random.choice(("1F1B", "GPipe", "InterleavedZeroBubble", "LoopedBFS"))
        found = self._step_of_a_pipeline(places, schedule, [self.where(place) for place in places])
        for place, (gradient, twin) in zip(places, found):
            self.keep(place, gradient, twin)

    @operation(0.2)
    def pipelined_over_meshes(self) -> None:
        """A step of a pipeline over meshes of as many members, on streams of theirs."""
        first = self.random.randrange(len(self.world.meshes))
        size = len(self.world.meshes[first].places)
        alike = [k for k, mesh in enumerate(self.world.meshes) if len(mesh.places) == size]
        numbers = [first, *(self.random.choice(alike) for _ in range(self.random.randrange(3)))]
        meshes = [self.world.meshes[number].device for number in numbers]
        schedule = self.random.choice(("1F1B", "GPipe"))
        found = self._step_of_a_pipeline(meshes, schedule, [self.where_mesh(number) for number in numbers])
        for number, (gradient, twin) in zip(numbers, found):
            self.keep_whole(
                number, gradient, [twin.clone() for _ in range(size)], [Memory() for _ in range(size)]
            )

    def _step_of_a_pipeline(
        self, homes: Sequence[Any], schedule: str, streams: Sequence[AbstractContextManager[object]]
    ) -> list[tuple[Any, torch.Tensor]]:
        """Return the stages' gradients, and their twins. They are sums of small whole numbers, and exact."""
        parts = self.random.randrange(len(homes), 5)

        def small(rows: int) -> torch.Tensor:
            return torch.tensor(
                [[float(self.random.randrange(-3, 4)) for _ in range(3)] for _ in range(rows)],
                dtype=torch.float32,
            )

        weights, x, y = [small(1) for _ in homes], small(2 * parts), small(2 * parts)
        self.say(schedule, parts, *homes)
        twins, stages = [Times(w.clone()) for w in weights], [Times(w.clone()) for w in weights]
        (torch.nn.Sequential(*twins)(x) * y).sum().backward()
        pipe = dr.parallel.pipeline(
            [stage.to(home) for stage, home in zip(stages, homes)],
            parts,
            schedule,
            lambda output, target: (output * target).sum(),
            scale_grads=False,
        )
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(stream)
            pipe.step(x, target=y, return_outputs=False)
        found = []
        for stage, twin in zip(stages, twins):
            assert twin.weight.grad is not None
            found.append((stage.weight.grad, twin.weight.grad))
        return found

    @operation(0.4)
    def gradient_through_members(self) -> None:
        """A mesh's tensor and its members are one history, as a tensor and its rows are."""
        number = self.random.randrange(len(self.world.meshes))
        mesh = self.world.meshes[number]
        count, choose = len(mesh.places), self.random
        leaves = [self.numbers((5,), torch.float32) / 256 for _ in mesh.places]
        factors = [self.numbers((5,), torch.float32) / 256 for _ in mesh.places]
        with self.where_mesh(number):
            whole = dr.from_shards(leaves, mesh).requires_grad_()
        weights = [w.to(place).requires_grad_() for w, place in zip(factors, mesh.places)]
        stack = torch.stack(leaves).requires_grad_()
        twins = [w.clone().requires_grad_() for w in factors]
        steps = [(choose.randrange(6), choose.randrange(count)) for _ in range(choose.randrange(1, 7))]
        self.say(f"mesh {number}", *steps)

        def run(x: Any, member: Callable[[Any, int], Any], w: Sequence[Any]) -> Any:
            x = x * 1
            kept = member(x, 0)
            for step, k in steps:
                if step == 0:
                    member(x, k).mul_(w[k])
                elif step == 1:
                    member(x, k)[1:].add_(w[k][1:])
                elif step == 2:
                    x.mul_(2)
                elif step == 3:
                    kept[::2].sub_(w[0][::2])
                elif step == 4:
                    member(x, k).copy_(w[k] * 3)
                else:
                    with torch.no_grad():
                        member(x, k).detach().clone().zero_()
            return x * 1.5

        with self.where_mesh(number):
            run(whole, lambda x, k: x.member(k), weights).sum().backward()
        run(stack, lambda x, k: x[k], twins).sum().backward()
        assert whole.grad is not None and stack.grad is not None
        for k, place in enumerate(mesh.places):
            self.keep(place, whole.grad.member(k) + 0, stack.grad[k] + 0)
            if twins[k].grad is not None:
                self.keep(place, weights[k].grad, twins[k].grad)  # type: ignore[arg-type]


def _three(x: Any, y: Any) -> tuple[Any, ...]:
    return x * 3 - y, (x + y).flip(0), torch.where(x > y, x, y)


def _writes(x: Any, y: Any) -> Any:
    x.add_(y)
    x[2:5].mul_(3)
    return x * 2


def _looks(x: Any, y: Any) -> tuple[Any, ...]:
    return x[3:7], x.view(3, 4), x + y


def _derived(x: Any, y: Any) -> Any:
    return x * y + x.abs()


class Compiling(Base):
    """Functions that `torch.compile` has made graphs of: each is one instruction, on any stream.

    Dynamo refuses a graph if another thread has changed torch's default dtype while it was made.
    """

    def _graph(self, function: Callable[..., Any], *values: Value) -> Callable[..., Any]:
        """Return a function that is compiled for such values. There are few kinds, as each takes a while."""
        x = values[0]
        strides = [value.local.stride() for value in values]
        key = (function, x.place, x.local.dtype, *strides, values[0] is values[-1])
        # Two threads that name a backend for the first time register it twice, which torch refuses (2.13).
        with self.world.compiling:
            if key not in self.world.compiled:
                # Dynamo counts how often it compiles one code.
                code = function.__code__.replace(co_name=f"{function.__name__}_{len(self.world.compiled)}")
                again = types.FunctionType(code, function.__globals__)
                self.world.compiled[key] = torch.compile(again, backend="distruntime", dynamic=False)
            return self.world.compiled[key]

    def _pair(self, apart: bool, dtype: torch.dtype | None = None) -> tuple[Value, Value]:
        """Pick two plain values of a place, of one size, which share no memory if they are to be `apart`."""
        place, dtype = self.place(), dtype or self.random.choice((torch.int64, torch.float32))

        def pick(taken: Collection[Memory]) -> Value:
            good = [
                value
                for value in self.values
                if (value.place, value.local.dtype, value.local.shape) == (place, dtype, (LENGTH,))
                and value.memory not in taken
                and value.local.is_contiguous()
                and type(value.remote) is DistributedTensor
            ]
            return self.random.choice(good) if good else self.new(place, (LENGTH,), dtype)

        first = pick(())
        second = pick([first.memory] if apart else ())
        self.say(first, second)
        return first, second

    @operation(0.5)
    def graph(self) -> None:
        a, b = self._pair(apart=False)
        call = self._graph(_three, a, b)
        with self.where(a.place), self.world.seed:
            found = call(a.remote, b.remote)
        for remote, local in zip(found, _three(a.local, b.local)):
            self.keep(a.place, remote, local, a, b)

    @operation(0.5)
    def graph_that_writes(self) -> None:
        a, b = self._pair(apart=True)
        call = self._graph(_writes, a, b)
        with self.where(a.place), self.world.seed:
            remote = call(a.remote, b.remote)
        local = _writes(a.local, b.local)
        self.written(a, b)
        self.keep(a.place, remote, local, a, b)

    @operation(0.5)
    def graph_of_views(self) -> None:
        """It returns views of what it is given, and these are written later."""
        a, b = self._pair(apart=True)
        call = self._graph(_looks, a, b)
        with self.where(a.place), self.world.seed:
            found = call(a.remote, b.remote)
        *views, total = zip(found, _looks(a.local, b.local))
        for remote, local in views:
            self.keep(a.place, remote, local, view_of=a)
        self.keep(a.place, *total, a, b)

    @operation(0.4)
    def gradient_of_a_graph(self) -> None:
        """Its backward graph may run on another stream, behind what else has become of the values."""
        a, b = self._pair(apart=False, dtype=torch.float32)
        call, k = self._graph(_derived, a, b), float(self.random.randrange(1, 9))
        if a.memory.poisoned or b.memory.poisoned:
            return
        with self.where(a.place):
            x, y = (v.remote.detach().clone().requires_grad_() for v in (a, b))
            with self.world.seed:
                out = call(x, y)
        self.write(a, lambda t: t.add_(1))
        # A compiled backward raises where deterministic algorithms were off in its forward and are on now.
        with self.where(a.place), self.world.seed:
            (out * k).sum().backward()
        p, q = (v.local.detach().clone().requires_grad_() for v in (a, b))
        a.local.add_(1)
        result = _derived(p, q)
        (result * k).sum().backward()
        assert p.grad is not None and q.grad is not None
        self.keep(a.place, x.grad, p.grad)
        self.keep(a.place, y.grad, q.grad)
        self.keep(a.place, out.detach(), result.detach())


class Times(torch.nn.Module):
    """A stage of a pipeline: it multiplies."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + x


def _scaled(x: torch.Tensor, y: torch.Tensor, k: int = 3) -> torch.Tensor:
    return x * k + y


def _both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x - y, {"sum": x + y}


def _add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def _tail(x: torch.Tensor) -> torch.Tensor:
    return x[1:]


def _within(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = (x * 3).reshape(-1)
    return whole, whole[1:]


def _fails(x: torch.Tensor) -> torch.Tensor:
    raise IndexError("this function always fails")


def _items(x: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for k in range(count):
        yield x + k


async def _gathered(items: AsyncIterable[Any]) -> list[Any]:
    return [item async for item in items]


def _until_cancelled(x: torch.Tensor) -> torch.Tensor:
    while True:
        time.sleep(0.001)


class Pair(NamedTuple):
    first: torch.Tensor
    other: dict[str, torch.Tensor]


def _paired(x: torch.Tensor, y: torch.Tensor) -> Pair:
    return Pair(x + y, {"difference": x - y})


def _ranks(x: torch.Tensor, k: int) -> Any:
    """Run on a member: the sum of all, and the member's own."""
    total = x.clone()
    torch.distributed.all_reduce(total)
    x.add_(k)
    return Pair(total, {"own": x * (torch.distributed.get_rank() + 1)})


def _fails_on_one(x: torch.Tensor) -> torch.Tensor:
    if torch.distributed.get_rank() == 1:
        raise IndexError("this rank always fails")
    return x


class Total:
    """An object with a state: what has been added to it."""

    def __init__(self, start: torch.Tensor) -> None:
        self.total, self.count = start.clone(), 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x
        self.count += 1
        return self.total * 2

    def double(self) -> None:
        self.total.mul_(2)


class Keeper:
    """An object that keeps what it is given, hands it out, and writes it."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def keep(self, x: torch.Tensor) -> None:
        self.held = x

    def keep_and_return(self, x: torch.Tensor) -> torch.Tensor:
        self.held = x
        return x

    def share(self, other: Keeper) -> None:
        self.held = other.held

    def give(self) -> torch.Tensor:
        return self.held

    def part(self) -> torch.Tensor:
        return self.held[2:]

    def copied(self) -> torch.Tensor:
        return self.held * 3

    def add(self, k: int) -> None:
        self.held.add_(k)

    def add_and_give(self, x: torch.Tensor) -> torch.Tensor:
        self.held.add_(x)
        return self.held

    def itself(self) -> Keeper:
        return self


def _add_held(x: torch.Tensor, keeper: Keeper) -> torch.Tensor:
    x.sub_(keeper.held)
    return x


def _wrapped(keeper: Keeper) -> dict[str, Keeper]:
    return {"keeper": keeper}


# The functions are made once, so that what is known of their results meets other programs' operands.
_remote = {fn: dr.remote(fn) for fn in (_scaled, _both, _tail, _within, _items, _paired)}
_total = dr.remote(Total)
_keeper = dr.remote(Keeper)
_give, _add_of, _wrap = dr.remote(Keeper.give), dr.remote(_add_held), dr.remote(_wrapped)


def _weighted(x: torch.Tensor, others: list[torch.Tensor], k: int) -> torch.Tensor:
    for other in others:
        x = x * k + other
    return x


def _into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


_define = torch.library.custom_op
_told = _define("random_programs::told", _weighted, mutates_args=())
_told.register_fake(lambda x, others, k: torch.empty_like(x))
_untold = _define("random_programs::untold", _weighted, mutates_args=())
_operator_into = _define("random_programs::into", _into, mutates_args=("x",))


class Calling(Base):
    """Functions and objects of the user's own."""

    def with_object(self, place: dr.types.Place) -> AbstractContextManager[object]:
        """Return a context for a call of an object.

        On a GPU an object that is called on several streams has to tell torch's allocator so itself.
        """
        return dr.on(place) if self.world.real else self.where(place)

    @operation(2)
    def call_a_function(self) -> None:
        returns = self.random.choice((None, "like", "fake", "ask"))
        a = self.any(healthy=returns in (None, "ask"))
        b = self.like(a, a.place)
        if b.memory.poisoned and returns in (None, "ask"):
            return
        k = self.random.randrange(1, 9)
        function = _remote[_scaled]
        if returns is not None:
            function = function.options(returns=torch.empty_like(a.local) if returns == "like" else returns)
        self.say(a, b, k, "returns", returns)
        with self.where(a.place):
            remote: Any = function(a.remote, b.remote, k=k)
        local = _scaled(a.local, b.local, k)
        self.keep(a.place, remote, local, a, b)

    @operation(1)
    def call_for_two(self) -> None:
        a = self.any(healthy=True)
        b = self.like(a, a.place)
        if b.memory.poisoned:
            return
        self.say(a, b)
        with self.where(a.place):
            remote: Any = _remote[_both](a.remote, b.remote)
        one, two = _both(a.local, b.local)
        self.keep(a.place, remote[0], one)
        self.keep(a.place, remote[1]["sum"], two["sum"])

    @operation(1)
    def call_for_two_in_one_memory(self) -> None:
        a = self.any(healthy=True)
        # Other operations suppose that a value has elements.
        if a.local.numel() < 2:
            return
        self.say(a)
        with self.where(a.place):
            remote: Any = _remote[_within](a.remote)
        one, two = _within(a.local)
        whole = self.keep(a.place, remote[0], one)
        part = self.keep(a.place, remote[1], two, view_of=whole)
        self.write(part, lambda t: t.add_(1))
        part.local.add_(1)
        if remote[0]._version != remote[1]._version:
            self.differs(f"{whole} and {part} count their writes apart")

    @operation(1.5)
    def call_that_writes(self) -> None:
        a = self.any()
        b = self.like(a, a.place, apart=[a.memory])
        told = self.chance(0.5)
        self.say(b, "into", a, "told" if told else "")
        writes = dr.remote(_add_into, writes=0 if told else None, returns=object)
        with self.where(a.place):
            writes(a.remote, b.remote)
        if not a.memory.poisoned and not b.memory.poisoned:
            _add_into(a.local, b.local)
        elif told:
            a.memory.poisoned = True

    @operation(1)
    def call_of_an_operator(self) -> None:
        """An operator that this program defines, with metadata or without."""
        a, told = self.any(healthy=True), self.chance(0.5)
        b, operator = self.like(a, a.place, apart=[a.memory]), _told if told else _untold
        if b.memory.poisoned:
            return
        self.say(a, "and", b, "told" if told else "")
        with self.where(a.place):
            remote = operator(a.remote, [b.remote, a.remote], 3)
            _operator_into(b.remote, a.remote)
        self.keep(a.place, remote, operator(a.local, [b.local, a.local], 3))
        _operator_into(b.local, a.local)

    @operation(1)
    def call_for_a_view(self) -> None:
        a = self.any(healthy=True)
        if a.local.shape[0] > 1:
            self.say("of", a)
            with self.where(a.place):
                remote: Any = _remote[_tail](a.remote)
            self.keep(a.place, remote, _tail(a.local), view_of=a)

    @operation(0.7)
    def call_for_a_named_tuple(self) -> None:
        a = self.any(healthy=True)
        b = self.like(a, a.place)
        if b.memory.poisoned:
            return
        self.say(a, b)
        with self.where(a.place):
            remote: Any = _remote[_paired](a.remote, b.remote)
        local = _paired(a.local, b.local)
        if type(remote) is not Pair:
            return self.differs(f"a Pair came as a {type(remote).__name__}")
        self.keep(a.place, remote.first, local.first)
        self.keep(a.place, remote.other["difference"], local.other["difference"])

    @operation(0.3)
    def call_that_is_cancelled(self) -> None:
        """It waits until then, wherever it stands: before it begins, or in its body."""
        a = self.any()
        self.say(a)
        with self.where(a.place):
            like = a.local.clone()
            remote: Any = dr.remote(_until_cancelled, returns=like, writes=(), random=False)(a.remote)
            after = remote + 1 if self.chance(0.5) else remote
        if self.chance(0.5):
            self.any(a.place, healthy=True).remote.sum()
        dr.cancel(remote)
        self.keep(a.place, after, a.local.clone(), a).memory.poisoned = True

    @operation(0.4)
    def call_that_fails(self) -> None:
        a = self.any()
        self.say(a)
        with self.where(a.place):
            like = a.local.clone()
            remote: Any = dr.remote(_fails, returns=like)(a.remote)
        self.keep(a.place, remote, like, a).memory.poisoned = True

    @operation(0.5)
    def iterate(self) -> None:
        a, count = self.any(healthy=True), self.random.randrange(4)
        self.say(a, count)
        with self.with_object(a.place):
            items: Any = _remote[_items](a.remote, count)
            if self.random.random() < 0.5:
                items = asyncio.run(_gathered(items))
            for remote, local in zip(items, _items(a.local.clone(), count), strict=True):
                self.keep(a.place, remote, local)

    @operation(0.7)
    def object_new(self) -> None:
        a = self.any(healthy=True)
        self.say(a)
        with self.with_object(a.place):
            self.objects.append(Kept(a.place, _total(a.remote), Total(a.local)))

    @operation(1.5)
    def object_add(self) -> None:
        if not self.objects:
            return
        kept = self.random.choice(self.objects)
        shaped = Value("total", kept.place, None, kept.local.total, Memory())
        a = self.like(shaped, kept.place)
        if a.memory.poisoned:
            return
        self.say(a)
        with self.with_object(kept.place):
            remote: Any = kept.remote.add(a.remote)
        self.keep(kept.place, remote, kept.local.add(a.local))

    @operation(1)
    def object_take(self) -> None:
        """A tensor that an object holds is the object's: a write through the one is seen by the other."""
        if not self.objects:
            return
        kept, k = self.random.choice(self.objects), self.random.randrange(1, 9)
        self.say(k)
        with self.with_object(kept.place):
            total: Any = kept.remote.total
            total.add_(k)
            kept.remote.double()
            remote = total.clone()
        kept.local.total.add_(k)
        kept.local.double()
        self.keep(kept.place, remote, kept.local.total.clone())

    @operation(0.5)
    def object_count(self) -> None:
        if self.objects:
            kept = self.random.choice(self.objects)
            with self.with_object(kept.place):
                count: Any = kept.remote.count
            if dr.fetch(count, timeout=PATIENCE) != kept.local.count:
                self.differs(f"an object has counted {count}, expected {kept.local.count}")

    @operation(0.5)
    def gradient_of_a_call(self) -> None:
        a = self.any(dtype=torch.float32, healthy=True)
        b = self.like(a, a.place)
        if b.memory.poisoned:
            return
        self.say(a, b)
        with self.where(a.place):
            x, y = (v.remote.detach().clone().requires_grad_() for v in (a, b))
            made: Any = _remote[_scaled](x * y, y)
            made.backward(x.detach())
        p, q = (v.local.detach().clone().requires_grad_() for v in (a, b))
        _scaled(p * q, q).backward(p.detach())
        assert p.grad is not None and q.grad is not None
        self.keep(a.place, x.grad, p.grad)
        self.keep(a.place, y.grad, q.grad)

    @operation(0.3)
    def call_on_a_mesh(self) -> None:
        w = self.random.choice(self.wholes) if self.wholes else None
        if w is None or any(memory.poisoned for memory in w.memories):
            return
        self.say(w)
        with self.where_mesh(w.mesh):
            remote: Any = _remote[_scaled](w.remote, w.remote)
        locals_ = [_scaled(local, local) for local in w.locals]
        self.keep_whole(w.mesh, remote, locals_, [Memory() for _ in locals_])


class Lending(Calling):
    """Objects that keep memory of the program's values, and hand it out."""

    def keepable(self, place: dr.types.Place) -> Value:
        """Pick a value that a keeper may keep: all are alike, so that what is known of results holds."""
        found = self.like(Value("", place, None, torch.zeros(LENGTH, dtype=torch.int64), Memory()), place)
        good = not found.memory.poisoned and type(found.remote) is DistributedTensor
        return found if good else self.new(place, (LENGTH,), torch.int64)

    def keeper(self) -> Keeping | None:
        """Pick an object whose memory is healthy."""
        self.keepers = [one for one in self.keepers if not one.memory.poisoned]
        return self.random.choice(self.keepers) if self.keepers else None

    def slowly(self, place: dr.types.Place) -> None:
        """Delay what comes next on the current stream."""
        if self.chance(0.4):
            torch.ones(300, 300, dtype=torch.float32, device=REMOTE).matmul(
                torch.ones(300, 300, dtype=torch.float32, device=REMOTE)
            )

    @operation(1.5)
    def keeper_new(self) -> None:
        a = self.keepable(self.place())
        self.say(a)
        with self.with_object(a.place):
            self.keepers.append(Keeping(a.place, _keeper(a.remote), Keeper(a.local), a.memory))

    @operation(1.5)
    def keeper_keeps(self) -> None:
        if (kept := self.keeper()) is None:
            return
        a, returned = self.keepable(kept.place), self.chance(0.5)
        self.say(a, returned)
        with self.with_object(kept.place):
            self.slowly(kept.place)
            remote = kept.remote.keep_and_return(a.remote) if returned else kept.remote.keep(a.remote)
        kept.local.keep(a.local)
        kept.memory = a.memory
        if returned:
            self.keep(kept.place, remote, a.local, view_of=a)

    @operation(1)
    def keepers_share(self) -> None:
        if (kept := self.keeper()) is not None:
            others = [one for one in self.keepers if one.place == kept.place]
            other = self.random.choice(others)
            with self.with_object(kept.place):
                self.slowly(kept.place)
                kept.remote.share(other.remote)
            kept.local.share(other.local)
            kept.memory = other.memory

    @operation(2)
    def keeper_gives(self) -> None:
        """What it gives is the memory that it holds; a declared result is a copy."""
        if (kept := self.keeper()) is None:
            return
        form = self.random.choice(("give", "part", "held", "declared", "copied"))
        self.say(form)
        local = kept.local.held
        with self.with_object(kept.place):
            self.slowly(kept.place)
            if form == "declared":
                remote: Any = _give.options(returns=torch.empty(LENGTH, dtype=torch.int64))(kept.remote)
            else:
                remote = kept.remote.held if form == "held" else getattr(kept.remote, form)()
        if form in ("declared", "copied"):
            self.keep(kept.place, remote, local.clone() if form == "declared" else local * 3)
        else:
            kept.memory.lent = True
            shared = Value("", kept.place, None, local, kept.memory)
            self.keep(kept.place, remote, local[2:] if form == "part" else local, view_of=shared)

    @operation(4)
    def keeper_writes(self) -> None:
        if (kept := self.keeper()) is None:
            return
        k, form = self.random.randrange(1, 9), self.random.randrange(4)
        a = self.keepable(kept.place)
        self.say(form, k, a)
        with self.with_object(kept.place):
            self.slowly(kept.place)
            if form == 0:
                kept.remote.add(k)
            elif form == 1:
                kept.remote.itself().add(k)
            elif form == 2:
                _wrap(kept.remote)["keeper"].add(k)
            else:
                # Nobody has a proxy of what it gives, once its sum is on the way.
                total = kept.remote.add_and_give(a.remote).sum(0, keepdim=True)
        if form < 3:
            kept.local.add(k)
        else:
            self.keep(kept.place, total, kept.local.add_and_give(a.local).sum(0, keepdim=True))

    @operation(1)
    def keeper_is_read_by_a_function(self) -> None:
        if (kept := self.keeper()) is None:
            return
        a = self.keepable(kept.place)
        self.say(a)
        with self.with_object(kept.place):
            self.slowly(kept.place)
            remote: Any = _add_of(a.remote, kept.remote)
        self.keep(kept.place, remote, _add_held(a.local, kept.local), view_of=a)


class Ranks(Base):
    """Functions of `dr.spmd` on the mesh of all nodes' CPUs, whose members' processes all programs share."""

    def shards(self) -> Whole | None:
        """Return a tensor of that mesh without failures; None where there is none."""
        found = [
            w
            for w in self.wholes
            if w.mesh == 0 and w.locals[0].dtype == torch.int64 and not any(m.poisoned for m in w.memories)
        ]
        return self.random.choice(found) if found else None

    @operation(0.3)
    def call_of_ranks(self) -> None:
        w, k = self.shards(), self.random.randrange(1, 9)
        if w is None:
            return
        self.say(w, k)
        with self.where_mesh(0):
            remote: Any = self.world.ranks(w.remote, k)
        total = torch.stack(w.locals).sum(0)
        for local in w.locals:
            local.add_(k)
        own = [local * (rank + 1) for rank, local in enumerate(w.locals)]
        self.keep_whole(0, remote.first, [total.clone() for _ in own], [Memory() for _ in own])
        self.keep_whole(0, remote.other["own"], own, [Memory() for _ in own])

    @operation(0.05)
    def call_of_ranks_that_fails(self) -> None:
        w = self.shards()
        # What fails has the shape that was promised.
        if w is None or w.locals[0].shape != (5,):
            return
        self.say(w)
        with self.where_mesh(0):
            remote: Any = self.world.failing_ranks(w.remote)
        locals_ = [local.clone() for local in w.locals]
        self.keep_whole(0, remote, locals_, [Memory(True) for _ in locals_])


class Stored(Base):
    """Data and weights that lie at a worker."""

    @operation(0.4)
    def batches(self) -> None:
        """A data loader's batches, all of them or the first few."""
        place, count, size = self.place(), self.random.randrange(1, 7), self.random.randrange(1, 4)
        rows = self.numbers((count, 3))
        self.say(place, count, "by", size)
        with self.where(place):
            loader = dr.data.data_loader(
                list(rows), node=place, batch_size=size, ahead=self.random.randrange(3)
            )
            most = self.random.choice((1, count))
            for remote, local in zip(loader, torch.utils.data.DataLoader(list(rows), batch_size=size)):
                self.keep(place, remote, local)
                if (most := most - 1) == 0:
                    break
            loader.close()

    @operation(0.3)
    def weights_of_a_file(self) -> None:
        place = self.place()
        named = {"a": self.numbers((4, 3), torch.float32), "b": self.numbers((3,))}
        path = self.world.folder / f"{threading.get_ident()}.safetensors"
        save_file(named, path)
        with self.where(place):
            loaded = dr.load(path, node=place)
        # Its tensors are pages of the file, which the next one must not write into.
        path.unlink()
        for name, local in named.items():
            self.keep(place, loaded[name], local.clone())


class Living(Base):
    """What ends values' lives, looks at the session, and keeps values in files."""

    @operation(4)
    def free(self) -> None:
        if len(self.values) > 3:
            self.say(self.values.pop(self.random.randrange(len(self.values))))

    @operation(0.1)
    def free_everything(self) -> None:
        self.values.clear()
        self.wholes.clear()
        self.events.clear()
        self.objects.clear()
        self.keepers.clear()

    @operation(0.1)
    def collect(self) -> None:
        gc.collect()

    @operation(0.2)
    def look(self) -> None:
        a = self.any()
        what = self.random.choice(("memory", "nodes", "repr", "str of a stream", "names"))
        self.say(what)
        if what == "memory":
            str(dr.memory())
        elif what == "nodes":
            str(dr.nodes())
        elif what == "repr":
            repr(a.remote)
        elif what == "names":
            str(dr.names())
        else:
            str(self.streams), str(self.events)

    @operation(0.1)
    def checkpoint(self) -> None:
        """Save some, go on, load: what comes back is what was saved."""
        chosen = [self.any(healthy=True) for _ in range(self.random.randrange(1, 4))]
        folder = self.world.folder / f"{threading.get_ident()}"
        saved = [value.local.clone() for value in chosen]
        self.say(*chosen)
        saving = dr.save([value.remote for value in chosen], folder, async_op=self.chance(0.5))
        self.write(chosen[0], lambda x: x.add_(1))
        chosen[0].local.add_(1)
        if saving is not None:
            saving.wait()
        for value, loaded, local in zip(chosen, dr.load(folder), saved):
            # One value that was chosen twice comes back tied.
            self.keep(value.place, loaded.clone(), local)


class Dropped:
    """It acts when it goes."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


class Striking(Base):
    """Other operations, while finalizers issue some of their own: at every so many calls of this thread."""

    @operation(0.6)
    def strike(self) -> None:
        place, local = self.place(), self.numbers((3,))
        with self.where(place):
            remote = local.to(self.device(place))
        among = (Elementwise, Copying, Calling)
        names = sorted({name for one in among for name in vars(one) if hasattr(getattr(one, name), "weight")})
        name, every = self.random.choice(names), self.random.choice((1, 3, 7, 20))
        calls = times = 0
        wrong: list[Exception] = []

        def add() -> None:
            nonlocal times
            # A finalizer's error would go to stderr, and nobody would know.
            try:
                remote.add_(1)
                times += 1
            except Exception as error:
                # While torch's C++ makes a tensor of a list, it calls no operator of Python's.
                if "func != nullptr INTERNAL ASSERT" not in str(error):
                    wrong.append(error)

        def look(frame: types.FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"
            # A log that is being sent would never be empty if each call of the sender's issued more.
            if event == "call" and calls % every == 0 and times < 100:
                Dropped(add)

        self.say("during", name, "at each call of", every)
        before = sys.getprofile()
        sys.setprofile(look)
        try:
            getattr(self, name)()
        finally:
            sys.setprofile(before)
        self.keep(place, remote, local + times)
        if wrong:
            self.differs(f"a finalizer raised {wrong[0]!r:.300}")


class Tracing(Base):
    """Traces of what all programs of the process do: a process has one at a time."""

    _trace: Any = None

    @operation(1)
    def begin_a_trace(self) -> None:
        if self._trace is None:
            trace = dr.trace(self.world.folder / f"{self.seed}-{id(self)}.json", quiet=True, most=20_000)
            try:
                trace.start()
            except dr.errors.UsageError as refused:
                assert "a trace is on already" in str(refused), refused
                return
            self._trace = trace

    @operation(1)
    def end_a_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
            if why := wrong_with(trace):
                self.differs(why)

    @operation(0.5)
    def look_at_memory(self) -> None:
        by = self.random.choice(("line", "module", "session"))
        found = dr.memory(by=by)
        if not repr(found).startswith(" node  device") or len(found.devices) < self.world.nodes:
            self.differs(f"dr.memory(by={by!r}) shows {found}")


class Watching(Base):
    """Optimizers with shares of their state, and the tools that look at a model: NaN, time, ranges."""

    _ranges = 0

    def small(self, shape: Sequence[int]) -> torch.Tensor:
        """Return small whole numbers: what few steps make of them is exact."""
        count = math.prod(shape)
        drawn = [float(self.random.randrange(-8, 9)) for _ in range(count)]
        return torch.tensor(drawn, dtype=torch.float32).reshape(tuple(shape))

    @operation(0.4)
    def steps_with_shares_of_the_state(self) -> None:
        number = self.random.randrange(len(self.world.meshes))
        mesh = self.world.meshes[number]
        shapes = self.random.choices(((5,), (1,), (3, 2), (LENGTH,)), k=self.random.randrange(1, 4))
        reduce = self.random.choice((None, "sum"))
        options = {"lr": 0.5, "momentum": self.random.choice((0.0, 0.5))}
        self.say(f"mesh {number}", reduce, options, *shapes)
        weights = [self.small(shape) for shape in shapes]
        twins = [weight.clone().requires_grad_() for weight in weights]
        with self.where_mesh(number):
            there = [
                dr.from_shards([weight.clone() for _ in mesh.places], mesh).requires_grad_()
                for weight in weights
            ]
            gradients = None if reduce is None else Partial(reduce)
            optimizer = InShares(there, torch.optim.SGD, mesh, gradients, **options)
        twin = torch.optim.SGD(twins, **options)
        for _ in range(self.random.randrange(1, 4)):
            for p, own in zip(there, twins):
                grads = [self.small(own.shape) for _ in mesh.places]
                if reduce is None:
                    grads = grads[:1] * len(grads)
                own.grad = torch.stack(grads).sum(0) if reduce == "sum" else grads[0].clone()
                with self.where_mesh(number):
                    p.grad = dr.from_shards([grad.clone() for grad in grads], mesh)
            with self.where_mesh(number):
                optimizer.step()
            twin.step()
        for p, own in zip(there, twins):
            copies = [own.detach().clone() for _ in mesh.places]
            self.keep_whole(number, p.detach(), copies, [Memory() for _ in copies])

    @operation(0.8)
    def begin_a_range(self) -> None:
        name = self.random.choice(("forward", "backward", f"step {self.random.randrange(9)}"))
        with self.where(self.place()):
            dr.nvtx.range_push(name)
        self._ranges += 1

    @operation(0.8)
    def end_a_range(self) -> None:
        if self._ranges:
            self._ranges -= 1
            if dr.nvtx.range_pop() != self._ranges:
                self.differs(f"range_pop was not at depth {self._ranges}")

    @operation(0.3)
    def name_a_moment(self) -> None:
        with self.where(self.place()):
            dr.nvtx.mark("now")

    def end_ranges(self) -> None:
        """End what this thread has open, whether the program went wrong or not."""
        while self._ranges:
            self.end_a_range()


def wrong_with(trace: Any) -> str:
    """Return what is wrong with a trace that is over, or nothing. Its file goes."""
    share = sum(cause.share for cause in dr.why_slow(trace).causes)
    trace.path.unlink()
    return "" if 0.95 < share < 1.05 else f"the causes of {trace} are {share:.3f} of it, expected 1"


class Program(
    Elementwise,
    Copying,
    Reading,
    Streaming,
    Together,
    Layering,
    OnMeshes,
    Failing,
    Drawing,
    Defaulting,
    Determined,
    Deriving,
    Compiling,
    Lending,
    Ranks,
    Stored,
    Living,
    Striking,
    Tracing,
    Watching,
):
    """One random program. `only` runs these of its operations and leaves out the others; after `run`, see
    `wrong`.
    """

    def run(self, only: Collection[int] | None = None, progress: Callable[[], None] = lambda: None) -> None:
        self.said.append("begin")
        weights = self.weights()
        for k in range(4):
            self.random = random.Random(self.seed * 1009 + 1_000_000 + k)
            self.new(self.world.places[k % len(self.world.places)])
        self.random = random.Random(self.seed * 1009)
        chosen = self.random.choices(list(weights), list(weights.values()), k=self.random.randrange(20, 70))
        try:
            for k, name in enumerate(chosen):
                if only is None or k in only:
                    self.random = random.Random(self.seed * 1009 + 1 + k)
                    self.chosen.append(name)
                    self.said.append(f"{k} {name}")
                    getattr(self, name)()
                    progress()
            self.said.append("end")
            self.finish()
        except Exception as error:
            last = "".join(traceback.format_exception(error, limit=-6))
            self.differs(f"raised {type(error).__name__}: {str(error)[:600]}\n{last}")
        finally:
            self.end_ranges()

    def weights(self) -> dict[str, float]:
        """Return this program's weight of each operation.

        Many lack some, or are about one subject, so that rare things meet.
        """
        subject = self.random.choice((None, None, *type(self).__bases__))
        subject = globals()[self.world.about] if self.world.about else subject
        quiet = self.random.choice((0.0, 0.0, 0.2, 0.5))
        weights = {}
        for name in dir(type(self)):
            about = (Elementwise, Reading, Streaming, globals().get(self.world.about, Program))
            if not any(hasattr(one, name) for one in about):
                continue
            if weight := float(getattr(getattr(type(self), name), "weight", 0)):
                liked = subject is not None and hasattr(subject, name)
                more = self.random.choice((1, 1, 1, 4)) * (5 if liked else 1)
                weights[name] = 0.0 if self.chance(quiet) else weight * more
        return weights

    def finish(self) -> None:
        """Read everything."""
        self.end_a_trace()
        for mail in self.mail:
            self._receive(*mail)
        for wanted in self.wanted:
            self.check(wanted)
        shards = [
            Value(
                f"member {k} of {whole}",
                self.world.meshes[whole.mesh].places[k],
                whole.remote.member(k),
                local,
                memory,
            )
            for whole in self.wholes
            for k, (local, memory) in enumerate(zip(whole.locals, whole.memories))
        ]
        healthy: list[Value] = []
        bad: list[Value] = []
        for value in (*self.values, *shards):
            (bad if value.memory.poisoned else healthy).append(value)
        for value, got in zip(healthy, dr.fetch([value.remote for value in healthy], timeout=PATIENCE)):
            self.read("the end", value, lambda got=got: got)  # type: ignore[misc]
        for value in bad:
            self.read("the end", value, lambda value=value: value.remote.cpu())  # type: ignore[misc]
        for value in self.values:
            if _steps(value.remote) != _steps(value.local):
                self.differs(
                    f"strides of {value} are {value.remote.stride()}, expected {value.local.stride()}"
                )
        for work in self.works:
            work.wait()
        for group in self.groups[len(self.world.groups) :]:
            group.close()


# -- many programs -------------------------------------------------------------------------------------------


class Publisher:
    """Publishes pairs of one version, on two nodes, until it is told to stop."""

    NAME = "pair"

    def __init__(self, world: World) -> None:
        self.world, self.count = world, 0
        self._end = threading.Event()

    def run(self) -> None:
        choose = random.Random(0)
        while not self.count or not self.stopped(0.01):
            self.count += 1
            k = self.count
            first = torch.full((50,), k, dtype=torch.int64).to(REMOTE)
            with dr.on(self.world.nodes - 1):
                second = torch.full((50,), 2 * k + 1, dtype=torch.int64).to(REMOTE)
            thing = {"first": first, "second": second, "k": k}
            dr.publish(self.NAME, copy.deepcopy(thing) if choose.random() < 0.5 else thing, shared=True)
            del first, second
            if k % 17 == 0:
                dr.unpublish(self.NAME)

    def stop(self) -> None:
        self._end.set()

    def stopped(self, seconds: float) -> bool:
        """Block for so many seconds, or until it is to stop; return whether it is."""
        return self._end.wait(seconds)


class Reader:
    """Looks a publisher's pairs up: each is of one version, none is older than one that was seen before, and
    a foreign one is read only.
    """

    def __init__(self, owner: str | None = None) -> None:
        self.name, self.foreign = (
            Publisher.NAME if owner is None else f"{owner}/{Publisher.NAME}",
            owner is not None,
        )
        self.found = self.missing = self.last = 0
        self.wrong: list[str] = []

    def look(self) -> None:
        """Look once."""
        try:
            pair = dr.lookup(self.name)
        except dr.errors.UsageError as error:
            if "nothing is published" not in str(error):
                raise
            self.missing += 1
            return
        self.found += 1
        k = pair["k"]
        first, second = dr.fetch([pair["first"], pair["second"]], timeout=PATIENCE)
        if k < self.last:
            self.wrong.append(f"version {k} was found after {self.last}")
        if not ((first == k).all() and (second == 2 * k + 1).all()):
            self.wrong.append(f"the pair {k} reads {first[:3].tolist()}, {second[:3].tolist()}")
        self.last = k
        if self.foreign:
            with suppress(dr.errors.UsageError):
                pair["first"].add_(1)
                self.wrong.append(f"the pair {k} could be written")

    def __str__(self) -> str:
        return f"{self.found} pairs found, {self.missing} times none, {len(self.wrong)} wrong"


@dataclass
class Run:
    """Runs programs in threads, until a time, a number of programs, or the first few that are wrong."""

    world: World
    seed: int
    threads: int = 2
    seconds: float = math.inf
    programs: int = 1 << 60
    publish: bool = False
    most_wrong: int = 5
    # The first thread's programs run under a trace, each under one of its own.
    traced: bool = False
    # After so many seconds without an operation, of any thread, `stuck` is set.
    patience: float = 120.0
    tally: Tally = field(default_factory=Tally)
    stuck: str = ""
    running: dict[int, Program] = field(default_factory=dict)
    # It is called every minute.
    report: Callable[[], None] = lambda: None

    def go(self) -> Tally:
        """Block until they are done, or one hangs."""
        self._end, self._moved = time.monotonic() + self.seconds, [time.monotonic()] * self.threads
        self._left = iter(range(self.programs))
        workers = [
            threading.Thread(target=self._work, args=(k,), name=f"programs-{k}", daemon=True)
            for k in range(self.threads)
        ]
        publisher = Publisher(self.world)
        beside = [
            threading.Thread(target=self._beside, args=(publisher.run,), name="publisher", daemon=True),
            threading.Thread(
                target=self._beside, args=(lambda: self._read(publisher),), name="reader", daemon=True
            ),
        ]
        for thread in [*workers, *beside] if self.publish else workers:
            thread.start()
        reported = time.monotonic()
        for thread in workers:
            while thread.is_alive() and not self.stuck:
                thread.join(0.5)
                self._watch(workers)
                if time.monotonic() - reported > REPORT:
                    reported = time.monotonic()
                    self.report()
        publisher.stop()
        if not self.stuck and self.publish:
            for thread in beside:
                thread.join(self.patience)
            # The next run in this session would find it, newer than what its own publisher begins with.
            with suppress(dr.errors.UsageError):
                dr.unpublish(Publisher.NAME)
            self.tally.add(published=publisher.count)
        return self.tally

    def _watch(self, workers: list[threading.Thread]) -> None:
        for k, thread in enumerate(workers):
            if thread.is_alive() and time.monotonic() - self._moved[k] > self.patience:
                programs = "\n".join(
                    f"thread {n}, seed {p.seed}:\n    " + "\n    ".join(p.said[-8:])
                    for n, p in self.running.items()
                )
                self.stuck = f"thread {k} has done nothing for {self.patience:g} s\n{programs}"
                return

    def _next(self) -> int | None:
        over = time.monotonic() > self._end or len(self.tally.wrong) >= self.most_wrong
        # An iterator of a range is safe among threads.
        return None if over else next(self._left, None)

    def _work(self, number: int) -> None:
        def progress() -> None:
            self._moved[number] = time.monotonic()

        while (k := self._next()) is not None:
            progress()
            program = self.running[number] = Program(self.seed * 1_000_003 + k, self.world)
            if self.traced and number == 0:
                self._run_traced(program, progress)
            else:
                program.run(progress=progress)
            self.tally.note(program)
        self.running.pop(number, None)

    def _run_traced(self, program: Program, progress: Callable[[], None]) -> None:
        trace = dr.trace(self.world.folder / f"whole-{program.seed}.json", quiet=True)
        try:
            with trace:
                program.run(progress=progress)
        except dr.errors.UsageError as refused:
            # An operation of the other thread's has begun a trace just now.
            assert "a trace is on already" in str(refused), refused
            program.run(progress=progress)
            return
        if why := wrong_with(trace):
            program.differs(why)
        self.tally.add(traced=1)

    def _read(self, publisher: Publisher) -> None:
        reader = Reader()
        while not publisher.stopped(0.05):
            reader.look()
        self.tally.add(looked_up=reader.found)
        self.tally.wrong += [Wrong(-1, what, []) for what in reader.wrong]

    def _beside(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self.tally.wrong.append(
                Wrong(
                    -1,
                    f"beside the programs: {type(error).__name__}: {error}",
                    traceback.format_exc().splitlines(),
                )
            )
