"""A handle: the ref of a value, the place where it lives, and its storage as the log knows it.

Proxies own handles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count, islice
from types import MethodType
from typing import NamedTuple, final

import torch

from ..errors import InternalError
from ..wire.shield import shield
from .line import Line
from .log import Log
from .node import Node
from .spec import Spec
from .storage import Storage, put_into

# It is atomic. The master alone hands out refs, so creating a value needs no reply.
_refs = count(1)
next_ref = _refs.__next__


Signature = tuple[object, ...]
Known = dict[Signature, object]
Tables = tuple[Known, Known, dict[Signature, frozenset[int]]]

# A place that has no number of its own says this one. No tensor's place has it.
UNNUMBERED = 127
# The device types of torch that mean a place. Users write "remote", and proxies claim "lazy". `BARE` is what
# torch's C++ makes of a "remote" without an index before it copies: see backend/install.py.
BARE = "ve"
REMOTE_TYPES = ("remote", "lazy", BARE)


@final
class Place(str):
    """Where a tensor lives: the number of a node and what that node calls the device ("cpu", "cuda:0").

    torch takes a place wherever it takes a device: `torch.ones(2, device=place)`, `model.to(place)`. Its
    argument parser accepts a `torch.device` or a text there and asks nothing else. So a place is the text
    "remote:k", which prints as "node 0 cuda:0". `device` is the same as a `torch.device`.

    Places are equal if node and device are, whatever their numbers: `dr.place` and `x.place` return places
    with a number. They are ordered as they are numbered: node by node, the GPUs of a node before its CPU. A
    mesh's place has its `members`.
    """

    __slots__ = ("local_device", "members", "node", "number")

    node: int
    local_device: str
    number: int
    members: tuple[Place, ...]

    def __new__(
        cls, node: int, local_device: str, number: int = UNNUMBERED, members: Sequence[Place] = ()
    ) -> Place:
        made = super().__new__(cls, f"remote:{number}")
        made.node, made.local_device, made.number, made.members = node, local_device, number, tuple(members)
        return made

    @property
    def device(self) -> torch.device:
        """The place as a torch device, `device("remote", k)`: what `x.device` is of a tensor there."""
        return torch.device("remote", self.number)

    @property
    def type(self) -> str:
        """ "remote", as of its device."""
        return "remote"

    @property
    def index(self) -> int:  # type: ignore[override]
        """Its number k, as of its device "remote:k"."""
        return self.number

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Place)
            and (self.node, self.local_device) == (other.node, other.local_device)
            and self.members == other.members
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.node, self.local_device))

    def _order(self) -> tuple[object, ...]:
        kind, _, index = self.local_device.partition(":")
        return self.node, kind == "cpu", kind, int(index) if index.isdigit() else 0, self.members

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, Place) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self._order() <= other._order() if isinstance(other, Place) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self._order() > other._order() if isinstance(other, Place) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self._order() >= other._order() if isinstance(other, Place) else NotImplemented

    def __str__(self) -> str:
        if not self.members:
            return f"node {self.node} {self.local_device}"
        nodes = list(dict.fromkeys(place.node for place in self.members))
        members = f"{len(self.members)} member{'s' if len(self.members) > 1 else ''}"
        return f"{members} on node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"<{self}>" if self.members else f"dr.place({self.node}, {self.local_device!r})"

    def __copy__(self) -> Place:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Place:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Another session may give its number to another place.
        return Place, (self.node, self.local_device, UNNUMBERED, self.members)


def ranges(numbers: Sequence[int]) -> str:
    """Return "0 to 3, 7" of [0, 1, 2, 3, 7]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in found)


