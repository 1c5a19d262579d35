"""The hot path: from an operator on proxies to one instruction in the command log.

`dispatch` is what torch calls for every operator below autograd. A call whose signature has been seen costs
one pass over its arguments, one dictionary hit, one wrapper and one append; everything else goes to
`new_calls.first_time`. Measured on 2 shared cores (torch 2.13): see docs/tables/benchmarks.md, "operation".
`tests/operators/test_plain_twin.py` holds it against a plain version of itself.
"""

from __future__ import annotations

import sys
from sys import getrefcount
from typing import Any

import torch

from ..errors import drop_frames
from ..log.handle import Handle, Residence, next_ref, relate
from ..log.line import Call, line_from, user_line
from ..log.log import relieve
from ..log.storage import Storage
from ..log.tape import recorded
from ..session.session import active_session
from .new_calls import first_of_factory, first_time
from .proxies import AUTOCAST, DETACH, HUGE, wrap, wrap_all
from .signatures import Entry, Multiple, count_unreturned, count_written, emit, versions
from .special import SPECIAL
from .transfer import upload_small
from .whole_numbers import EXACT, NUMERIC, learn, takes

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_inference = torch.is_inference_mode_enabled
_with_gradients = torch.is_grad_enabled
_COPY = torch.ops.aten.copy_.default
_getframe = sys._getframe


_WHOLE_NUMBERS = {int}


def _scan(cls: type, value: Any, key: list[Any], words: list[object], place: Any) -> Any:
    """Add one argument to the signature that is a list, or stands in the keyword arguments.

    Return the place, or `MIXED` if the places differ.
    """
    kind = type(value)
    if kind is cls:
        handle = value._handle
        key.append(handle.spec)
        words.append(handle.ref)
        if place is None:
            return handle.place
        return place if handle.place is place else MIXED
    if kind is float:
        key.append(float)
        words.append(value)
    elif kind is list or kind is tuple:
        # An operator of lists may have a number for each tensor: [1, 0.5]. There 1.0 is no 1.
        if value and type(value[0]) is int and {*map(type, value)} == _WHOLE_NUMBERS:
            key.append(tuple(value))
        else:
            key.append(len(value))
            for item in value:
                kind = type(item)
                if kind is cls:
                    handle = item._handle
                    key.append(handle.spec)
                    words.append(handle.ref)
                    if handle.place is not place:
                        place = handle.place if place is None else MIXED
                else:
                    place = _scan(cls, item, key, words, place)
            return place
    else:
        key.append(kind)
        key.append(value)
    return place


_in_backward = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
# The class of the nodes by which autograd gives a leaf its gradient.
_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# They are C++'s own, the tuple of arguments, and the count itself.
_HOLDERS = 3


class _Mixed:
    """Stands for the place of operands that do not share one.

    Its empty cache sends the call to the slow path.
    """

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}
        self.signatures = self.unproven = self.cache


MIXED: Any = _Mixed()


