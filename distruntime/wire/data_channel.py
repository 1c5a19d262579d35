"""The data channel: how tensors move from worker to worker. The interface, what an implementation says of
itself, and their registry.

Implementations run on workers only. The master reads their capabilities and refuses what they lack before
anything is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import ClassVar, Protocol

import torch

from ..errors import ConfigurationError, NotSupportedError, without_our_frames

ENTRY_POINTS = "distruntime.data_channels"
# "send" stands for `receive` too.
MOVES = ("send", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier")
REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_NUMBERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


@dataclass(frozen=True)
class Capabilities:
    """What a data channel can do.

    Args:
        operations: the methods of `DataChannel` that it has, by name; "send" stands for `receive` too.
        reductions: by the name of a `ReduceOp`, the dtypes that it reduces; empty without `all_reduce`,
            `reduce` and `reduce_scatter`.
        devices: types of devices whose tensors it takes; others go through the CPU of their node.
        tags: whether calls of `send` with several tags may be under way between two members, from several
            threads.
            If not, the master keeps them in one order.
        concurrent: whether two groups may be at work on one device at a time, in different orders on
            different members.
    """

    operations: frozenset[str]
    reductions: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    devices: frozenset[str] = frozenset({"cpu"})
    tags: bool = True
    concurrent: bool = True

    def wire(self) -> list[object]:
        """Return the wire form."""
        reductions = {
            op: sorted(str(d).removeprefix("torch.") for d in dtypes)
            for op, dtypes in self.reductions.items()
        }
        return [sorted(self.operations), reductions, sorted(self.devices), self.tags, self.concurrent]

    @staticmethod
    def from_wire(fields: object) -> Capabilities:
        """Return what `wire` gave.

        Raise `TypeError` for anything else. A dtype that this torch does not have is left out.
        """
        match fields:
            case [list(operations), dict(reductions), list(devices), bool(tags), bool(concurrent)]:
                known = {
                    _text(op): frozenset(getattr(torch, d) for d in _texts(names) if hasattr(torch, d))
                    for op, names in reductions.items()
                }
                return Capabilities(_texts(operations), known, _texts(devices), tags, concurrent)
        raise TypeError(f"expected five fields, got {fields!r:.80}")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"expected a text, got {value!r:.80}")


def _texts(values: object) -> frozenset[str]:
    if isinstance(values, list):
        return frozenset(map(_text, values))
    raise TypeError(f"expected a list of texts, got {values!r:.80}")


class Store(Protocol):
    """What a data channel needs of a `torch.distributed.Store`."""

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key for all members."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key; block until it is there."""


@dataclass(frozen=True)
class Membership:
    """What a data channel is told about its group.

    `rank` of `size` members; `device` is this member's; `host` is where the other workers reach this one;
    `timeout` (seconds) is for each call. `store` is a `torch.distributed.Store` of the group's own, for
    finding each other: `store.set(key, value)`, `store.get(key)`, which blocks until the key is there, up to
    the timeout. Only the session's workers read and set its keys, so a secret may be one. It has no `add` and
    no `compare_set`.
    """

    rank: int
    size: int
    device: torch.device
    host: str
    timeout: float
    store: Store


class Unfinished(Protocol):
    """A call that has returned before its bytes have moved: `Work` of torch.distributed is one."""

    def is_completed(self) -> bool:
        """Return whether the bytes have moved. Any thread; must not block. Raise what has gone wrong."""


@dataclass(frozen=True)
class Reduction:
    """A reduce operation: the name of torch's `ReduceOp`, and the factor of PREMUL_SUM."""

    name: str
    factor: float | None = None