class Residence:
    """A place that is in use: its number as a torch device, and the signatures that have run there.

    Whoever lives there holds it, so the number is free again as soon as nobody does. `cache` maps a call's
    signature to its template and result metadata; it is emptied when the session or the node ends, which
    sends every call down the slow path. On a node with several streams it stays empty, and the slow path
    looks into `signatures`, which elsewhere is the same dictionary. A signature whose metadata the worker has
    not confirmed yet is in `unproven`: the slow path has each such call checked. `promoted` has the
    signatures of calls whose integers must be converted to the default dtype first, and the numbers of these
    operands. Each default dtype of torch has `tables` of its own, so that no signature needs to name it.
    `default` is the one that they are for: a thread may see torch's new default before they follow it.
    """

    __slots__ = (
        "__weakref__",
        "_released",
        "_tables",
        "cache",
        "default",
        "device",
        "free",
        "lazy",
        "node",
        "number",
        "numbers",
        "place",
        "promoted",
        "signatures",
        "tables",
        "unproven",
    )

    def __init__(self, place: Place, node: Log, number: int, released: Callable[[int], None]) -> None:
        # A handler that raises may end this, and the finalizer needs these.
        self.number, self._released = number, released
        self.place, self.node = place, node
        # The wrapper's C++ side claims this device: see docs/design.md.
        self.lazy = torch.device("lazy", number)
        self.device = torch.device("remote", number)
        self.free = node.freed.append
        self._tables: dict[torch.dtype, Tables] = {}
        self.follow_default_dtype()
        # A mesh keeps tensors here that hold a number for each member: see varying.py.
        self.numbers: dict[tuple[bool, tuple[int, ...]], torch.Tensor] = {}

    @property
    def worker(self) -> Node:
        """The one worker that it is on; raise `InternalError` for a mesh's place."""
        if not isinstance(self.node, Node):
            raise InternalError(f"{self.place} are a mesh, where one worker was expected")
        return self.node

    @property
    def kind(self) -> str:
        """What torch calls such a device on its node: "cpu", "cuda", "xpu".

        A mesh's members are of one kind.
        """
        return (self.node.members or (self.place,))[0].local_device.partition(":")[0]

    @property
    def on_cpu(self) -> bool:
        """Whether it is a node's CPU, or a mesh of them."""
        return self.kind == "cpu"

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether what runs here is a CPU's kernels, as on simulated GPUs."""
        return self.on_cpu or self.node.simulated

    def follow_default_dtype(self) -> None:
        """Look signatures up among those that have run under what is torch's default dtype now."""
        default = torch.get_default_dtype()
        # The tuple is a new one each time: whoever holds it sees that the default has changed meanwhile.
        signatures, unproven, promoted = self._tables.get(default, ({}, {}, {}))
        self.tables = self._tables[default] = signatures, unproven, promoted
        self.signatures, self.unproven, self.promoted = self.tables
        self.cache = self.signatures if self.node.order is None else {}
        self.default = default

    def clear_signatures(self) -> None:
        """Send every call down the slow path, which does not know it either."""
        for tables in list(self._tables.values()):
            for table in tables:
                table.clear()

    def drop_signatures(self, of: object) -> None:
        """Forget the signatures that begin with something, or with a word and that."""
        for signatures, unproven, _ in list(self._tables.values()):
            for table in (signatures, unproven):
                for key in list(table):
                    if isinstance(key, tuple) and any(one is of for one in key[:2]):
                        table.pop(key, None)

    def hide_signatures(self) -> None:
        """Send every call down the slow path from now on, which keeps what it knows."""
        self.cache = {}

    def __del__(self) -> None:
        self._released(self.number)

    def __repr__(self) -> str:
        return f"Residence({self.place}, remote:{self.number})"


def lent_storage(spec: Spec, home: Residence, name: int) -> Storage:
    """Return the memory that a worker's own Python holds, too, and calls by this number."""
    lent = home.node.lent
    found = lent.named.get(name)
    if not isinstance(found, Storage):
        found = lent.named[name] = Storage(spec)
        put_into(found, lent)
    return found


