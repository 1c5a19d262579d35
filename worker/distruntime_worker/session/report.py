"""What a worker tells of itself: its sessions, what they run, how busy it is, and where its threads are.

Whoever holds the key may ask, with a session or without one. Everything here is bounded, as the reader's
thread makes a reply at once.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from itertools import islice
from time import perf_counter_ns, time_ns
from typing import final

import torch

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.version import __version__
from distruntime.wire import messages
from distruntime.wire.messages import BEFORE_INSTRUCTION, Activity, SessionRow, WorkerReport

from ..checkpoint import folder as checkpoint_folder
from ..collectives.data_channel import report
from ..log.turns import Turns
from ..machine import hardware, lost
from ..machine.devices import Devices
from . import activity
from .address import peer_address, unusable_for_workers
from .config import WorkerConfig
from .session import Session

log = logging.getLogger("distruntime.worker")

# A report has at most so many sessions, so many characters of an operator's name, and so many characters of
# stacks.
_SESSIONS, _NAME, _STACKS = 1000, 200, 1 << 18
# A thread's stack has at most so many frames.
_FRAMES = 60
# So many words are walked through to find out how long an instruction is.
_WALKED = 2000
# So many looks are kept. The processor's share is an average over them, which is two seconds.
_LOOKS = 5


@final
class Reporter:
    """Reports on one worker. `sessions` are the daemon's, `address` is where it listens or what it dials."""

    def __init__(self, devices: Devices, sessions: Mapping[str, Session], address: str) -> None:
        self._devices, self._sessions, self._address = devices, sessions, address
        self._started = time.monotonic()
        self._looks: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        self.seen = activity.Activity(sessions)
        self.look()

    def look(self) -> None:
        """Note the processor time of this process, and what its sessions run.

        The daemon calls this twice a second.
        """
        self._looks.append((time.monotonic(), time.process_time()))
        for session in self._sessions.values():
            session.executor.status()

    def activity(self) -> Activity:
        """Return what the streams do. Look at them for some seconds more."""
        return Activity(*self.seen.rows())

    def report(self) -> WorkerReport:
        """Return what is known of this worker now."""
        rows = [self._row(session) for session in islice(self._sessions.values(), _SESSIONS)]
        return WorkerReport(
            socket.gethostname(),
            os.getpid(),
            self._address,
            __version__,
            torch.__version__,
            platform.python_version(),
            time.monotonic() - self._started,
            self._devices.simulated,
            self._processor(),
            self._devices.info(),
            [self._gpu(name) for name in self._devices.names],
            rows,
        )

    def who(self) -> str:
        """Return what process this worker is, for people."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def _processor(self) -> float:
        """Return the share of one core that this process has had lately, in percent."""
        since, had = self._looks[0]
        passed = time.monotonic() - since
        return 100 * (time.process_time() - had) / passed if passed > 0 else 0.0

    def _gpu(self, name: str) -> float | None:
        """Return how much of the last second a device ran kernels, in percent; None where nobody knows."""
        if name == "cpu" or self._devices.simulated:
            return None
        return hardware.busy(torch.device(name))

    def _row(self, session: Session) -> SessionRow:
        status, state = session.executor.status(), session.executor.state
        away = None if session.alone_since is None else time.monotonic() - session.alone_since
        pid = next((part for part in session.process[1:2] if isinstance(part, int)), 0)
        return SessionRow(
            session.name,
            session.greeting.host,
            pid,
            session.lasting,
            away,
            time.monotonic() - session.began,
            len(state.slots),
            self._queued(session, status.position),
            None if status.running is None else status.running[:_NAME],
            status.seconds,
        )

    def _queued(self, session: Session, position: int) -> int:
        """Return about how many instructions of a session have not begun.

        To count them all would take long, so the first words tell how long an instruction is.
        """
        state = session.executor.state
        with state.gate:
            works = list(state.works)
        walked = found = 0
        for work in works:
            words, info = work.segment.words, state.log(work).info
            i = 0
            while i < len(words) and walked + i < _WALKED:
                word = words[i]
                # After the runtime's own instructions this may be in the middle of another one.
                step = info.get(word) if isinstance(word, int) else None
                if step is not None and step.length:
                    i, found = i + step.length, found + 1
                elif isinstance(word, int) and (word < 0 or word in BEFORE_INSTRUCTION):
                    i += BEFORE_INSTRUCTION.get(word, 1)
                else:
                    # The runtime's own instructions are rare, and about as long as the others.
                    i, found = i + 4, found + 1
            walked += i
        left = sum(len(work.segment.words) for work in works)
        if works and works[0].mesh is None:
            left -= min(max(0, position - works[0].segment.start), len(works[0].segment.words))
        return round(left * found / walked) if walked else 0

    def stacks(self) -> str:
        """Return where each thread of this process is, in Python. No other thread has to do anything."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"distruntime-worker, pid {os.getpid()} on {socket.gethostname()}"]
        for session in islice(self._sessions.values(), _SESSIONS):
            status = session.executor.status()
            runs = (
                f"runs {status.running[:_NAME]} for {status.seconds:.1f} s" if status.running else "is idle"
            )
            parts.append(f"session {session.name}: {runs}")
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            stack = "".join(traceback.format_list(traceback.extract_stack(frame, _FRAMES)))
            parts.append(f"\nthread {names.get(ident, '?')} ({ident})\n{stack.rstrip()}")
        return "\n".join(parts)[:_STACKS]