class DataChannel(ABC):
    """One member's end of a group. Subclass it, declare `capabilities`, register the class.

    A worker makes one for each group and member; making it joins the group and may block until all have. Its
    calls may block, up to the timeout, and come from any thread. All members get the group's collectives in
    one order, one at a time; `send` and `receive` come in between, each pair with a tag of its own. When a
    call returns None, its memory may be used. A call on an accelerator may return earlier, when only what
    follows on the device's current stream may use the memory. It returns an object with `is_completed()`
    then, such as torch's `Work`. What a call raises reaches the user; the group is used no more then.

    What only moves comes as contiguous one-dimensional uint8 tensors, whatever it is; what is reduced comes
    contiguous, in its dtype.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, membership: Membership) -> None:
        self.rank, self.size, self.membership = membership.rank, membership.size, membership

    @abstractmethod
    def abort(self) -> None:
        """Make every call under way, and every later one, raise soon.

        Called from any thread; must not block.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. No call is under way, and none follows.

        What it raises reaches the program at its next wait for all, as the failure of `group.close()`.
        """

    def send(self, data: torch.Tensor, to: int, tag: int) -> Unfinished | None:
        """Send bytes to a member."""
        raise self._lacks("send")

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Unfinished | None:
        """Receive what `source` sends with this tag, which has the size of `data`."""
        raise self._lacks("send")

    def broadcast(self, data: torch.Tensor, root: int) -> Unfinished | None:
        """Make every member's `data` the root's."""
        raise self._lacks("broadcast")

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Unfinished | None:
        """Concatenate every member's `data`, which are of one size, in `output`, in the order of ranks."""
        raise self._lacks("all_gather")

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> Unfinished | None:
        """As `all_gather`, at the root; elsewhere `output` is None."""
        raise self._lacks("gather")

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> Unfinished | None:
        """Give each member its part of the root's `data`, in the order of ranks; elsewhere `data` is None."""
        raise self._lacks("scatter")

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> Unfinished | None:
        """Send the k-th part of `data` to member k, and put what member k sends into the k-th part of
        `output`. Sizes in bytes.
        """
        raise self._lacks("all_to_all")

    def barrier(self) -> Unfinished | None:
        """Return when every member has called this."""
        raise self._lacks("barrier")

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> Unfinished | None:
        """Make every member's `data` the reduction of all."""
        raise self._lacks("all_reduce")

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> Unfinished | None:
        """As `all_reduce`, at the root; what `data` holds elsewhere afterwards does not matter."""
        raise self._lacks("reduce")

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> Unfinished | None:
        """Reduce all `data`, and give each member its part, in the order of ranks.

        `data` is `size` times as long as `output`.
        """
        raise self._lacks("reduce_scatter")

    def _lacks(self, operation: str) -> NotSupportedError:
        return NotSupportedError(f"the data channel {type(self).__name__} has no {operation}")


Factory = Callable[[Membership], DataChannel]

_registered: dict[str, Factory] = {}


@without_our_frames
def register_data_channel(name: str, factory: Factory) -> None:
    """Make a data channel known by `name`: for `init_master_worker(data_channel=name)` and
    `new_group(backend=name)`.

    `factory` is a subclass of `DataChannel`. Registered here, in the master, it travels to the workers by
    cloudpickle when a group first uses it, which asks for one Python version on both sides; an entry point in
    the group `distruntime.data_channels` of the workers' environment makes it known there for good.

    Raises `ConfigurationError` for what is no data channel.
    """
    checked(name, factory)
    _registered[name] = factory


def registered(name: str) -> Factory | None:
    """Return what `register_data_channel` has made known in this process by `name`."""
    return _registered.get(name)


def registered_names() -> list[str]:
    """Return the names that `register_data_channel` has made known in this process."""
    return sorted(_registered)


def entry_point(name: str) -> Factory | None:
    """Return the data channel that an installed package offers by `name`.

    Raise `ConfigurationError` if it is none.
    """
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return checked(name, point.load())
    return None


def entry_point_names() -> list[str]:
    """Return the names of the data channels that installed packages offer."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def checked(name: str, factory: object) -> Factory:
    """Return `factory`; raise `ConfigurationError` if it or the name cannot be."""
    if not isinstance(name, str) or not name.isidentifier() or name == "auto":
        raise ConfigurationError(f'a data channel\'s name is an identifier other than "auto", got {name!r}')
    return checked_class(name, factory)


def checked_class(name: str, factory: object) -> Factory:
    """As `checked`, under a name that distruntime itself has given."""
    if not (isinstance(factory, type) and issubclass(factory, DataChannel)):
        raise ConfigurationError(
            f"the data channel {name!r} must be a subclass of distruntime.distributed.DataChannel, "
            f"got {factory!r}"
        )
    capabilities = getattr(factory, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise ConfigurationError(
            f"{factory.__qualname__}.capabilities must be distruntime.distributed.Capabilities(...), "
            f"got {capabilities!r}"
        )
    unknown = capabilities.operations - {*MOVES, *REDUCES}
    if unknown:
        raise ConfigurationError(
            f"{factory.__qualname__} declares unknown operations: {', '.join(sorted(unknown))}"
        )
    return factory


def numbers(*without: torch.dtype) -> frozenset[torch.dtype]:
    """Return the dtypes of whole and floating-point numbers, but for some."""
    return frozenset(_NUMBERS) - set(without)
