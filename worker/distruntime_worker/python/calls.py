"""Calls of the user's own Python: functions, methods, classes, as instructions of the log.

A function that has come is a value in a slot, and so is any object that one has returned: a `Held`. So a call
is a template like any other, and whatever stands around instructions stands around it: streams, failures as
values, budgets, cancelling, meshes.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import cloudpickle
import msgpack
import torch

from distruntime.errors import NotSupportedError, ProtocolError, UsageError
from distruntime.wire.codec import ALIGNED, END, tensor_bytes, unpack_constant
from distruntime.wire.messages import Plain

from ..machine import accelerator
from ..values.functions import Tape
from ..values.memory_set import MemorySet
from ..values.objects import Held, Poisoned
from ..values.step import Operator
from ..values.template import Template
from .operations import PAST_END, named
from .running import Around
from .skeleton import Real, arguments, load_code, missing
from .structure import Memories, can_be_proxy, described, leaves, owned, strangers

# Numpy has these dtypes, too.
_OF_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_COPIED = (
    "{} returned a tensor in memory that somebody else holds (an object, a global, or an argument), and for "
    "operands of these sizes it has returned other memory before: this one is a copy. "
    'Say returns="ask" to share the memory, or return x.clone()'
)
# A master calls this with what may be poisoned, and it says what became of that.
AFTER = "members after"
# A pickle of up to so many bytes is replied itself; a larger one is a tensor of bytes, which a fetch brings.
INLINE = 1 << 14


def note_writes(step: Template, args: list[Plain]) -> None:
    """Say of a call which operands it writes: those that the master names, and all where it names none."""
    match args:
        case [_, _, _, _, _, _, writes, _, _, ["list", *operands]] if step.name.startswith("python::call"):
            offsets = step.reads[len(step.reads) - len(operands) :]
            if writes is None:
                step.unsaid = offsets
                return
            numbers = unpack_constant(writes)
            if not isinstance(numbers, list) or not all(k in range(len(offsets)) for k in numbers):
                raise ProtocolError(f"a call that writes the operands {writes!r:.60}")
            step.mutates = [offsets[k] for k in numbers if isinstance(k, int)]


def _awaited(result: object) -> object:
    """Return what a coroutine returns, and any other result as it is."""
    return asyncio.run(result) if isinstance(result, Coroutine) else result


class Calls:
    """The calls of one session, and what stands `around` each. `refused` says why this worker runs none, or
    nothing. `own` has what a master calls by name besides what it does with objects. What objects may hold
    is added to `lent`. `stream` returns the device's stream that this thread issues to, or None.
    """

    def __init__(
        self,
        refused: str,
        device: Real,
        around: Around,
        own: Mapping[str, Operator],
        lent: MemorySet,
        stream: Callable[[], torch.Stream | None],
    ) -> None:
        self._refused, self._device, self._around, self._own = refused, device, around, own
        self._lent, self._memories, self._stream = lent, Memories(lent), stream
        self.table: dict[str, Operator] = {
            "python::load": self._load,
            "python::call": self._call,
            "python::take": self._take,
            "python::pickle": self._pickle,
            "python::backward": self._backward,
        }

    def _load(self, pickled: torch.Tensor) -> Held:
        """Return a function, or any other object, that has come."""
        if self._refused:
            # The call fails, and that is one failure for all that follows of it.
            return Held(None)
        return Held(load_code(bytes(pickled.numpy()), self._device))

    def _call(
        self,
        name: str,
        promised: Plain,
        modes: list[object],
        timeout: float | None,
        random: bool,
        wanted: list[bool] | None,
        writes: list[int] | None,
        what: Held | str,
        pickled: bytes | torch.Tensor,
        operands: list[object],
    ) -> object:
        """Call a function; return the leaves of its result, as `promised`.

        Where "ask" is promised, return the whole result, its structure, and the tape; where "own" is, what
        somebody else holds is a copy. `wanted` says which
        operands' gradients will be wanted; the tape is last then. `modes` says whether the body records for
        autograd, and which dtype an autocast around it has, if there is one.
        """
        if self._refused:
            raise NotSupportedError(self._refused)
        # Others read these of the template.
        del random, writes
        if what != AFTER and any(isinstance(operand, Poisoned) for operand in (what, *operands)):
            raise UsageError("an operand is poisoned")
        for operand in operands:
            if isinstance(operand, torch.Tensor):
                self._lent.add(operand.untyped_storage())
        given = [_value(operand) for operand in operands]
        gate = None if wanted is None else Gate(name)
        inputs = [] if gate is None or wanted is None else gate.stand_for(given, wanted)
        function = what.value if isinstance(what, Held) else self._own.get(what) or named(what)
        data = bytes(pickled.numpy()) if isinstance(pickled, torch.Tensor) else pickled
        args, kwargs = arguments(data, given, self._device)
        box = list[object]()

        def elsewhere() -> dict[int, bool]:
            # An object, and what is asked about, is what it is.
            if isinstance(promised, str):
                return {}
            return strangers(box, promised, operands, wanted is not None)

        with (
            gate or _no_gate,
            torch.set_grad_enabled(bool(modes[0])),
            _autocast(modes[1], given),
            self._in_order(),
        ):
            copied = self._run(name, function, args, kwargs, timeout, box, elsewhere)
        if promised in ("ask", "own"):
            told = self._told(box, operands, wanted is not None)
            result = box.pop()
            if promised == "own":
                result, told = owned(result, told, name)
            tape = None if gate is None else CallTape(gate, inputs, leaves(result, told, name))
            return [Held(result), told, tape]
        result = box.pop()
        if isinstance(promised, str):
            return Held(result)
        found = [*leaves(result, promised, name)]
        for k in copied:
            found[k] = _copied(found[k])
        if gate is None:
            return found
        return [*map(_detached, found), CallTape(gate, inputs, found)]

    def _in_order(self) -> AbstractContextManager[None]:
        """Order what a function issues to other devices of this worker with the stream that it is called on.

        The master has ordered that one alone.
        """
        return accelerator.all_in_order(self._stream(), [s.device for s in accelerator.default_streams()])

    def _backward(self, tape: CallTape, *grads: torch.Tensor | None) -> list[torch.Tensor]:
        with self._in_order():
            return _backward(tape, *grads)

    def _run(
        self,
        name: str,
        function: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        timeout: float | None,
        box: list[object],
        elsewhere: Callable[[], dict[int, bool]],
    ) -> dict[int, bool]:
        """Put what a call returns into the box. Return which of its tensors are `elsewhere`, and warn."""
        call: Operator = function  # type: ignore[assignment]
        # What interrupts the call may strike anywhere up to the end of `finish`.
        running = self._around.call(name, timeout)
        try:
            try:
                running.begin()
                box.append(_awaited(call(*args, **kwargs)))
                found = elsewhere()
                if any(found.values()):
                    running.warn("UserWarning", _COPIED.format(name))
                return found
            finally:
                running.finish()
        except BaseException as error:
            running.finish()
            if isinstance(error, ModuleNotFoundError):
                # It stays the same error: who has called the function may catch it.
                error.msg = missing(error)
            failure = running.failure(error)
            if failure is None:
                raise
            raise failure from error

    def _told(self, box: list[object], operands: list[object], recorded: bool) -> Plain:
        if box[0] is PAST_END:
            return END
        return described(box, operands, self._memories, recorded)

    def _take(self, name: str, promised: Plain, held: Held) -> list[object]:
        """Return the leaves of a whole result that "ask" has kept."""
        return [*map(_detached, leaves(held.value, promised, name))]

    def _pickle(self, held: Held | torch.Tensor) -> bytes | torch.Tensor:
        """Return a pickle of an object: bytes, or a tensor of them."""
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(file, buffers).dump(_value(held))
        except UsageError:
            # What stands for an object in a member's process says what is wrong.
            raise
        except Exception as error:
            # Any class of the user's may raise anything while it is pickled.
            raise UsageError(
                f"{type(_value(held)).__name__} cannot be pickled, so it stays on the worker: "
                f"{type(error).__name__}: {error}. Use it there, through its attributes and methods"
            ) from error
        if not buffers and file.tell() <= INLINE:
            return file.getvalue()
        return _assembled([file.getbuffer(), *(buffer.raw() for buffer in buffers)])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a value for the master, where a tensor of a GPU becomes one of the CPU."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        def apart(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < INLINE:
                return True
            buffers.append(buffer)
            return False

        super().__init__(file, protocol=5, buffer_callback=apart)

    def reducer_override(self, thing: object) -> object:
        """Say how to pickle a tensor; leave all else to cloudpickle."""
        if type(thing) is not torch.Tensor or not can_be_proxy(thing):
            return super().reducer_override(thing)
        here = thing.detach().cpu().resolve_conj().resolve_neg()
        if thing.requires_grad or thing.dtype not in _OF_NUMPY:
            return here.requires_grad_(thing.requires_grad).__reduce_ex__(5)
        # Its bytes are copied once, as an array's are.
        return torch.from_numpy, (here.numpy(),)


def _autocast(dtype: object, operands: Sequence[object]) -> AbstractContextManager[object]:
    """Return the autocast that the master has around a call, for the devices of its operands."""
    contexts = ExitStack()
    if isinstance(dtype, torch.dtype):
        for kind in {t.device.type for t in operands if isinstance(t, torch.Tensor)} or {"cpu"}:
            contexts.enter_context(torch.autocast(kind, dtype))
        return contexts
    return _plainly


_plainly = nullcontext()


def _value(operand: object) -> object:
    return operand.value if isinstance(operand, Held) else operand


def _copied(leaf: object) -> object:
    """Return a tensor's value in memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.set_grad_enabled(leaf.requires_grad):
        return leaf.clone()


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class Gate:
    """What the gradients of a call's operands pass: open inside the call, and in the backward of its tape.

    It does not hold the operands. They hold it, and a cycle would keep them until Python looks for cycles.
    """

    def __init__(self, name: str) -> None:
        self._name, self._open = name, False

    def stand_for(self, given: list[object], wanted: Sequence[bool]) -> list[torch.Tensor]:
        """Put what stands for the wanted operands in the call into their places; return it."""
        found = []
        for k, wants in enumerate(wanted):
            if wants:
                operand = given[k]
                assert isinstance(operand, torch.Tensor)
                given[k] = leaf = operand.detach().requires_grad_()
                leaf.register_hook(self._pass)
                found.append(leaf)
        return found

    def _pass(self, gradient: torch.Tensor) -> None:
        """Refuse a gradient that nobody would bring back."""
        del gradient
        if not self._open:
            raise NotSupportedError(
                f"{self._name} has kept in an object what it computed of an argument that requires grad, and "
                "gradients do not come back through objects: return the tensors themselves, or in tuples, "
                "lists and dicts, or call it with x.detach()"
            )

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *error: object) -> None:
        self._open = False


