"""Help for tests that signal, kill or measure: conditions with deadlines, and test functions run in a process
of their own.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import distruntime as dr
from distruntime.cluster.local_workers import worker_environment
from distruntime.cluster.nursery import ForkedWorker, fork_worker
from distruntime.log.line import user_line
from distruntime.session.session import active_session
from distruntime.wire.messages import AWAIT, AskMemory, MemoryHeld, Signal
from forked_masters import start_master

T = TypeVar("T")

_HELP = Path(__file__).resolve().parent
ROOT = _HELP.parents[1]
# Workers have so many seconds to start. Each imports torch, on a machine that may be busy or may not have
# read it yet.
STARTING = 90.0
PATH = [str(ROOT), str(ROOT / "worker"), str(_HELP)]
_never = threading.Event()


def pause(seconds: float) -> None:
    """Let other threads and processes run for a moment, between two looks at a condition."""
    _never.wait(seconds)


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Block until `condition()` holds; fail past the deadline."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        pause(0.005)


def within(seconds: float, act: Callable[[], T], tries: int = 3) -> T:
    """Return what `act` does, once it has taken no longer than so many seconds; fail if it never does: a busy
    machine may delay one.
    """
    for _ in range(tries):
        started = time.monotonic()
        result = act()
        if time.monotonic() - started < seconds:
            return result
    raise AssertionError(f"it took {seconds} s or more, {tries} times in a row")


def waits_less(seconds: float, act: Callable[[], T]) -> T:
    """Return what `act` returns; fail if it waits for so many seconds or longer.

    Only the time in which this process could run counts. A thread that wakes every hundredth of a second
    measures it: where a busy machine holds the process still, this thread is held still with it. So on an
    idle machine the figure is the time that passes, and load adds next to nothing to it. `act` must wait for
    this process itself, a limit or a process that is stopped, and not for the work of another process.
    """
    step, counted, over = 0.01, [0.0], threading.Event()

    def measure(last: float, used: float) -> None:
        while True:
            ended = over.wait(step)
            now, processor = time.monotonic(), time.process_time()
            # A longer gap counts as far as this process has computed in it.
            counted[0] += min(now - last, max(2 * step, processor - used))
            last, used = now, processor
            if ended:
                return

    # These two are taken here, as the thread may get on only after `act` has begun.
    measuring = threading.Thread(target=measure, args=(time.monotonic(), time.process_time()))
    measuring.start()
    try:
        result = act()
    finally:
        over.set()
        measuring.join()
    assert counted[0] < seconds, f"it waited for {counted[0]:.2f} s, {seconds} s or more"
    return result


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    # On macOS `ps` prints it as 1:02:03.45.
    if not Path("/proc").exists():
        printed = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True).stdout
        return sum(float(part) * 60**k for k, part in enumerate(reversed(printed.strip().split(":"))))
    # The name of the program, which stands before this, may have blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steady(value: Callable[[], object], seconds: float, timeout: float = 30.0) -> object:
    """Block until `value()` has stayed the same for that many seconds; return it."""
    deadline = time.monotonic() + timeout
    last, since = value(), time.monotonic()
    while time.monotonic() - since < seconds:
        assert time.monotonic() < deadline, f"never at rest within {timeout} s: {last}"
        pause(0.02)
        if (now := value()) != last:
            last, since = now, time.monotonic()
    return last


def resident(pid: int) -> int:
    """Return the memory that a process occupies, in bytes."""
    return (
        int(
            subprocess.run(
                ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
            ).stdout
        )
        * 1024
    )


def window_is_full(node: int = 0) -> bool:
    """Whether whoever issues an operation on this node must wait."""
    return active_session().nodes[node].busy


def slots(node: int = 0) -> int:
    """Return how many values a worker holds, after everything issued so far."""
    session = active_session()
    # What was let go of on a mesh goes with what is issued next there, or when the pump looks.
    for log in session.meshes:
        log.flush()
    dr.synchronize(node)
    held: MemoryHeld = session.value(session.ask(session.nodes[node], AskMemory))
    return held[0]


def stop(pid: int) -> None:
    """Hold a process still (SIGSTOP).

    When this returns, none of its threads runs: on a busy machine the signal takes its time.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _stands(pid))


def opened(pid: int) -> list[str]:
    """Return what a process's descriptors lead to, as Linux names it: "socket:[71]", "/memfd:x (deleted)"."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        # The process may close one between the list and the look.
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def _stands(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    # On macOS a process stops as a whole.
    if not tasks.exists():
        return state(pid) == "T"
    try:
        return all(_letter(task) in ("T", "t") for task in tasks.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended meanwhile.
        return False


def _letter(entry: Path) -> str:
    """Return what /proc says of a process or a thread: "R" for one that runs, "S" for one that sleeps, "T",
    "Z".
    """
    return (entry / "stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]


def state(pid: int) -> str:
    """Return the letter of a process's state (of its main thread); nothing if it is no more."""
    if Path("/proc/self/stat").exists():
        try:
            return _letter(Path(f"/proc/{pid}"))
        except (FileNotFoundError, ProcessLookupError):
            return ""
    return subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()[:1]


