"""The instructions of the runtime that are no operator.

Checks, uploads, copies to the host, stamps, frees that streams share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from distruntime.errors import InternalError, NotSupportedError, ProtocolError
from distruntime.wire.codec import bytes_tensor, copy_bytes, failure_fields, pack_constant
from distruntime.wire.messages import (
    CHECK,
    DROP,
    FORGET,
    GIVE,
    HOST,
    LEARN,
    MARK,
    RELEASE,
    STAMP,
    TAKE,
    UPLOAD,
    WATCH,
    Failed,
    Plain,
    Reply,
    Warned,
)
from distruntime.wire.shared import Attached, KeptMemory

from ..machine import accelerator, lost
from ..values.functions import Tape
from ..values.mesh_lanes import Shards
from ..values.objects import Held, Poisoned, described, spec_fields
from ..values.staging import uploads
from ..values.step import Own, Slots, Step, Words, int_word, list_word, text_word
from ..values.streams import HostCopy, Stamp
from .state import State, request_of
from .watching import watched

# Torch's allocator gives addresses that are multiples of 64 bytes, and a frame of the socket
# begins anywhere. There kernels sum in another order, so a small weight gave other last bits than here. The
# memory of a frame cannot grow either, as `resize_` and `out=` want it. So what is small is copied out of it.
# From this number of bytes on, a copy would cost more than that is worth.
_LARGE = 1 << 20
_HOST = torch.device("cpu")
T = TypeVar("T")


class Instructions:
    """What the first words of these instructions stand for, in `table`."""

    def __init__(self, state: State, shared: Attached) -> None:
        self._state, self._shared = state, shared
        self._kept = KeptMemory()
        # Copies to the host from a device run on its stream here, as soon as their value is made.
        self._copying: dict[torch.device, torch.Stream | None] = {}
        # Each ref has the bits of the streams that have released its value.
        self._users: dict[int, int] = {}
        self.table: dict[Plain, Step] = {
            CHECK: Own("check", self._check),
            LEARN: Own("learn", self._learn),
            UPLOAD: Own("upload", self._upload),
            FORGET: Own("forget", self._forget),
            DROP: Own("drop", self._drop),
            STAMP: Own("stamp", self._stamp),
            RELEASE: Own("release", self._release),
            HOST: Own("a copy to the host", self._host),
            TAKE: Own("take", self._take),
            GIVE: Own("give", self._give),
            WATCH: Own("watch", self._watch),
            MARK: Own("mark", self._mark),
        }

    def _watch(self, slots: Slots, p: Words, i: int) -> int:
        """Run the next instruction, and tell the master what its kernel warns of."""
        if self._state.log(self._state.work(p)).info.get(p[i + 1]) is None:
            raise ProtocolError("WATCH stands before an instruction only")
        return self._watched(slots, p, i + 1)

    def _watched(self, slots: Slots, p: Words, i: int) -> int:
        """Run the instruction at `i`, and tell the master what its kernel warns of."""
        work = self._state.work(p)
        run = self._state.log(work).templates[p[i]]
        after, heard = watched(lambda: run(slots, p, i))
        for warning in heard:
            self._state.send(Warned(work.segment.seq, work.segment.start + i, *warning), None)
        return after

    def _check(self, slots: Slots, p: Words, i: int) -> int:
        """Run the next instruction.

        Make its results what the master predicted, and report where they were not.
        """
        number, predicted = int_word(p[i + 1]), list_word(p[i + 2])
        log = self._state.log(self._state.work(p))
        template = log.info.get(p[i + 3])
        if template is not None and template.guard is not None:
            template.guard.expect(predicted, slots, p, i + 3)
        if template is None:
            raise ProtocolError("CHECK stands before an instruction only")
        after = self._watched(slots, p, i + 3)
        for k, (offset, expected) in enumerate(zip(template.writes, predicted)):
            value = slots[p[i + 3 + offset]]
            if isinstance(value, Shards):
                for lane, one in enumerate(value):
                    try:
                        value[lane] = self._as_promised(
                            one, list_word(expected), template.name, [number, k], p
                        )
                    except (RuntimeError, NotSupportedError) as error:
                        value[lane] = Poisoned(self._state.failure(p, i + 3, error, template.name, ""))
                continue
            try:
                slots[p[i + 3 + offset]] = self._as_promised(
                    value, list_word(expected), template.name, [number, k], p
                )
            except (RuntimeError, NotSupportedError) as error:
                self._state.fail(template, slots, p, i + 3, error)
        return after

    def _as_promised(
        self, value: object, expected: list[Plain], name: str, which: list[Plain], p: Words
    ) -> object:
        """Return a result as the master predicted it.

        Report where it is not, and raise where it cannot be made so.
        """
        # It is None if C++ left it undefined, and whoever reads it is told so.
        if value is None or isinstance(value, Poisoned):
            return value
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a result of {name} is no tensor")
        real = spec_fields(value)
        if real == expected:
            return value
        self._state.work(p).corrections.append([*which, real])
        sizes, strides, *rest = expected
        if real[0] != sizes or real[3:] != rest[1:]:
            raise RuntimeError(
                f"{name} gave {tuple(value.shape)} {real[3]!s} where its meta kernel promised "
                f"{tuple(list_word(sizes))} {rest[1]!s}; distruntime has corrected what it knew: run it again"
            )
        # The master's strides hold for this value; the next one gets the real ones.
        if real[2] == 0 == rest[0]:
            laid_out = [int_word(n) for n in list_word(strides)]
            return torch.empty_strided(value.shape, laid_out, dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value

    def _take(self, slots: Slots, p: Words, i: int) -> int:
        value = slots.get(p[i + 1])
        if isinstance(value, Shards):
            value = value[int_word(p[i + 2])]
        if value is None:
            error = InternalError("the value of a mesh is not here")
            value = Poisoned(self._state.failure(p, i, error, "member", ""))
        # The memory is one, and what one of them does to its own sizes and strides is not.
        slots[p[i + 3]] = value.detach() if isinstance(value, torch.Tensor) else value
        return i + 4

    def _give(self, slots: Slots, p: Words, i: int) -> int:
        values = [slots[ref] for ref in list_word(p[i + 1])]
        slots[p[i + 2]] = values[0] if len(values) == 1 else Shards(values)
        return i + 3

    def _learn(self, slots: Slots, p: Words, i: int) -> int:
        """Run the next instruction and reply with the specs of its results."""
        request = request_of(p[i + 1])
        log = self._state.log(self._state.work(p))
        template = log.info.get(p[i + 2])
        if template is None:
            raise ProtocolError("LEARN stands before an instruction only")
        position = self._state.work(p).segment.start + i + 2
        after = self._watched(slots, p, i + 2)
        results = [slots[p[i + 2 + k]] for k in template.writes]
        bad = next((v.failure for v in results if isinstance(v, Poisoned)), None)
        if bad is None:
            bad = next((f for f in self._state.work(p).failures if f.position == position), None)
        if bad is None:
            bad = next(
                (v.failure for k in template.reads if isinstance(v := slots.get(p[i + 2 + k]), Poisoned)),
                None,
            )
        if bad is None:
            # What a kernel has told of its operands leaves the worker here.
            bad = self._state.spoilt_by(self._state.log_number(p), position)
        if bad is None:
            try:
                shown = [None if isinstance(v, (Tape, Held)) else v for v in results]
                self._state.send(
                    Reply(
                        request,
                        [spec_fields(v) if isinstance(v, torch.Tensor) else pack_constant(v) for v in shown],
                    ),
                    None,
                )
                return after
            except Exception as error:
                # Whatever the error is, it is the answer.
                self._state.fail(template, slots, p, i + 2, error)
                bad = self._state.work(p).failures[-1]
        self._state.send(Failed(request, failure_fields(bad)), None)
        return after

    def _upload(self, slots: Slots, p: Words, i: int) -> int:
        ref, device, data = p[i + 1], text_word(p[i + 2]), p[i + 5]
        dtype, sizes = text_word(p[i + 3]), [int_word(n) for n in list_word(p[i + 4])]
        try:
            if isinstance(data, list):
                name, nbytes = data
                bytes_there = memoryview(self._shared[text_word(name)])[: int_word(nbytes)]
                value = self._from_shared(device, dtype, sizes, bytes_there)
            elif isinstance(data, int):
                value = bytes_tensor(dtype, sizes, self._state.work(p).payloads[data])
            elif isinstance(data, bytes):
                value = bytes_tensor(dtype, sizes, data)
            else:
                raise TypeError(f"an upload of {data!r:.80}")
            mesh, budget = self._state.work(p).mesh, self._state.budget
            if device == "member" and mesh is None:
                raise TypeError("an upload to a mesh's members, in no mesh's log")
            names = mesh.devices if mesh is not None and device == "member" else [device]
            on = [self._state.devices.real(torch.device(name)) for name in names]
            lost.require(on)
            if budget is not None:
                budget.require(on, value.nbytes, "an upload")
            if device == "member":
                copies = Shards(self._uploaded(value, member) for member in on)
                slots[ref] = copies if len(copies) > 1 else copies[0]
            elif accelerator.asynchronous(on[0]):
                self._used(slots.get(ref))
                # The device may not have room for both. The old block can serve the new value, which comes
                # after it on this stream.
                slots.pop(ref, None)
                slots[ref] = self._either_time(on[0], lambda: uploads().to(on[0], value))
            else:
                slots[ref] = value.clone() if value.nbytes < _LARGE else value
            if budget is not None:
                for real in on:
                    budget.add(real, value.nbytes, "an upload")
        except (RuntimeError, MemoryError, OSError) as error:
            # An OSError says that there is no memory to map.
            text = f"{tuple(sizes)} {dtype} to {device}"
            slots[ref] = Poisoned(self._state.failure(p, i, error, "upload", text))
        return i + 6

    def _from_shared(self, device: str, dtype: str, sizes: list[int], there: memoryview) -> torch.Tensor:
        """Return a tensor of bytes in shared memory: over them for an accelerator's upload, as that ends
        before the next instruction begins; elsewhere over a copy, which may stay.
        """
        if device != "member" and accelerator.asynchronous(self._state.devices.real(torch.device(device))):
            return bytes_tensor(dtype, sizes, there)
        kept = self._kept.allocate(len(there))
        copy_bytes(kept, there)
        return bytes_tensor(dtype, sizes, kept)

    def _uploaded(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of an upload for one of several members."""
        if accelerator.asynchronous(device):
            return uploads().to(device, value)
        return torch.empty_like(value, device=device).copy_(value)

    def _forget(self, slots: Slots, p: Words, i: int) -> int:
        log = self._state.log(self._state.work(p))
        # The reader adds to it meanwhile, and may make its entries anew.
        with self._state.gate:
            first = int_word(p[i + 1])
            for number in [n for n in log.info.copy() if int_word(n) < first]:
                del log.templates[number], log.info[number]
        return i + 2

    def _drop(self, slots: Slots, p: Words, i: int) -> int:
        log, number = self._state.log(self._state.work(p)), int_word(p[i + 1])
        with self._state.gate:
            if number in log.info:
                del log.templates[number], log.info[number]
        return i + 2

    def _stamp(self, slots: Slots, p: Words, i: int) -> int:
        mine, mesh, event = self._state.mine(), self._state.work(p).mesh, None
        name = text_word(p[i + 2]) if mesh is None else mesh.devices[0]
        if name not in self._state.devices.names:
            raise ProtocolError(f"a stamp of {name!r:.80}, which this worker does not offer")
        device = self._state.devices.real(torch.device(name))
        if accelerator.asynchronous(device) and device not in accelerator.lost:
            with lost.tolerated("an event"):
                event = accelerator.timed_event(mine.on(device))
        slots[p[i + 1]] = Stamp(time.perf_counter_ns(), event)
        return i + 3

    def _mark(self, slots: Slots, p: Words, i: int) -> int:
        self._state.mine().mark(self._state.work(p).segment.start + i + 1)
        return i + 1

    def _release(self, slots: Slots, p: Words, i: int) -> int:
        ref, count = int_word(p[i + 1]), int_word(p[i + 2])
        self._used(slots.get(ref))
        # Where the device is lost and nobody has noticed, to let go of the value would end the process.
        value = slots.get(ref)
        if isinstance(value, torch.Tensor) and accelerator.asynchronous(value.device):
            with lost.tolerated("a free"):
                accelerator.require_well(value.device)
        del value
        with self._state.gate:
            released = self._users.pop(ref, 0) + 1
            if released < count:
                self._users[ref] = released
            else:
                slots.pop(ref, None)
        return i + 3

    def _used(self, value: object) -> None:
        """Keep torch's allocator from giving away a value that this stream may let go of, before its kernels
        have run.
        """
        if isinstance(value, torch.Tensor) and accelerator.asynchronous(value.device):
            if value.device not in accelerator.lost:
                with lost.tolerated("a free"):
                    accelerator.used_on(value, self._state.mine().on(value.device))

    def _host(self, slots: Slots, p: Words, i: int) -> int:
        made = [int_word(n) for n in list_word(p[i + 3])]
        try:
            value = slots.get(p[i + 1])
            if value is None:
                raise InternalError("the value to be copied is not here")
            if not isinstance(value, (torch.Tensor, Poisoned)):
                raise TypeError("a copy to the host is of one tensor")
            budget = self._state.budget
            if budget is not None and isinstance(value, torch.Tensor):
                budget.require([_HOST], value.nbytes, "a copy to the host")
            slots[p[i + 2]] = (
                value
                if isinstance(value, Poisoned)
                else self._either_time(value.device, partial(self._copied, value, made))
            )
            if budget is not None and isinstance(value, torch.Tensor):
                budget.add(_HOST, value.nbytes, "a copy to the host")
        except (RuntimeError, InternalError) as error:
            # There is no memory, or a kernel before this one has failed, or the value is not here.
            slots[p[i + 2]] = Poisoned(
                self._state.failure(p, i, error, "copy to the host", described([slots.get(p[i + 1])]))
            )
        return i + 4

    def _either_time(self, device: torch.device, copy: Callable[[], T]) -> T:
        """Return what `copy` returns, if need be the second time.

        The first time it may have asked for a buffer that another device has used, which is lost.
        """
        try:
            return copy()
        except torch.AcceleratorError as error:
            lost.look(error, "a copy")
            lost.require([device])
            return copy()

    def _copied(self, value: torch.Tensor, made: list[int]) -> HostCopy:
        """Return a copy of a value in memory of the host, which waits for `made`: [stream, position, ...].

        The other work of this stream that is under way does not hold it up. What follows on this stream comes
        after the copy.
        """
        if not accelerator.asynchronous(value.device):
            return HostCopy(value)
        streams = self._state.streams
        marks = [
            streams[number].marked(position, value.device) if number in streams else None
            for number, position in zip(made[::2], made[1::2])
        ]
        # Without a mark behind its maker the copy has to stand at the end of this stream.
        if not marks or None in marks:
            return HostCopy(value)
        # There is nothing to wait for, and no other work. A stream beside this one takes as long as the copy.
        makers = [event for events in marks if events for event in events]
        if accelerator.current_stream(value.device).query() and all(event.query() for event in makers):
            return HostCopy(value)
        if value.device not in self._copying:
            self._copying[value.device] = accelerator.copying_stream(value.device)
        copying = self._copying[value.device]
        if copying is None:
            return HostCopy(value)
        for event in makers:
            with lost.tolerated("a copy to the host"):
                copying.wait_event(event)
        with accelerator.entered(copying):
            copy = HostCopy(value)
        if isinstance(copy.event, accelerator.Moment):
            accelerator.current_stream(value.device).wait_event(copy.event)
        return copy