# The log has so many characters of the reason for which a worker is to end.
_REASON = 300


# Whoever holds the key may ask these, with a session or without one.
OfStranger = messages.AskWorker | messages.AskActivity | messages.AskStacks | messages.StopWorker


class Questions:
    """Answers the questions of all sessions of a worker."""

    def __init__(self, config: WorkerConfig, turns: Turns, reporter: Reporter) -> None:
        self._config, self._turns, self._reporter = config, turns, reporter
        # It says why a holder of the key has asked this worker to end.
        self.stopped = ""

    def of_stranger(self, question: OfStranger) -> messages.Reply:
        """Return the reply to a question that needs no session."""
        return messages.Reply(question.request, self._about_us(question))

    def _about_us(self, question: OfStranger) -> object:
        match question:
            case messages.AskWorker():
                return self._reporter.report()
            case messages.AskActivity():
                return self._reporter.activity()
            case messages.AskStacks():
                return self._reporter.stacks()
            case messages.StopWorker(reason=reason):
                self.stopped = reason[:_REASON] or "a holder of the key has asked for it"
                return self._reporter.who()

    def answer(self, session: Session, question: messages.Question[object]) -> None:
        """Reply, or say why not."""
        try:
            if isinstance(question, checkpoint_folder.FolderQuestion):
                checkpoint_folder.answer(question, session.send)
                return
            match question:
                # An accelerator's profiler takes a while to begin and to end. So a thread may reply.
                case messages.StartTrace(request=request, most=most):
                    session.start_trace(most, lambda: _reply(session, request, None))
                    return
                case messages.StopTrace(request=request):
                    session.stop_trace(lambda kept: _reply(session, request, kept))
                    return
            session.send(messages.Reply(question.request, self._reply(session, question)))
        except (RuntimeError, OSError) as error:
            session.fail(question.request, lost.look(error, "a question"), type(question).__name__)

    def _reply(self, session: Session, question: messages.Question[object]) -> object:
        executor, shelf = session.executor, session.executor.shelf
        match question:
            case messages.AskMemory():
                state = executor.state
                return messages.MemoryHeld(len(state.slots), state.executed, state.poisoned())
            case messages.AskStatus():
                return executor.status()
            case messages.AskTurns():
                return self._turns.report()
            case messages.AskWorker() | messages.AskActivity() | messages.AskStacks() | messages.StopWorker():
                return self._about_us(question)
            case messages.AskPassed(after=after):
                return executor.passed(after)
            case messages.AskChannel(channel=channel):
                return report(channel)
            case messages.AskClock():
                return messages.ClockTimes(perf_counter_ns(), time_ns())
            case messages.TakeTrace(offset=offset):
                return session.tracing.take(offset)
            case messages.ListenForPeers(host=host):
                return self._listen(session, host)
            case messages.ListPublished():
                return shelf.listing()
            case messages.ListVersions(name=name):
                return shelf.versions(name)
            case messages.FindPublished(owner=owner, name=name, token=token):
                return shelf.find(owner, name, token)
            case messages.DropOlder(name=name, version=version):
                return shelf.drop_older(name, version)
            case messages.DropPublished(name=name, version=version):
                return shelf.drop(name, version)
        raise ProtocolError(f"a worker does not answer {type(question).__name__}")

    def _listen(self, session: Session, host: str) -> str:
        """Open a session's channel to other workers; return where it listens."""
        session.host = host
        address = peer_address(self._config, host, session.number)
        try:
            return session.listen(address, self._config.keys)
        except ConfigurationError as error:
            raise unusable_for_workers(address, error) from error


def _reply(session: Session, request: int, value: object) -> None:
    session.send(messages.Reply(request, value))
