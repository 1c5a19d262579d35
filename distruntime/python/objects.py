"""Objects that live on a worker: attributes, methods and items of their proxies are calls there."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, SupportsIndex

import msgpack

from ..errors import ProtocolError, UsageError, drop_frames, without_our_frames
from ..log.handle import Handle, Residence, new_value
from ..log.issue import template_number
from ..log.line import user_line
from ..log.log import relieve
from ..log.spec import NO_TENSOR, spec_from_wire
from ..operators.ask_worker import ask_specs
from ..operators.transfer import request as request_value
from ..operators.transfer import tensor_from
from ..session.requests import Request
from ..session.session import session_of_log
from ..tensors.fetch import Arriving, Fetchable, fetch, fetch_async
from ..wire.codec import ALIGNED, OPERAND, tensor_bytes
from .ahead import Ahead
from .call import ASK, END, Call, invoke
from .callee import Callee, Options
from .pickling import Operand, unpickled

_set = object.__setattr__
# What a call returns only the user knows: a tensor, a tree, or a `RemoteObject`.
Result = Any  # type: ignore[explicit-any]


class RemoteObject(Operand, Fetchable):
    """An object that lives on a worker; it is freed with its proxy.

    Attributes, items, calls, operators and iteration are the object's own, on its worker, in the order of the
    program, and return at once where the result is an object. `dr.fetch(x)` and `await x` bring a copy of it
    here. `len`, `bool`, `int`, `float`, `str` and `in` wait for their answers.
    """

    __slots__ = ("_asked", "_handle", "_maker")

    _maker: Callee
    # The next item of an iterator, if somebody was interrupted while he waited for it. Most have none.
    _asked: Ahead | None

    def __init__(self, handle: Handle, maker: Callee) -> None:
        _set(self, "_handle", handle)
        _set(self, "_maker", maker)

    def __repr__(self) -> str:
        return f"<remote object of {self._maker.name} on {self._handle.place.place}>"

    # -- its value -------------------------------------------------------------------------------------------

    def _copy(self) -> Arriving:
        return _Pickled(self._handle)

    def __await__(self) -> Generator[object, None, Result]:
        return fetch_async(self).__await__()

    # -- what it does there ----------------------------------------------------------------------------------

    def _do(self, what: str, *args: object, shown: str = "") -> object:
        """Issue what the worker does under a name with this object."""
        maker = self._maker
        callee = maker.child(what, shown or f"{maker.name} {what}", what)
        return issued(callee, _of_objects, self, *args)

    def _kept(self, what: str, *args: object) -> RemoteObject:
        """Issue what the worker does under a name, and whose result is an object: nobody is asked what it is.

        Return at once.
        """
        maker = self._maker
        return object_of(maker.child(what, f"{maker.name} {what}", what), self, *args)

    def __call__(self, *args: object, **kwargs: object) -> Result:
        """Call it on its worker."""
        maker = self._maker
        return invoke(
            maker.child("call", maker.name, "call"), _of_objects, (self, *args), kwargs, None, RemoteObject
        )

    @without_our_frames
    def __getattr__(self, name: str) -> Result:
        # Python and notebooks look for such names in every object.
        if name.startswith("_"):
            raise AttributeError(
                f"{name!r} of {self!r}: names that begin with an underscore are not looked up on the worker; "
                f"dr.remote(getattr)(x, {name!r}) does so",
                name=name,
                obj=None,
            )
        method = self._method(name)
        if method.is_method:
            return RemoteMethod(self, method, name)
        return self._do(f"getattr {name}", shown=method.name)

    def _method(self, name: str) -> Callee:
        """Return what calls an attribute of this name. Block at its first use until it is known for one."""
        maker = self._maker
        method = maker.child(f"method {name}", f"{maker.name}.{name}", f"method {name}")
        if method.is_method is None:
            method.is_method = bool(fetch(self._do(f"callable {name}", shown=method.name)))
        return method

    @without_our_frames
    def __setattr__(self, name: str, value: object) -> None:
        self._do(f"setattr {name}", value, shown=f"{self._maker.name}.{name} =")

    @without_our_frames
    def __delattr__(self, name: str) -> None:
        self._do(f"delattr {name}", shown=f"del {self._maker.name}.{name}")

    @without_our_frames
    def __getitem__(self, key: object) -> Result:
        return self._do("getitem", key)

    @without_our_frames
    def __setitem__(self, key: object, value: object) -> None:
        self._do("setitem", key, value)

    @without_our_frames
    def __delitem__(self, key: object) -> None:
        self._do("delitem", key)

    @without_our_frames
    def __iter__(self) -> Iterator[Result]:
        return RemoteIterator(self._do("iter"))

    @without_our_frames
    def __aiter__(self) -> AsyncIterator[Result]:
        return RemoteAsyncIterator(self._kept("aiter"))

    @without_our_frames
    def __next__(self) -> Result:
        return _next_of(self)

    @without_our_frames
    def __enter__(self) -> Result:
        # An object without them raises here, before the block begins.
        self._method("__enter__"), self._method("__exit__")
        return self._do("method __enter__")

    @without_our_frames
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        """Leave it there. An exception travels without its traceback, and blocks until it is known whether
        the object swallows it.
        """
        left = self._do("method __exit__", kind, error, None)
        return kind is not None and bool(fetch(left))

    # -- what Python wants here ------------------------------------------------------------------------------

    def _here(self, what: str, *args: object) -> object:
        return fetch(self._do(what, *args))

    @without_our_frames
    def __len__(self) -> int:
        found = self._here("len")
        assert isinstance(found, int)
        return found

    @without_our_frames
    def __bool__(self) -> bool:
        return bool(self._here("bool"))

    @without_our_frames
    def __int__(self) -> int:
        return int(str(self._here("int")))

    @without_our_frames
    def __float__(self) -> float:
        return float(str(self._here("float")))

    @without_our_frames
    def __index__(self) -> int:
        return int(str(self._here("index")))

    @without_our_frames
    def __str__(self) -> str:
        return str(self._here("str"))

    @without_our_frames
    def __contains__(self, item: object) -> bool:
        return bool(self._here("contains", item))

    __hash__ = object.__hash__

    @without_our_frames
    def __copy__(self) -> Result:
        return self._do("copy")

    @without_our_frames
    def __deepcopy__(self, memo: dict[int, object]) -> Result:
        return self._do("deepcopy")

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        raise UsageError(
            f"{self!r} cannot be pickled, as it is on a worker: dr.fetch(obj) brings a copy of it, and a "
            "function on its node takes it as an argument"
        )


class _Pickled:
    """The pickle of an object that is on its way here: in the first reply, or as a tensor of bytes."""

    def __init__(self, handle: Handle) -> None:
        home, line = handle.place, user_line()
        self._made = new_value(NO_TENSOR, home)
        with home.node.lock:
            fields = ["python::pickle", [OPERAND], {}, 1]
            number = template_number(home.node, msgpack.packb(fields), fields)
            self.request = ask_specs(
                [number, handle.ref, self._made.ref], [self._made], [handle], (), home, line, False
            )
        self._data: Request[object] | None = None

    def rest(self) -> Request[object] | None:
        match self.request.value:
            case [list(spec)]:
                self._made.spec = spec_from_wire(spec)
                self._data = request_value(self._made, "tensor")
        return self._data

    def value(self) -> object:
        if self._data is not None:
            data, *buffers = _parts(tensor_bytes(tensor_from(self._data, self._made.spec)))
        else:
            match self.request.value:
                case [bytes(found)]:
                    data, buffers = memoryview(found), []
                case other:
                    raise ProtocolError(f"a worker sent {other!r:.60} for an object")
        return unpickled(data, buffers, session_of_log(self._made.place.node))


def _binary(
    what: str,
) -> tuple[Callable[[RemoteObject, object], object], Callable[[RemoteObject, object], object]]:
    @without_our_frames
    def forward(self: RemoteObject, other: object) -> object:
        return self._do(what, other)

    @without_our_frames
    def reflected(self: RemoteObject, other: object) -> object:
        return self._do(f"reflected {what}", other)

    return forward, reflected


def _augmented(what: str) -> Callable[[RemoteObject, object], RemoteObject]:
    @without_our_frames
    def assign(self: RemoteObject, other: object) -> RemoteObject:
        return self._kept(what, other)

    return assign


for _what in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():
    _forward, _reflected = _binary(_what)
    setattr(RemoteObject, f"__{_what.rstrip('_')}__", _forward)
    setattr(RemoteObject, f"__r{_what.rstrip('_')}__", _reflected)
    setattr(RemoteObject, f"__i{_what.rstrip('_')}__", _augmented(f"i{_what.rstrip('_')}"))
for _what in "lt le eq ne gt ge".split():
    setattr(RemoteObject, f"__{_what}__", _binary(_what)[0])
for _what in "neg pos abs invert".split():
    setattr(RemoteObject, f"__{_what}__", functools.partialmethod(RemoteObject._do, _what))


def _parts(whole: memoryview) -> list[memoryview]:
    """Return the parts of a parcel: see `calls.py` of the worker's room of this name."""
    end = 8 + int.from_bytes(whole[:8], "little")
    found = []
    for nbytes in msgpack.unpackb(whole[8:end]):
        begin = -(-end // ALIGNED) * ALIGNED
        end = begin + nbytes
        if not 0 <= begin <= end <= len(whole):
            raise ProtocolError("a worker sent a parcel whose parts are not in it")
        found.append(whole[begin:end])
    return found


class RemoteMethod(RemoteObject):
    """A method of an object on a worker. A call is one instruction."""

    __slots__ = ("_name", "_owner")

    _name: str
    _owner: RemoteObject

    def __init__(self, owner: RemoteObject, maker: Callee, name: str) -> None:
        _set(self, "_owner", owner)
        _set(self, "_maker", maker)
        _set(self, "_name", name)

    @without_our_frames
    def __getattr__(self, name: str) -> Result:
        if name == "_handle":
            # Whoever wants the method as a value gets it here.
            callee = self._maker.child("getattr", self._maker.name, f"getattr {self._name}")
            _set(self, "_handle", object_of(callee, self._owner)._handle)
            return self._handle
        return super().__getattr__(name)

    def __call__(self, *args: object, **kwargs: object) -> Result:
        """Call the method on the object's worker."""
        try:
            return invoke(self._maker, _of_objects, (self._owner, *args), kwargs, None, RemoteObject)
        except BaseException as error:
            drop_frames(error)
            raise


class RemoteIterator:
    """An iterator on a worker: each item is one round trip, as only the worker knows where the end is."""

    def __init__(self, held: object) -> None:
        self._held = held

    @without_our_frames
    def __iter__(self) -> RemoteIterator:
        return self

    @without_our_frames
    def __next__(self) -> Result:
        return _next_of(self._held)


class RemoteAsyncIterator:
    """An iterator on a worker: other tasks of the event loop run while the worker makes an item.

    Each item is two round trips. The second one follows at once, and blocks.
    """

    def __init__(self, held: object) -> None:
        self._held = held
        # This item was made, and nobody has it.
        self._ahead: RemoteObject | None = None

    @without_our_frames
    def __aiter__(self) -> RemoteAsyncIterator:
        return self

    async def __anext__(self) -> Result:
        assert isinstance(self._held, RemoteObject)
        ahead = self._held._kept("ahead") if self._ahead is None else self._ahead
        self._ahead = ahead
        try:
            there = await fetch_async(ahead._kept("len"))
            item = _next_of(ahead) if there else END
        # The task that waits may be cancelled, which is no such error: the next one gets the item.
        except Exception:
            self._ahead = None
            raise
        self._ahead = None
        if item is END:
            raise StopAsyncIteration
        return item


def _next_of(held: object) -> object:
    """Return the next item. Who is interrupted while he waits gets it the next time."""
    assert isinstance(held, RemoteObject)
    asked = getattr(held, "_asked", None)
    if asked is None:
        maker, home = held._maker, held._handle.place
        callee = maker.child("next", f"next of {maker.name}", "next")
        relieve(home.node)
        asked = Ahead(Call(callee, _asking, b"", [held], home, user_line(), RemoteObject))
        _set(held, "_asked", asked)
    try:
        found = asked()
    except BaseException:
        if asked.failed:
            _set(held, "_asked", None)
        raise
    _set(held, "_asked", None)
    if found is END:
        raise StopIteration
    return found


def issued(callee: Callee, options: Options, *args: object, home: Residence | None = None) -> object:
    """Issue a call; return its result."""
    return invoke(callee, options, args, {}, home, RemoteObject)


def object_of(callee: Callee, *args: object, home: Residence | None = None) -> RemoteObject:
    """Issue a call whose result is an object, so that nobody is asked what it is. Return at once."""
    found = issued(callee, _kept, *args, home=home)
    assert isinstance(found, RemoteObject)
    return found


_of_objects = Options()
_asking = Options(returns=ASK)
_kept = Options(returns=object)