_no_gate = nullcontext()


class CallTape(Tape):
    """The tape of a call."""

    __slots__ = ("gate",)

    def __init__(self, gate: Gate, inputs: list[torch.Tensor], results: Iterable[object]) -> None:
        super().__init__(inputs, [one for one in results if isinstance(one, torch.Tensor)])
        self.gate = gate


def _backward(tape: CallTape, *grads: torch.Tensor | None) -> list[torch.Tensor]:
    """Run a function's backward; return the gradients of its differentiable operands, zeros for unused ones.

    Parameters that the worker's own objects hold accumulate theirs, as under `backward()` there.
    """
    pairs = [(o, g) for o, g in zip(tape.outputs, grads) if g is not None and o.requires_grad]
    before = [leaf.grad for leaf in tape.inputs]
    for leaf in tape.inputs:
        leaf.grad = None
    if pairs:
        with torch.enable_grad(), tape.gate:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=True)
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in tape.inputs]
    for leaf, own in zip(tape.inputs, before):
        leaf.grad = own
    for grad in found:
        # Autograd runs a backward on the stream of its forward, and the memory of the results belongs there.
        if accelerator.asynchronous(grad.device):
            accelerator.used_on(grad, accelerator.current_stream(grad.device))
    return found


def _assembled(parts: Sequence[memoryview]) -> torch.Tensor:
    """Return a tensor of 8 bytes for a header's length, the header with each part's length, and the parts.

    Each part begins at a multiple of `ALIGNED`. `distruntime/python/objects.py` takes it apart.
    """
    header: bytes = msgpack.packb([part.nbytes for part in parts])
    places, end = [], 8 + len(header)
    for part in parts:
        begin = -(-end // ALIGNED) * ALIGNED
        places.append(begin)
        end = begin + part.nbytes
    whole = torch.empty(end, dtype=torch.uint8)
    room = tensor_bytes(whole)
    room[:8] = len(header).to_bytes(8, "little")
    room[8 : 8 + len(header)] = header
    for begin, part in zip(places, parts):
        if part.nbytes:
            room[begin : begin + part.nbytes] = part.cast("B")
    return whole
