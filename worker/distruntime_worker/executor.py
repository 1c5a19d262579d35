"""Runs segments of the log and answers fetches: messages in, messages out, no sockets.

Several threads call it: the daemon's reader, which answers what is ready at once, and one for each stream, which run segments.
Invariant: a fetch is answered when each stream that it names has run up to its position, by whichever thread gets there last.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from distruntime.errors import InternalError, NodeFailed, NotSupportedError, ProtocolError, StreamCancelled, WaitTimeout
from distruntime.wire.codec import bytes_tensor, copy_bytes
from distruntime.wire.messages import (
    AWAIT,
    CHECK,
    FIRST_TEMPLATE,
    FORGET,
    HOST,
    LEARN,
    RELEASE,
    STAMP,
    UPLOAD,
    WAIT,
    Cancel,
    Done,
    Failed,
    Failure,
    Fetch,
    Message,
    Notify,
    OpenStream,
    Part,
    Reply,
    Signal,
)
from distruntime.wire.shared import Attached, KeptMemory

from .collectives import PREFIX, Collective, poison_among
from .devices import Devices
from .functions import FUNCTIONS, Tape
from .groups import Groups
from .objects import INLINE_BYTES, PART_BYTES, Poisoned, described, failure, failure_fields, plain, render, spec_fields, wire_tensor
from .staging import Staging
from .streams import MOST_STREAMS, HostCopy, Stamp, Stream, Work
from .template import Run, Template, operator

# Torch's allocator gives addresses that are multiples of this, and a frame of the socket begins anywhere: there kernels sum in another
# order, so that a small weight gave other last bits than here. From the second on, a copy would cost more than the last bits are worth.
_ALIGNED, _LARGE = 64, 1 << 20  # bytes

Send = Callable[..., Any]  # message, payload or None, copy=True; see daemon
Tell = Callable[[int, Message], None]  # node, message: to another worker

_SENT = 0.0002  # seconds between looks whether the socket has read a large tensor

_LOOK = 0.1  # seconds between a blocked stream's looks whether it is cancelled or the master gone
_END = 1 << 62  # no log gets there
_WAITING = {UPLOAD: "upload", HOST: "a copy to the host", WAIT: "a wait for another stream", AWAIT: "a wait for another node"}
_MOST_FAILURES = 64  # reported by one segment with text; a loop of failing instructions says the same thing anyway


class Executor:
    """The state of one session on one worker."""

    def __init__(self, devices: Devices, send: Send, tell: Tell) -> None:
        self._devices = devices
        self._send = send
        self._tell = tell
        self.node = -1  # this worker's number, once there are groups
        self.groups = Groups(devices)
        self.slots: dict[int, Any] = {}
        self._templates: dict[int, Run] = {
            CHECK: self._check,
            LEARN: self._learn,
            UPLOAD: self._upload,
            FORGET: self._forget,
            WAIT: self._wait,
            AWAIT: self._await,
            STAMP: self._stamp,
            RELEASE: self._release,
            HOST: self._host,
        }
        self._info: dict[int, Template | Collective] = {}
        self._next_template = FIRST_TEMPLATE
        self._orphans: list[Failure] = []  # of instructions without results, such as a check: the next read brings them
        self.received = 0  # seq of the last segment that the reader accepted: a segment that is sent again is dropped
        self.executed = 0  # position up to which the whole log has run
        self.default = Stream(0, torch.device("cpu"))
        self.streams: dict[int, Stream] = {0: self.default}
        self.works: deque[Work] = deque()  # segments in the order of the log; each is done when those before it are
        self._under_way: dict[int, Work] = {}  # by the id of their words
        self._mine: dict[int, Stream] = {}  # by thread
        self._done: list[tuple[int, Fetch]] = []
        self._signals: dict[int, tuple[threading.Event, list[str]]] = {}
        self._users: dict[int, int] = {}  # streams that have released a value, by ref
        self._gate = threading.RLock()  # guards the lists that more than one thread takes things out of
        self._started: dict[int, float] = {}  # by stream
        self._shared = Attached()
        self._kept = KeptMemory()
        self._staging = Staging()
        self.running = False  # whether stream 0 runs a segment
        self.closed = False  # whether the master is gone, and nothing is worth waiting for

    # -- segments ----------------------------------------------------------------------------------------------------------------

    def open(self, message: OpenStream) -> Stream:
        """Return a new stream, for its thread to run; raise `ProtocolError` where it makes no sense (the reader)."""
        if not 0 < message.stream < MOST_STREAMS or message.stream in self.streams:
            raise ProtocolError(f"stream {message.stream} cannot be opened")
        try:
            stream = Stream(message.stream, self._devices.real(torch.device(message.device)), message.priority)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"stream {message.stream}: {error}") from error
        self.streams[message.stream] = stream
        return stream

    def divide(self, work: Work) -> None:
        """Give each stream its stretches of a segment (the reader)."""
        i = 0
        for row in work.segment.stretches:
            match row:
                case [int(number), int(words)] if number in self.streams and words > 0:
                    self.streams[number].queue.put((work, i, i + words))
                    i += words
                case _:
                    raise ProtocolError(f"segment {work.segment.seq}: {row!r} is no stretch")
        if i != len(work.segment.words):
            raise ProtocolError(f"segment {work.segment.seq}: stretches of {i} words for {len(work.segment.words)}")

    def run(self, work: Work) -> None:
        """Run a segment that is all stream 0's; raise `ProtocolError` where its words make no sense."""
        self.running = True
        segment, stream = work.segment, self.default
        self._mine[threading.get_ident()], self._started[0] = stream, time.monotonic()
        words, slots, templates, waiting, start = segment.words, self.slots, self._templates, stream.waiting, segment.start
        self._under_way[id(words)] = work
        i, n = 0, len(words)
        if start < stream.cancelled:
            self.run_stretch(stream, work, 0, n)
            self.running = False
            return
        try:
            while i < n:
                word = words[i]
                if word < 0:
                    slots.pop(-word, None)
                    i += 1
                else:
                    i = templates[word](slots, words, i)
                    if waiting:
                        self._serve(stream, start + i)
                        if start + i < stream.cancelled:
                            self.run_stretch(stream, work, i, n)
                            self.running = False
                            return
        except (IndexError, TypeError, KeyError) as error:
            raise ProtocolError(f"segment {segment.seq} makes no sense at word {i} of {n}: {type(error).__name__}: {error}") from error
        self._finish(work)
        stream.reached = start + n  # only now: whoever waits wants to hear of failures first
        if waiting:
            self._serve(stream, start + n)
        if len(self.streams) > 1:
            stream.mark(start + n)
        stream.publish(start + n)
        self.running = False

    def run_stretch(self, stream: Stream, work: Work, i: int, stop: int) -> None:
        """Run a stream's words from `i` to `stop` of a segment, while other streams run theirs."""
        segment = work.segment
        self._mine[threading.get_ident()], self._started[stream.number] = stream, time.monotonic()
        words, slots, templates, waiting, start = segment.words, self.slots, self._templates, stream.waiting, segment.start
        self._under_way[id(words)] = work
        try:
            with stream.entered():
                while i < stop:
                    word = words[i]
                    if start + i < stream.cancelled:
                        i = self._drop(stream, words, i)
                    elif word < 0:
                        slots.pop(-word, None)
                        i += 1
                    else:
                        i = templates[word](slots, words, i)
                    stream.reached = start + i
                    if waiting:
                        self._serve(stream, start + i)
                    if i < stop:
                        stream.publish(start + i)
                stream.mark(start + i)
        except (IndexError, TypeError, KeyError) as error:
            raise ProtocolError(
                f"segment {segment.seq} makes no sense at word {i}, on stream {stream.number}: {type(error).__name__}: {error}"
            ) from error
        self._finish(work)
        if waiting:
            self._serve(stream, start + i)
        stream.publish(start + i)

    def _finish(self, work: Work) -> None:
        """Count a stretch as run; send `Done` for each segment that is complete and has only such before it."""
        with self._gate:
            work.left -= 1
            while self.works and self.works[0].left == 0:
                done = self.works.popleft()
                failures = [failure_fields(f) for f in done.failures[:_MOST_FAILURES]]
                self._send(Done(done.segment.seq, failures, done.corrections), None)
                self.executed = done.segment.start + len(done.segment.words)
                self._under_way.pop(id(done.segment.words), None)
            ready = [fetch for after, fetch in self._done if after <= self.executed] if self._done else ()
            if ready:
                self._done = [entry for entry in self._done if entry[0] > self.executed]
        for fetch in ready:
            self._answer(fetch)

    def learn(self, templates: list[Any]) -> None:
        """Compile new templates (the reader)."""
        for fields in templates:
            try:
                self._add(*fields)
            except ProtocolError:
                raise
            except Exception as error:  # whatever it is, the master sent nonsense
                raise ProtocolError(f"a template makes no sense: {type(error).__name__}: {error}") from error

    def _add(self, number: int, name: str, args: list[Any], kwargs: dict[str, Any], results: Any) -> None:
        if number != self._next_template:
            raise ProtocolError(f"template {number} came where {self._next_template} was expected")
        self._next_template += 1
        if name.startswith(PREFIX):
            collective = Collective(name, args, self._devices.real, self._collect)
            self._templates[number], self._info[number] = collective.run, collective
            return
        call = FUNCTIONS.get(name) or operator(name)
        template = Template(name, call, args, kwargs, results, self._devices.real, self._fail)
        self._templates[number] = template.run
        self._info[number] = template

    def _failure(self, p: list[Any], i: int, error: BaseException, op: str, operands: str) -> Failure:
        """Return a new failure of the instruction at `i` of the words `p`, noted in its segment."""
        work = self._under_way[id(p)]
        cause = failure(error, seq=work.segment.seq, position=work.segment.start + i, op=op, operands=operands)
        work.failures.append(cause)
        return cause

    def _fail(self, template: Template | Collective, slots: dict[int, Any], p: list[Any], i: int, error: BaseException) -> None:
        """Poison the results of the instruction at `i`, and whatever it would have written, with its first cause."""
        operands = [slots.get(p[i + k]) for k in template.reads]
        cause = next((v.failure for v in operands if isinstance(v, Poisoned)), None)
        if cause is None:
            if any(v is None for v in operands) and not isinstance(error, StreamCancelled):
                error = InternalError(f"an operand of {template.name} is not here: {error!r}")
            cause = self._failure(p, i, error, template.name, described(operands))
            if not template.writes and not template.mutates and not isinstance(error, StreamCancelled):
                self._orphans.append(cause)
        self._poison(template, slots, p, i, cause)

    def _poison(self, template: Template | Collective, slots: dict[int, Any], p: list[Any], i: int, cause: Failure) -> None:
        poisoned = Poisoned(cause)
        for k in template.writes:
            slots[p[i + k]] = poisoned
        for k in template.mutates:
            written = slots.get(p[i + k])
            if isinstance(written, torch.Tensor):  # its views and its base hold the same bytes
                memory = written.untyped_storage()._cdata
                for ref, value in slots.copy().items():  # other streams add and free meanwhile
                    if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory:
                        slots[ref] = poisoned
            slots[p[i + k]] = poisoned

    def _collect(self, collective: Collective, slots: dict[int, Any], p: list[Any], i: int, error: BaseException | None = None) -> int:
        """Take part in a group's operation; with `error`, or a poisoned operand, with zeros, and say so to the others."""
        group, sequence = self.groups[collective.group], p[i + 1]
        if collective.operation == "close":
            self.groups.close(collective.group)
            return i + collective.length
        values = [slots.get(p[i + k]) for k in range(2, collective.length)]
        inputs = [slots.get(p[i + k]) for k in collective.reads]
        cause = poison_among(inputs)
        if cause is None and (error is not None or None in inputs):
            error = error or InternalError(f"an operand of {collective.name} is not here")
            cause = self._failure(p, i, error, collective.name, described(inputs))
        new: list[torch.Tensor] = []
        try:
            if cause is not None:
                group.taint(sequence, cause, self.node, self._tell)
            new = collective.perform(group, values, sequence)
        except Exception as broken:
            cause = cause or self._failure(p, i, broken, collective.name, described(inputs))
            if not collective.writes and not collective.mutates:
                self._orphans.append(cause)
        cause = group.taken(sequence) or cause
        if cause is not None:
            self._poison(collective, slots, p, i, cause)
        else:
            for k, value in zip(collective.writes, new):
                slots[p[i + k]] = value
        return i + collective.length

    # -- instructions of the runtime ---------------------------------------------------------------------------------------------

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
                self._under_way[id(p)].corrections.append([number, k, real])
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
        position = self._under_way[id(p)].segment.start + i + 2
        after = template.run(slots, p, i + 2)
        results = [slots[p[i + 2 + k]] for k in template.writes]
        bad = next((v.failure for v in results if isinstance(v, Poisoned)), None)
        if bad is None:
            bad = next((f for f in self._under_way[id(p)].failures if f.position == position), None)
        if bad is None:
            bad = next((v.failure for k in template.reads if isinstance(v := slots.get(p[i + 2 + k]), Poisoned)), None)
        if bad is None:
            try:
                shown = [None if isinstance(v, Tape) else v for v in results]
                self._send(Reply(request, [spec_fields(v) if isinstance(v, torch.Tensor) else plain(v) for v in shown]), None)
                return after
            except Exception as error:  # whatever it is, it is the answer
                self._fail(template, slots, p, i + 2, error)
                bad = self._under_way[id(p)].failures[-1]
        self._send(Failed(request, failure_fields(bad)), None)
        return after

    def _upload(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        ref, device, dtype, sizes, data = p[i + 1 : i + 6]
        try:
            if isinstance(data, list):
                name, nbytes = data
                kept = self._kept.take(nbytes)
                copy_bytes(kept, memoryview(self._shared[name])[:nbytes])
                value = bytes_tensor(dtype, sizes, kept)
            else:
                value = bytes_tensor(dtype, sizes, self._under_way[id(p)].payloads[data] if isinstance(data, int) else data)
            real = self._devices.real(torch.device(device))
            if real.type == "cuda":
                self._used(slots.get(ref))
                slots[ref] = self._staging.to(real, value)
            else:
                slots[ref] = value.clone() if value.nbytes < _LARGE and value.data_ptr() % _ALIGNED else value
        except (RuntimeError, MemoryError, OSError) as error:  # OSError: no memory to map
            text = f"{tuple(sizes)} {dtype} to {device}"
            slots[ref] = Poisoned(self._failure(p, i, error, "upload", text))
        return i + 6

    def _forget(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        for number in [n for n in self._info.copy() if n < p[i + 1]]:  # the reader adds to it meanwhile
            del self._templates[number], self._info[number]
        return i + 2

    def _wait(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        other, position, seconds, text = p[i + 1 : i + 5]
        mine = self._mine[threading.get_ident()]
        if not self._follow(mine, [(self.streams[other], position)], p, i, seconds, text) and seconds is None:
            mine.owe(self._under_way[id(p)].segment.start + i, self.streams[other], position)
        return i + 5

    def _follow(
        self, mine: Stream, due: list[tuple[Stream, int]], p: list[Any], i: int, seconds: float | None, text: str, patient: bool = False
    ) -> bool:
        """Block this stream until those in `due` are at their positions, and at what they have not waited for when they were cancelled."""
        for target, position in due:  # which grows
            passed = threading.Event()
            entry = position, passed
            target.blocked.append(entry)
            if target.position >= position:
                passed.set()
            done = self._block(mine, passed, p, i, seconds, text, patient)
            target.blocked.remove(entry)
            if mine.cuda is not None or target.cuda is not None:
                mine.wait_for(target.events(position))
            if not done:
                return False
            # Only debts from before that position: a later one may be to this very stream, for what stands behind this wait.
            due += [(other, where) for at, other, where in target.owed if at <= position and (other, where) not in due]
        return True

    def _pay(self, mine: Stream, p: list[Any], i: int) -> None:
        """Wait for what this stream has not waited for when it was cancelled: it is about to change what others may still use."""
        self._follow(mine, [(other, where) for _, other, where in mine.owed], p, i, None, "", patient=True)

    def _await(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        number, seconds, text = p[i + 1 : i + 4]
        passed, reasons = self._signal(number)
        if self._block(self._mine[threading.get_ident()], passed, p, i, seconds, text):
            del self._signals[number]
            for reason in reasons:
                self._orphans.append(self._failure(p, i, NodeFailed(reason), "wait", ""))
        return i + 4

    def _block(
        self, mine: Stream, passed: threading.Event, p: list[Any], i: int, seconds: float | None, text: str, patient: bool = False
    ) -> bool:
        """Block until `passed`; return False when time is up (a failure), the master gone, or the stream cancelled, unless `patient`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        position = self._under_way[id(p)].segment.start + i
        while not passed.wait(_LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))):
            if self.closed or (position < mine.cancelled and not patient):
                return False
            if deadline is not None and time.monotonic() >= deadline:
                self._orphans.append(self._failure(p, i, WaitTimeout(text), "wait", ""))
                return False
        return True

    def _signal(self, number: int) -> tuple[threading.Event, list[str]]:
        with self._gate:
            return self._signals.setdefault(number, (threading.Event(), []))

    def signal(self, message: Signal) -> None:
        """Let the stream go on that waits for this signal, or will (the reader)."""
        passed, reasons = self._signal(message.number)
        if message.reason:
            reasons.append(message.reason)
        passed.set()

    def _stamp(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        mine = self._mine[threading.get_ident()]
        device = mine.device if mine.cuda is not None else self._devices.first_gpu if mine is self.default else None
        event = None
        if device is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(mine.cuda or torch.cuda.default_stream(device))
        slots[p[i + 1]] = Stamp(time.perf_counter_ns(), event)
        return i + 2

    def _release(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        ref, count = p[i + 1], p[i + 2]
        self._used(slots.get(ref))
        with self._gate:
            released = self._users.pop(ref, 0) + 1
            if released < count:
                self._users[ref] = released
            else:
                slots.pop(ref, None)
        return i + 3

    def _used(self, value: Any) -> None:
        """Keep torch's allocator from giving a GPU's value away, which this stream may let go of, before its kernels have run."""
        if isinstance(value, torch.Tensor) and value.is_cuda:
            mine = self._mine[threading.get_ident()]
            value.record_stream(mine.cuda or torch.cuda.default_stream(value.device))

    def _host(self, slots: dict[int, Any], p: list[Any], i: int) -> int:
        try:
            value = slots[p[i + 1]]
            slots[p[i + 2]] = value if isinstance(value, Poisoned) else HostCopy(value)
        except RuntimeError as error:  # no memory, or what a kernel before this one has done
            slots[p[i + 2]] = Poisoned(self._failure(p, i, error, "copy to the host", described([slots.get(p[i + 1])])))
        return i + 3

    def cancel(self, message: Cancel) -> None:
        """Drop what a stream has not begun (the reader)."""
        stream = self.streams.get(message.stream)
        if stream is None:
            raise ProtocolError(f"there is no stream {message.stream}")
        self._cut(stream, message.position)

    def _cut(self, stream: Stream, position: int) -> None:
        stream.cancelled = max(stream.cancelled, position)
        with self._gate:
            stream.waiting.append((position, lambda: None))  # so that `run`, which has no time to look each time, looks

    def close(self) -> None:
        """Drop what no stream has begun: the master is gone (the reader)."""
        self.closed = True
        self.groups.end_all("its session is over")
        for stream in self.streams.values():
            self._cut(stream, _END)
            stream.queue.put(None)

    def _drop(self, stream: Stream, p: list[Any], i: int) -> int:
        """Step over the instruction at `i` of a cancelled stream: its results are poisoned, its frees happen.

        The master counts on its waits: who waits for this stream waits for them instead, and so does it before it poisons what was there.
        """
        slots, word = self.slots, p[i]
        if word < 0:
            slots.pop(-word, None)
            return i + 1
        if word == FORGET:
            self._pay(stream, p, i)
        if word in (RELEASE, FORGET, STAMP):
            return self._templates[word](slots, p, i)
        if word == WAIT and p[i + 3] is None:
            stream.owe(self._under_way[id(p)].segment.start + i, self.streams[p[i + 1]], p[i + 2])
        if word in (WAIT, AWAIT):
            return i + (5 if word == WAIT else 4)
        error = StreamCancelled("dropped by stream.cancel() before it ran")
        if word in (UPLOAD, HOST):
            if p[i + 1] in slots:
                self._pay(stream, p, i)
            slots[p[i + (1 if word == UPLOAD else 2)]] = Poisoned(self._failure(p, i, error, _WAITING[word], ""))
            return i + (6 if word == UPLOAD else 3)
        first = i + (3 if word == CHECK else 2 if word == LEARN else 0)
        template = self._info[p[first]]
        if template.mutates:
            self._pay(stream, p, i)
        if isinstance(template, Collective):  # the others count on it
            return self._collect(template, slots, p, first, error)
        self._fail(template, slots, p, first, error)
        if word == LEARN:
            cause = next((v.failure for k in template.writes if isinstance(v := slots.get(p[first + k]), Poisoned)), None)
            cause = cause or self._failure(p, first, error, template.name, "")
            self._send(Failed(p[i + 1], failure_fields(cause)), None)
        return first + template.length

    # -- fetches (any thread) ----------------------------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Answer `fetch` if the log has run far enough; else leave it to the thread that gets there (the reader)."""
        after = fetch.after
        if not self._names(after):
            raise ProtocolError(f"a fetch after {str(after)[:80]}")
        if fetch.form != "done":
            if len(after) > 2:  # in the order of the streams' numbers, so that no two threads wait for each other's `serving`
                pairs = sorted(zip(after[::2], after[1::2]))
                fetch = replace(fetch, after=[n for pair in pairs for n in pair])
            self._when(fetch, 0)
            return
        with self._gate:
            if self.executed < after[1]:
                self._done.append((after[1], fetch))
                return
        self._answer(fetch)

    def notify(self, message: Notify) -> None:
        """Send a signal to another worker once a stream has run far enough (the reader)."""
        self.fetch(Fetch(message.number, message.node, [message.stream, message.position], "signal", {}))

    def take(self, node: int, message: Message) -> None:
        """Act on what another worker says (the thread of the workers' channel)."""
        if isinstance(message, Signal):
            self.signal(message)
        else:
            self.groups.take(node, message, self._tell)

    def _names(self, after: list[Any]) -> bool:
        """Whether `after` is [stream, position, ...] of streams that there are."""
        return bool(after) and len(after) % 2 == 0 and all(type(n) is int for n in after) and set(after[::2]) <= self.streams.keys()

    def _when(self, fetch: Fetch, k: int) -> None:
        """Answer `fetch` when the streams from the `k`-th on that it names are at their positions."""
        after = fetch.after
        while k < len(after):
            stream, position = self.streams[after[k]], after[k + 1]
            k += 2
            if self._reached(stream, position):
                continue
            entry = position, lambda k=k: self._when(fetch, k)
            with self._gate:
                stream.waiting.append(entry)
            if not self._reached(stream, position):
                return
            with stream.serving:  # it got there meanwhile: one of the two threads takes the entry out
                with self._gate:
                    if entry not in stream.waiting:
                        # And has answered: else what comes next could write the value, on a stream that need not wait any more.
                        return
                    stream.waiting.remove(entry)
        self._answer(fetch)

    def _reached(self, stream: Stream, position: int) -> bool:
        return stream.reached >= position or (stream is self.default and self._look(stream)[0] >= position)

    def _serve(self, stream: Stream, position: int) -> None:
        with stream.serving:
            with self._gate:
                ready = [entry for entry in stream.waiting if entry[0] <= position]
                for entry in ready:
                    stream.waiting.remove(entry)
            for entry in ready:
                entry[1]()

    def passed(self, after: list[Any]) -> bool:
        """Whether each stream is at its position; on a GPU, whether the kernels before it have run (the reader)."""
        if not self._names(after):
            raise ProtocolError(f"a question after {str(after)[:80]}")
        for number, position in zip(after[::2], after[1::2]):
            stream = self.streams[number]
            if not self._reached(stream, position):
                return False
            if self._devices.first_gpu is not None and not all(event.query() for event in stream.events(position)):
                return False
        return True

    def _answer(self, fetch: Fetch) -> None:
        if fetch.form in ("done", "passed", "signal"):
            self._answer_wait(fetch)
            return
        value = self.slots.get(fetch.ref)
        if isinstance(value, Poisoned):
            self._send(Failed(fetch.request, failure_fields(value.failure)), None)
            return
        if self._orphans and fetch.form != "text":
            with self._gate:
                orphan = self._orphans.pop(0) if self._orphans else None
            if orphan is not None:
                self._send(Failed(fetch.request, failure_fields(orphan)), None)
                return
        if isinstance(value, HostCopy) and not value.ready():
            self._later(fetch, value, [value.event])
        elif isinstance(value, torch.Tensor) and value.is_cuda:  # a text, for which the value need not come over whole
            self._later(fetch, value, self._events(fetch.after))
        else:
            self._answer_with(fetch, value)

    def _answer_with(self, fetch: Fetch, value: Any) -> None:
        try:
            if value is None:
                raise InternalError(f"the value {fetch.ref} is not here")
            self._reply(fetch, value.tensor if isinstance(value, HostCopy) else value)
        except Exception as error:  # whatever it is, it is the answer
            operands = described([value]) if value is not None else ""
            cause = failure(error, seq=0, position=fetch.after[1], op=f"fetch ({fetch.form})", operands=operands)
            self._send(Failed(fetch.request, failure_fields(cause)), None)

    def _answer_wait(self, fetch: Fetch) -> None:
        """Answer who waits for a stream, or for all; on a GPU, when the kernels have run."""
        if self._devices.first_gpu is None:
            self._say(fetch)
            return
        after = fetch.after if fetch.form != "done" else [n for s in self.streams.values() for n in (s.number, s.reached)]
        self._later(fetch, None, self._events(after))

    def _say(self, fetch: Fetch) -> None:
        """Tell whoever waits for streams that they are there: the master, or another worker whose stream waits."""
        if fetch.form == "signal":
            self._tell(fetch.ref, Signal(fetch.request, ""))
        else:
            self._send(Reply(fetch.request, self._news(fetch)), None)

    def _events(self, after: list[Any]) -> list[Any]:
        """Return the events of a GPU that come after [stream, position, ...]."""
        return [event for number, position in zip(after[::2], after[1::2]) for event in self.streams[number].events(position)]

    def _later(self, fetch: Fetch, value: Any, events: list[Any]) -> None:
        """Answer when a GPU has got to `events`; neither the reader nor a stream may block until then."""
        threading.Thread(target=self._answer_after, args=(fetch, value, events), name="waits-for-gpu", daemon=True).start()

    def _answer_after(self, fetch: Fetch, value: Any, events: list[Any]) -> None:
        for event in events:
            event.synchronize()
        if value is None:
            self._say(fetch)
            return
        with torch.no_grad():
            self._answer_with(fetch, value)

    def _news(self, fetch: Fetch) -> list[Any] | None:
        """Return the failures that no `Done` has brought yet, for who waits for less than the whole log.

        Who waits hears of every failure, so the next read need not say it again.
        """
        if "quiet" in fetch.options:
            return None
        self._orphans.clear()
        if fetch.form == "done":
            return None
        return [failure_fields(f) for work in list(self.works) for f in work.failures[:_MOST_FAILURES]]

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
            copy_bytes(memoryview(self._shared[fetch.options["shared"]])[: len(data)], data)
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
        """Return [position, operator that is running or None, seconds since its stretch started] of the first stream that runs one."""
        looks = [self._look(stream) for stream in list(self.streams.values())]
        return next((look for look in looks if look[1] is not None), looks[0])

    def _look(self, stream: Stream) -> list[Any]:
        """Return where a stream is, read off its thread's frame.

        Looking from outside costs the hot path nothing; keeping a note per instruction would cost it 30 ns.
        """
        thread = next((ident for ident, mine in list(self._mine.items()) if mine is stream), None)
        frame = sys._current_frames().get(thread) if thread is not None else None
        while frame is not None and frame.f_code not in _RUNS:
            frame = frame.f_back
        if frame is None:
            return [stream.reached, None, 0.0]
        names = frame.f_locals
        i, words, start = names.get("i"), names.get("words"), names.get("start")
        if i is None or words is None or start is None:
            return [stream.reached, None, 0.0]
        position = start + i
        if i >= names.get("stop", names.get("n", 0)):
            return [position, None, 0.0]
        while isinstance(words[i], int) and words[i] in (CHECK, LEARN):
            i += 3 if words[i] == CHECK else 2
        info = self._info.get(words[i])
        return [position, info.name if info else _WAITING.get(words[i], "a free"), time.monotonic() - self._started[stream.number]]


_RUNS = (Executor.run.__code__, Executor.run_stretch.__code__)
