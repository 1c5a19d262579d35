"""Runs segments of the log and answers fetches: messages in, messages out, no sockets.

Two threads call it: the daemon's reader, which answers what is ready at once, and one thread that runs segments.
Invariant: a fetch is answered when the log has run up to its position `after`, by whichever of the two gets there last.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distruntime.errors import InternalError, NotSupportedError, ProtocolError
from distruntime.wire.codec import Buffer, bytes_tensor
from distruntime.wire.messages import (
    CHECK,
    FIRST_TEMPLATE,
    FORGET,
    LEARN,
    UPLOAD,
    Done,
    Failed,
    Failure,
    Fetch,
    Part,
    Reply,
    Segment,
)
from distruntime.wire.shared import Attached, KeptMemory

from .devices import Devices
from .functions import FUNCTIONS, Tape
from .objects import INLINE_BYTES, PART_BYTES, Poisoned, described, failure, failure_fields, plain, render, spec_fields, wire_tensor
from .template import Run, Template, operator

Send = Callable[..., Any]  # message, payload or None, copy=True; see daemon

_SENT = 0.0002  # seconds between looks whether the socket has read a large tensor

_MOST_FAILURES = 64  # reported by one segment with text; a loop of failing instructions says the same thing anyway


class Executor:
    """The state of one session on one worker."""

    def __init__(self, devices: Devices, send: Send) -> None:
        self._devices = devices
        self._send = send
        self.slots: dict[int, Any] = {}
        self._templates: dict[int, Run] = {CHECK: self._check, LEARN: self._learn, UPLOAD: self._upload, FORGET: self._forget}
        self._info: dict[int, Template] = {}
        self._next_template = FIRST_TEMPLATE
        self._payloads: Sequence[Buffer] = ()
        self._failures: list[Failure] = []
        self._corrections: list[Any] = []
        self._orphans: list[Failure] = []  # of instructions without results, such as a check: the next read brings them
        self._segment = Segment(0, 0, [], [])
        self.received = 0  # seq of the last segment that the reader accepted: a segment that is sent again is dropped
        self.executed = 0  # position up to which the log has run
        self._waiting: list[Fetch] = []
        self._gate = threading.Lock()  # guards who takes a fetch out of _waiting
        self._started = 0.0
        self._shared = Attached()
        self._kept = KeptMemory()
        self._thread: int | None = None  # the executing thread
        self.running = False  # whether it runs a segment
        self.closed = False  # whether the master is gone, and nothing is worth waiting for

    # -- segments (the executing thread) -----------------------------------------------------------------------------------------

    def run(self, segment: Segment, payloads: Sequence[Buffer]) -> None:
        """Run one segment and send its `Done`; raise `ProtocolError` where its words make no sense."""
        self.running = True
        self._segment, self._payloads, self._started, self._thread = segment, payloads, time.monotonic(), threading.get_ident()
        for fields in segment.templates:
            self._add(*fields)
        words, slots, templates, waiting, start = segment.words, self.slots, self._templates, self._waiting, segment.start
        i, n = 0, len(words)
        try:
            while i < n:
                word = words[i]
                if word < 0:
                    slots.pop(-word, None)
                    i += 1
                else:
                    i = templates[word](slots, words, i)
                    if waiting:
                        self._serve(start + i)
        except (IndexError, TypeError, KeyError) as error:
            raise ProtocolError(f"segment {segment.seq} makes no sense at word {i} of {n}: {type(error).__name__}: {error}") from error
        self._payloads = ()
        self._send(Done(segment.seq, [failure_fields(f) for f in self._failures[:_MOST_FAILURES]], self._corrections), None)
        self.executed = start + n  # only now: see _serve
        self._failures, self._corrections = [], []
        if waiting:
            self._serve(start + n)
        self.running = False

    def _add(self, number: int, name: str, args: list[Any], kwargs: dict[str, Any], results: Any) -> None:
        if number != self._next_template:
            raise ProtocolError(f"template {number} came where {self._next_template} was expected")
        self._next_template += 1
        call = FUNCTIONS.get(name) or operator(name)
        template = Template(name, call, args, kwargs, results, self._devices.real, self._fail)
        self._templates[number] = template.run
        self._info[number] = template

    def _fail(self, template: Template, slots: dict[int, Any], p: list[Any], i: int, error: BaseException) -> None:
        """Poison the results of the instruction at `i`, and whatever it would have written, with its first cause."""
        operands = [slots.get(p[i + k]) for k in template.reads]
        cause = next((v.failure for v in operands if isinstance(v, Poisoned)), None)
        if cause is None:
            if any(v is None for v in operands):
                error = InternalError(f"an operand of {template.name} is not here: {error!r}")
            cause = failure(error, seq=self._segment.seq, position=self._segment.start + i, op=template.name, operands=described(operands))
            self._failures.append(cause)
            if not template.writes and not template.mutates:
                self._orphans.append(cause)
        poisoned = Poisoned(cause)
        for k in template.writes:
            slots[p[i + k]] = poisoned
        for k in template.mutates:
            written = slots.get(p[i + k])
            if isinstance(written, torch.Tensor):  # its views and its base hold the same bytes
                memory = written.untyped_storage()._cdata
                for ref, value in list(slots.items()):
                    if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory:
                        slots[ref] = poisoned
            slots[p[i + k]] = poisoned

    def _check(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        """Run the next instruction; make its results what the master predicted, and report where they were not."""
        number, predicted = p[i + 1], p[i + 2]
        template = self._info.get(p[i + 3])
        after = self._templates[p[i + 3]](slots, p, i + 3)
        if template is None:
            raise ProtocolError("CHECK stands before an instruction only")
        for k, (offset, expected) in enumerate(zip(template.writes, predicted)):
            value = slots[p[i + 3 + offset]]
            if value is None or isinstance(value, Poisoned):  # None: C++ left it undefined; who reads it is told so
                continue
            try:
                real = spec_fields(value)
                if real == expected:
                    continue
                self._corrections.append([number, k, real])
                if real[0] != expected[0] or real[3:] != expected[3:]:
                    raise RuntimeError(
                        f"{template.name} gave {tuple(real[0])} {real[3]} where its meta kernel promised "
                        f"{tuple(expected[0])} {expected[3]}; distruntime now knows better: run it again"
                    )
                if real[2] == 0 == expected[2]:  # the master's strides hold for this value; the next one gets the real ones
                    slots[p[i + 3 + offset]] = torch.empty_strided(expected[0], expected[1], dtype=value.dtype, device=value.device).copy_(
                        value
                    )
            except (RuntimeError, NotSupportedError) as error:
                self._fail(template, slots, p, i + 3, error)
        return after

    def _learn(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        """Run the next instruction and reply with the specs of its results."""
        request, template = p[i + 1], self._info.get(p[i + 2])
        if template is None:
            raise ProtocolError("LEARN stands before an instruction only")
        before = len(self._failures)
        after = template.run(slots, p, i + 2)
        results = [slots[p[i + 2 + k]] for k in template.writes]
        bad = next((v.failure for v in results if isinstance(v, Poisoned)), None)
        if bad is None and len(self._failures) > before:
            bad = self._failures[-1]
        if bad is None:
            bad = next((v.failure for k in template.reads if isinstance(v := slots.get(p[i + 2 + k]), Poisoned)), None)
        if bad is None:
            try:
                shown = [None if isinstance(v, Tape) else v for v in results]
                self._send(Reply(request, [spec_fields(v) if isinstance(v, torch.Tensor) else plain(v) for v in shown]), None)
                return after
            except Exception as error:  # whatever it is, it is the answer
                self._fail(template, slots, p, i + 2, error)
                bad = self._failures[-1]
        self._send(Failed(request, failure_fields(bad)), None)
        return after

    def _upload(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        ref, device, dtype, sizes, data = p[i + 1 : i + 6]
        try:
            if isinstance(data, list):
                name, nbytes = data
                kept = self._kept.take(nbytes)
                kept[:] = memoryview(self._shared[name])[:nbytes]
                value = bytes_tensor(dtype, sizes, kept)
            else:
                value = bytes_tensor(dtype, sizes, self._payloads[data] if isinstance(data, int) else data)
            real = self._devices.real(torch.device(device))
            slots[ref] = value if real.type == "cpu" else value.to(real)
        except RuntimeError as error:
            text = f"{tuple(sizes)} {dtype} to {device}"
            cause = failure(error, seq=self._segment.seq, position=self._segment.start + i, op="upload", operands=text)
            self._failures.append(cause)
            slots[ref] = Poisoned(cause)
        return i + 6

    def _forget(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        for number in [n for n in self._info if n < p[i + 1]]:
            del self._templates[number], self._info[number]
        return i + 2

    # -- fetches (either thread) -------------------------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Answer `fetch` if the log has run far enough; else leave it to the executing thread."""
        if self.executed < fetch.after:
            with self._gate:
                self._waiting.append(fetch)
            if self.executed < fetch.after and (fetch.form == "done" or self.status()[0] < fetch.after):
                return
            with self._gate:  # the log got there meanwhile: one of the two threads takes the fetch out
                if fetch not in self._waiting:
                    return
                self._waiting.remove(fetch)
        self._answer(fetch)

    def _serve(self, position: int) -> None:
        with self._gate:
            # "done" is answered when the segment's `Done` has gone: whoever waits for it wants to hear of failures first.
            ready = [f for f in self._waiting if f.after <= position and (f.form != "done" or self.executed >= f.after)]
            for fetch in ready:
                self._waiting.remove(fetch)
        for fetch in ready:
            self._answer(fetch)

    def _answer(self, fetch: Fetch) -> None:
        if fetch.form == "done":
            self._send(Reply(fetch.request, None), None)
            return
        value = self.slots.get(fetch.ref)
        if isinstance(value, Poisoned):
            self._send(Failed(fetch.request, failure_fields(value.failure)), None)
            return
        if self._orphans and fetch.form != "text":
            self._send(Failed(fetch.request, failure_fields(self._orphans.pop(0))), None)
            return
        try:
            if value is None:
                raise InternalError(f"the value {fetch.ref} is not here")
            self._reply(fetch, value)
        except Exception as error:  # whatever it is, it is the answer
            operands = described([value]) if value is not None else ""
            cause = failure(error, seq=self._segment.seq, position=fetch.after, op=f"fetch ({fetch.form})", operands=operands)
            self._send(Failed(fetch.request, failure_fields(cause)), None)

    def _reply(self, fetch: Fetch, value: torch.Tensor) -> None:
        """Send a value in the form that was asked for.

        When this returns the bytes have been read, so that later instructions may write the tensor.
        """
        request = fetch.request
        if fetch.form == "item":
            self._send(Reply(request, plain(value.item())), None)
            return
        if fetch.form == "text":
            self._send(Reply(request, render(value, dict(fetch.options))), None)
            return
        head, data = wire_tensor(value)
        if "shared" in fetch.options:
            memoryview(self._shared[fetch.options["shared"]])[: len(data)] = data
            self._send(Reply(request, [*head, "shared"]), None)
        elif len(data) <= INLINE_BYTES:
            self._send(Reply(request, [*head, bytes(data)]), None)
        elif len(data) <= PART_BYTES:
            self._send(Reply(request, [*head, None]), data)
        else:
            # One memory copy more on this way makes it a quarter slower than a plain socket.
            parts = [self._send(Part(request, k), data[k : k + PART_BYTES], copy=False) for k in range(0, len(data), PART_BYTES)]
            self._send(Reply(request, [*head, "parts"]), None)
            while parts[-1] is not None and not parts[-1].done and not self.closed:
                time.sleep(_SENT)

    def status(self) -> list[Any]:
        """Return [position, operator that is running or None, seconds since its segment started], read off the executing thread's frame.

        Looking from outside costs the hot path nothing; keeping a note per instruction would cost it 30 ns.
        """
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        while frame is not None and frame.f_code is not Executor.run.__code__:
            frame = frame.f_back
        if frame is None:
            return [self.executed, None, 0.0]
        names = frame.f_locals
        i, words, start = names.get("i"), names.get("words"), names.get("start")
        if i is None or words is None or start is None:
            return [self.executed, None, 0.0]
        position = start + i
        if i >= len(words):
            return [position, None, 0.0]
        while isinstance(words[i], int) and words[i] in (CHECK, LEARN):
            i += 3 if words[i] == CHECK else 2
        info = self._info.get(words[i])
        return [position, info.name if info else "upload", time.monotonic() - self._started]