class Handle:
    """Owns a ref: when the last holder lets go, the value is freed in the log's order.

    A proxy's own `__del__` would not do: autograd may resurrect the tensor. And the collector may run this
    inside any lock, so it only appends.
    """

    __slots__ = ("__del__", "born", "place", "ref", "spec", "storage")

    # Each handle has its own, the builtin `append` bound to the ref. Ctrl-C strikes only in Python code, and
    # Python drops what is raised inside a finalizer. As a method in Python, this one swallowed 3 of 11
    # presses in a loop of operations. To make and to drop a handle takes 0.20 us either way.
    __del__: Callable[[], object]

    # These are the position in the log after the instruction that creates the value, and the line that issued
    # it.
    born: Line

    def __init__(self, ref: int, spec: Spec, place: Residence, storage: Storage) -> None:
        self.ref, self.spec, self.place, self.storage = ref, spec, place, storage
        self.__del__ = MethodType(place.free, ref)

    @property
    def ready_at(self) -> int:
        """The position in the node's log from which the value is what a read issued now must see."""
        return max(self.born[0], self.storage.written)


class Row(NamedTuple):
    """One of several values: what it is, the number of its memory, and the largest that this was made for."""

    spec: Spec
    place: Residence
    memory: int
    largest: Spec


class Described(NamedTuple):
    """A value of which a `Several` owns the ref, as a handle would describe it."""

    ref: int
    spec: Spec
    place: Residence
    storage: Storage
    born: Line


@final
class Several:
    """Owns the refs of values that one instruction has made, and that nobody else names.

    A handle of each takes 2 us to make and to drop, and Python's collector counts it and what it holds. The
    memories of these values are theirs alone. Whoever needs handles opens it: then those own the refs.

    `stream` has made them. Until it is opened, only that one reads them, and `read` is up to where.
    """

    __slots__ = ("__del__", "born", "handles", "read", "refs", "rows", "stream")

    __del__: Callable[[], object]
    born: Line

    def __init__(self, rows: Sequence[Row], stream: int) -> None:
        self.rows, self.refs = rows, list(islice(_refs, len(rows)))
        self.stream, self.read = stream, 0
        self.handles: list[Handle] | None = None
        # See `Handle`: it calls nothing of Python's.
        self.__del__ = MethodType(rows[0].place.node.freed.extend, self.refs)

    def opened(self) -> list[Handle]:
        """Return a handle of each value."""
        node = self.rows[0].place.node
        # Ctrl-C between the two would leave the refs with two owners.
        with shield, node.lock:
            if self.handles is None:
                found = [Handle(one.ref, one.spec, one.place, one.storage) for one in self.described()]
                for handle in found:
                    handle.born = self.born
                    if node.order is not None:
                        node.order.introduce(handle.storage, self.stream, self.read)
                self.handles = found
                # These handles own them from now on.
                self.refs.clear()
            return self.handles

    def described(self) -> list[Described]:
        """Return the values that it owns the refs of. Those that are opened are not among them."""
        memories: dict[int, Storage] = {}
        return [
            Described(
                ref, row.spec, row.place, memories.setdefault(row.memory, Storage(row.largest)), self.born
            )
            for ref, row in zip([*self.refs], self.rows)
        ]


def relate(made: Sequence[Handle]) -> None:
    """Note which values one instruction made together, each with a memory of its own."""
    kin = [(handle.ref, weakref.ref(handle.storage)) for handle in made]
    for handle in made:
        handle.storage.kin = kin


def kin_of(operands: Sequence[Handle]) -> tuple[list[int] | None, list[Storage]]:
    """Return the refs of the values that were made together with `operands`, and their memories.

    The refs are None where nothing was. A value is not its own kin: what checks it leaves it as it is.
    """
    own = [handle.storage for handle in operands]
    found: dict[int, Storage] = {}
    for storage in own:
        for ref, weak in getattr(storage, "kin", ()):
            memory = weak()
            if memory is not None and memory not in own:
                found[ref] = memory
    related = any(hasattr(storage, "kin") for storage in own)
    return list(found) if related else None, list(found.values())


def new_value(spec: Spec, place: Residence) -> Handle:
    """Return the handle of a value that is still to be made, with a memory of its own."""
    return Handle(next_ref(), spec, place, Storage(spec))