def asleep(pid: int) -> bool:
    """Whether the main thread of a process has slept for a moment: it is in a system call that blocks, not on
    its way there.
    """
    return all(state(pid) == "S" for _ in range(50))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process still (SIGSTOP) for the length of a `with` block."""
    try:
        stop(pid)
        yield
    finally:
        # It may have been killed meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def blocked(stream: dr.Stream) -> Iterator[None]:
    """Keep a stream from getting any further for the length of a `with` block; its worker and its node's
    other streams go on.

    It stands in a wait for a signal, as for another node's event, which this process sends at the end.
    """
    node, session = stream.check(), active_session()
    number = session.signals()
    words, line = [AWAIT, number, None, ""], user_line()
    with node.lock:
        if node.order is None:
            node.append(words, line)
        else:
            node.order.put(stream.number, words, line)
    try:
        yield
    finally:
        for worker in node.workers():
            session.post(worker, Signal(number, ""))


def free_port() -> int:
    """Return a port of this machine that a process started later can listen at: the system gives it to nobody
    who asks for any.
    """
    while True:
        # Linux and macOS give out higher ports by themselves.
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def limited(descriptors: int) -> list[str]:
    """Return a command that limits a program to so many descriptors, soft and hard (`ListeningWorker`)."""
    return ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]


class ListeningWorker:
    """`distruntime-worker --listen`, its log in a file. It is forked from this process's nursery.

    `under` is a command that starts it as a program instead.
    """

    process: subprocess.Popen[bytes] | ForkedWorker

    def __init__(self, folder: Path, *arguments: str, under: Sequence[str] = (), **variables: str) -> None:
        self.log = folder / "worker.log"
        environment = {**worker_environment(1), **variables}
        with self.log.open("wb") as output:
            forked = (
                None if under else fork_worker(["--threads", "1", *arguments], environment, output, False)
            )
            self.process = forked or subprocess.Popen(
                [*under, sys.executable, "-m", "distruntime_worker", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        until(lambda: "listening on " in self.text() or self.process.poll() is not None, STARTING)
        self.address = self.text().partition("listening on ")[2].partition(",")[0]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(STARTING)


class StruckWhileWaiting:
    """A context in which Ctrl-C is pressed as soon as the main thread sleeps in a wait for a worker."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._strike)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _strike(self) -> None:
        main = threading.main_thread().ident
        until(lambda: sys._current_frames()[main or 0].f_code.co_name == "_polled")
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def struck(handler: Callable[[], None]) -> Iterator[None]:
    """Run `handler` as a signal's handler in the main thread, again and again, wherever that thread is; never
    within itself.

    Not by a timer: the next stroke waits until the last one has been handled, so that the main thread gets
    on, however busy the machine.
    """
    over, handled = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        try:
            handler()
        finally:
            handled.set()

    def strike() -> None:
        while not over.is_set():
            handled.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            while not handled.wait(0.2) and not over.is_set():
                pass
            over.wait(0.003)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


class Child:
    """A function of a test module, running in a process of its own; what it prints is read line by line, with
    deadlines.
    """

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        module = Path(function.__code__.co_filename).stem
        source = f"import {module}\n{module}.{function.__name__}(*{args!r})\n"
        paths = [*PATH, str(Path(function.__code__.co_filename).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        reading, writing = os.pipe()
        self._output = open(reading, encoding="utf-8", errors="replace")
        with open(writing, "wb") as output:
            self._process = start_master(source, environment, output, strict=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.printed: list[str] = []
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._listening.join()

    def _listen(self) -> None:
        with self._output:
            for line in self._output:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout: float = 60.0) -> str:
        """Return the next line that the function prints."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"printed nothing more within {timeout} s after {self.printed}") from None
        assert line is not None, f"ended ({self._process.wait()}) after printing:\n" + "\n".join(self.printed)
        self.printed.append(line)
        return line

    def latest(self) -> str:
        """Return the last line that it has printed so far, without waiting; "" if there is none."""
        while not self._lines.empty():
            self.line()
        return self.printed[-1] if self.printed else ""

    def expect(self, text: str, timeout: float = 60.0) -> str:
        """Read lines until one begins with `text`; return the rest of it."""
        deadline = time.monotonic() + timeout
        while not (line := self.line(max(0.1, deadline - time.monotonic()))).startswith(text):
            pass
        return line[len(text) :].strip()

    def tell(self, line: str = "") -> None:
        """Write a line to the function's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def waiting(self) -> bool:
        """Whether a line can be read without waiting, or it is known that none will come."""
        return not self._lines.empty()

    def gone(self, timeout: float) -> bool:
        """Block until the process has ended, for so many seconds at most; return whether it has."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def rest(self, timeout: float = 60.0) -> list[str]:
        """Block until the process writes no more; return the lines that nobody has read."""
        deadline, lines = time.monotonic() + timeout, list[str]()
        while (line := self._next(deadline)) is not None:
            lines.append(line)
        self.printed += lines
        return lines

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def finish(self, timeout: float = 60.0) -> list[str]:
        """Block until the function has returned; fail if it raised. Return all that it printed."""
        deadline = time.monotonic() + timeout
        while (line := self._next(deadline)) is not None:
            self.printed.append(line)
        assert self._process.wait() == 0, "\n".join(self.printed)
        return self.printed

    def _next(self, deadline: float) -> str | None:
        try:
            return self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError("did not end in time; printed:\n" + "\n".join(self.printed)) from None
