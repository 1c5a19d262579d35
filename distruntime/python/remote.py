"""Functions and classes that run on workers: `dr.remote`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, overload

import torch
from torch.utils._pytree import tree_map_only

from ..errors import PlacementError, UsageError, drop_frames, without_our_frames
from ..log.handle import Residence
from ..operators import defined
from ..operators.proxies import wrap
from ..session.session import active_session
from ..session.spelling import named, on_node, require_alone
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from .call import invoke
from .callee import Callee, Function, Latest, Options, forget
from .objects import RemoteObject, Result

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RemoteOptions(TypedDict, total=False):
    """The options of `remote`, for those who check types: `remote` itself says what they mean."""

    place: object
    node: int | None
    returns: object
    writes: object
    random: bool
    timeout: float | None


class RemoteFunction:
    """A function or a class that runs on workers: see `remote`."""

    def __init__(self, thing: Function, given: RemoteOptions) -> None:
        if not callable(thing):
            raise UsageError(f"dr.remote takes a function or a class, got {thing!r:.60}")
        functools.update_wrapper(self, thing)
        name = getattr(thing, "__qualname__", type(thing).__name__).replace("<locals>.", "")
        self._thing, self._name = thing, name
        self._latest = Latest(thing, name, forget)
        self._place, self._node, self._given = given["place"], given["node"], given
        returns = object if given["returns"] is None and isinstance(thing, type) else given["returns"]
        writes = _positions(thing, given["writes"])
        self._options = Options(returns, writes, given["random"], given["timeout"])

    def __repr__(self) -> str:
        return f"<remote function {self._name}>"

    @without_our_frames
    def options(self, **given: Unpack[RemoteOptions]) -> RemoteFunction:
        """Return this function with other options: see `remote`."""
        where: RemoteOptions = {"place": None, "node": None} if given.keys() & {"place", "node"} else {}
        made = remote(self._thing, **(self._given | where | given))
        made._latest = self._latest
        return made

    def __call__(self, *args: object, **kwargs: object) -> Result:
        """Run it on a worker: see `remote`."""
        try:
            callee = self._latest.callee()
            home = self._home(kwargs) if kwargs or self._placed else None
            return invoke(callee, self._options, args, kwargs, home, RemoteObject)
        except BaseException as error:
            drop_frames(error)
            raise

    def callee(self) -> Callee:
        """Return what is called now."""
        return self._latest.callee()

    @property
    def _placed(self) -> bool:
        return self._place is not None or self._node is not None

    @functools.cached_property
    def _own(self) -> frozenset[str]:
        """The names of the function's own parameters, as far as Python knows them."""
        try:
            found = inspect.signature(self._thing).parameters
        except (TypeError, ValueError):
            return frozenset()
        return frozenset(name for name, p in found.items() if p.kind is not p.VAR_KEYWORD)

    def _home(self, kwargs: dict[str, object]) -> Residence | None:
        place, node = self._place, self._node
        if "place" in kwargs and "place" not in self._own:
            place, node = kwargs.pop("place"), None
        if "node" in kwargs and "node" not in self._own:
            given = kwargs.pop("node")
            require_alone(place, "node", given) if place is not None else None
            node = given  # type: ignore[assignment]
        return residence_of(place, node)

    def __reduce__(self) -> tuple[object, ...]:
        # A function that calls another gets the plain one: it is on a worker already.
        return plain, (self._thing,)


def plain(thing: object) -> object:
    """Return what a pickled function or class is where it arrives: itself."""
    return thing


# Kernels of operators that the user's program has defined, and what of them travels, by the operators.
_operators: dict[str, tuple[Function, Latest]] = {}


def _call_kernel(
    name: str,
    kernel: Function,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    returns: object,
    written: tuple[int, ...],
) -> object:
    """Call the kernel of an operator that the user's program has defined, where its operands are."""
    known = _operators.get(name)
    if known is None or known[0] is not kernel:
        _operators[name] = known = kernel, Latest(kernel, name, forget)
    # This is below autograd, and the body must not record.
    args, kwargs = tree_map_only(
        DistributedTensor, lambda t: wrap(DistributedTensor, t._handle), (list(args), dict(kwargs))
    )
    with torch.no_grad():
        found = invoke(known[1].callee(), Options(returns, written), args, kwargs, None, RemoteObject)
    return tree_map_only(RemoteObject, fetch, found)


defined.run.append(_call_kernel)


def residence_of(place: object, node: int | None) -> Residence | None:
    """Return the place that `place` or `node` names; None where nothing is named."""
    if place is None and node is None:
        return None
    places = active_session().places
    if place is None:
        assert node is not None
        return places.residence(on_node(places, node))
    require_alone(place, "node", node)
    found = named(places, getattr(place, "device", place))
    if found is None:
        raise PlacementError(f"place={place!r:.60}: expected dr.place(node, device), x.device or a mesh")
    return found


def _positions(thing: object, writes: object) -> tuple[int, ...] | None:
    """Return the numbers of the arguments that `writes` names, by number or by name."""
    if writes is None:
        return None
    given = [writes] if isinstance(writes, (int, str)) else writes
    assert isinstance(given, (tuple, list))
    names = [*inspect.signature(thing).parameters] if any(isinstance(w, str) for w in given) else []  # type: ignore[arg-type]
    return tuple(names.index(w) if isinstance(w, str) else int(w) for w in given)


@overload
def remote(fn: Function, **options: Unpack[RemoteOptions]) -> RemoteFunction: ...


@overload
def remote(fn: None = None, **options: Unpack[RemoteOptions]) -> Callable[[Function], RemoteFunction]: ...


@without_our_frames
def remote(
    fn: Function | None = None,
    *,
    place: object = None,
    node: int | None = None,
    returns: object = None,
    writes: object = None,
    random: bool = True,
    timeout: float | None = None,
) -> RemoteFunction | Callable[[Function], RemoteFunction]:
    """Return a function (or a class) that runs on workers; also a decorator.

    A call is one more instruction of the log, on the current stream: it returns at once, and its failure
    comes up where a result is read. It runs where its remote arguments are, or at `place` or on `node` (these
    may also stand in the call), or at the current place. The body gets real tensors. Tensor results are
    proxies; a tuple of results is a tuple, and so is a named one; anything else is a `RemoteObject`.

    `returns` says what comes back: an example (tensors of `device="meta"` do, and tuples, lists and dicts), a
    function of the arguments that returns one, "fake" to find out by running `fn` here on metadata, `object`
    for no tensor, "ask" to wait for the worker's answer at each call. By default the first call with operands
    of given sizes waits for that answer, and later ones expect the same. `writes` names the arguments that
    `fn` changes in place: others can then be read while it runs. `random=False` says that it draws nothing,
    and so need not keep the order of draws on other streams. `timeout` is in seconds.

    The function travels once to each worker, and again where what it has captured has changed: its globals,
    its closure, and what is in these. A worker that was started with `--no-functions` runs none.
    """
    given: RemoteOptions = {
        "place": place,
        "node": node,
        "returns": returns,
        "writes": writes,
        "random": random,
        "timeout": timeout,
    }
    return functools.partial(remote, **given) if fn is None else RemoteFunction(fn, given)