def dispatch(cls: type, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Turn one operator call into one instruction; return its proxies at once."""
    # A gradient becomes `p.grad`. Autograd detaches it where nobody else holds it, and drops it then. So it
    # becomes `p.grad` itself: torch takes a result of `detach` that is its operand as it is. What has a graph
    # or a base leaves its handle to a new proxy. A GPT-2 of 12 layers has 148 of these in a step. Other nodes
    # detach what they have saved, and keep it: it would lose its version and get a graph, so that is a proxy.
    if func is DETACH and _in_backward() >= 0 and getrefcount(args[0]) == _HOLDERS:
        given: Any = args[0]
        if not (_with_gradients() or recorded.name):
            plain = not (given.requires_grad or given._is_view())
            return given if plain and type(_current_node()) is _LEAF else wrap(cls, given._handle)
    # An OpOverload's own hash is a Python function. The entry keeps `func` alive, so the id stays its own.
    number = id(func)
    key: list[Any] = [number]
    words: list[object] = [0]
    place: Any = None
    for a in args:
        kind = type(a)
        if kind is cls:
            handle = a._handle
            key.append(handle.spec)
            words.append(handle.ref)
            if handle.place is not place:
                place = handle.place if place is None else MIXED
        elif kind is float:
            # It travels as an operand: a learning rate that changes must not make a new template.
            key.append(float)
            words.append(a)
        elif kind is list or kind is tuple:
            # Beside one tensor they are sizes, dimensions and the like. `_scan` looks at each number.
            if a and type(a[0]) is int and type(args[0]) is cls:
                key.append(tuple(a))
            else:
                place = _scan(cls, a, key, words, place)
        elif kind is int and number not in EXACT and (number in NUMERIC or learn(func)):
            key.append(int)
            words.append(a)
        else:
            # 1 == True in Python, so the kind is in the key too.
            key.append(kind)
            key.append(a)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            if type(a) is int and takes(func):
                key.append(int)
                words.append(a)
            else:
                place = _scan(cls, a, key, words, place)
    signature = tuple(key)
    try:
        entry: Entry | None = place.cache.get(signature)
    except (TypeError, AttributeError):
        # There is an argument that cannot be hashed, or no proxy at all.
        entry = None
    if entry is None:
        # It is DTensor's turn, to say what is mixed or to make it one.
        if len(types) > 1 and not all(issubclass(kind, cls) for kind in types):
            return NotImplemented
        before: Any = ()
        try:
            if func is _COPY and type(args[0]) is cls:
                target: Any = args[0]
                # It is what `versions` returns of the target. That takes 1.4 us, where an upload takes 11.
                if not target.is_inference():
                    before = ((target, target._version, target._handle.storage.written),)
                if upload_small(*args):
                    return target
            if func._schema.is_mutable:
                before = versions(cls, args, kwargs)
            return first_time(cls, func, args, kwargs or {}, signature, words, place, SPECIAL)
        except BaseException as error:
            # A signal's handler may raise behind the instruction, on the way back to here.
            count_written(before)
            # Otherwise a mistyped shape would show a dozen frames of this package and of torch's meta
            # kernels.
            drop_frames(error)
            raise
    template, spec, alias, _, _, several = entry
    if spec is None or (
        alias is not None and (_inference() or (func is not DETACH and args[alias].is_inference()))
    ):
        if spec is None and (several is not None or alias is not None):
            if several is None:
                # It returns an operand as it is: `lift_fresh` does, by which `torch.tensor` ends.
                return args[alias]
            base = None if alias is None else args[alias]
            if base is None or not (_inference() or base.is_inference()):
                return _make_several(cls, template, several, base, words, place)
        relieve(place.node)
        try:
            return emit(cls, entry, words, args, kwargs, place, user_line())
        except BaseException:
            # A signal's handler may raise behind it, too, where a compiler of Python's frames is at work.
            count_unreturned(entry, words, args, kwargs, place)
            raise
    ref = next_ref()
    words[0] = template
    words.append(ref)
    handle = Handle(ref, spec, place, Storage(spec) if alias is None else args[alias]._handle.storage)
    # The arguments go by position: naming the last two costs 0.2 us more.
    out = _make_wrapper(
        cls,
        spec.size,
        spec.stride,
        spec.offset,
        None,
        spec.dtype,
        _strided,
        place.lazy,
        False,
        False,
        None,
        False,
        False,
        AUTOCAST,
        HUGE,
    )
    out._handle = handle
    try:
        frame = _getframe(1)
    except ValueError:
        # A thread of torch's C++ has called this: no Python stands around it.
        line = line_from(None)
    else:
        call = frame.f_trace
        line = (0, call, frame.f_lasti) if type(call) is Call else line_from(frame)
    node = place.node
    with node.lock:
        try:
            freed = node.freed
            while freed:
                node.words.append(-freed.pop())
            # The words are looked up anew: a finalizer may have run above, and have sent the log.
            node.words += words
            handle.born = born = (node.base + len(node.words), line[1], line[2])
            node.line_table.append(born)
            if len(node.words) > node.enough:
                node.flush(gathered=True)
        except BaseException:
            node.take_turn()
            raise
    if node.busy:
        try:
            node.session.throttle(node)
        except BaseException as error:
            # Ctrl-C in a full window is about the user's loop.
            drop_frames(error)
            raise
    return out


def _make_several(
    cls: type, template: int, several: Multiple, base: Any, words: list[object], place: Residence
) -> Any:
    """Issue a call that has several results, in the memory of `base` where it is given; return them."""
    storage: Any = None if base is None else base._handle.storage
    made: list[Handle] = []
    words[0] = template
    for spec in several.specs:
        if spec is not None:
            ref = next_ref()
            words.append(ref)
            made.append(Handle(ref, spec, place, Storage(spec) if base is None else storage))
    built = wrap_all(cls, made)
    if len(built) < len(several.specs):
        # Nobody wants the others.
        proxies = iter(built)
        built = [None if spec is None else next(proxies) for spec in several.specs]
    if base is None and len(made) > 1:
        relate(made)
    # The frame that has called `dispatch`; a thread of torch's C++ has none.
    line = line_from(_getframe(1).f_back)
    node = place.node
    with node.lock:
        born = node.append(words, line)
        for handle in made:
            handle.born = born
    if node.busy:
        try:
            node.session.throttle(node)
        except BaseException as error:
            drop_frames(error)
            raise
    return built if several.listed else tuple(built)


# A number of these says how large the result is.
_SIZES = torch.ops.aten.arange


def create(cls: type, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Turn one call of a factory into one instruction; return its proxy at once.

    Its device is in `kwargs`.
    """
    number = id(func)
    key: list[Any] = [number]
    words: list[object] = [0]
    for a in args:
        kind = type(a)
        if kind is list:
            key.append(tuple(a))
        else:
            # 2 == 2.0 in Python, and `arange` gives another dtype for each.
            key.append(kind)
            if kind is int and number not in EXACT and (number in NUMERIC or learn(func)):
                words.append(a)
            elif kind is not float:
                key.append(a)
            else:
                words.append(a)
                if func.overloadpacket is _SIZES:
                    key.append(a)
    for name, a in kwargs.items():
        if name != "device" and name != "pin_memory":
            key.append(name)
            key.append(a)
    place: Any = active_session().places.meant(kwargs.get("device"))
    signature = tuple(key)
    try:
        entry: Entry | None = place.cache.get(signature)
    except TypeError:
        entry = None
    if entry is None or entry[1] is None:
        return first_of_factory(cls, func, args, kwargs, signature, words, place)
    spec = entry[1]
    ref = next_ref()
    words[0] = entry[0]
    words.append(ref)
    handle = Handle(ref, spec, place, Storage(spec))
    out = wrap(cls, handle)
    handle.born = place.node.append(words, line_from(_getframe(1)))
    if place.node.busy:
        try:
            place.node.session.throttle(place.node)
        except BaseException as error:
            drop_frames(error)
            raise
    return out
