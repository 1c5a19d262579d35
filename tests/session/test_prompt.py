"""At a real terminal: what a prompt says while it waits, how it is left, what it completes."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_IPYTHON = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "IPython" else find(name, *rest)
from distruntime.__main__ import main
sys.exit(main(["repl", "--world-size", "1"]))
"""


class Terminal:
    """A Python at a terminal of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._end, theirs = pty.openpty()
        path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TERM": "dumb",
            "PYTHON_BASIC_REPL": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self.said = ""  # since the last `expect`
        # Whether it has imported what a session needs.
        self.ready = False

    def send(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, pattern: str, timeout: float = 60.0) -> str:
        """Wait until it has said something that matches; return all up to the match's end."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self.said)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"not within {timeout:.0f} s: {pattern}\n{self.said}"
            if select.select([self._end], [], [], min(left, 1.0))[0]:
                try:
                    self.said += os.read(self._end, 1 << 16).decode("utf-8", "replace").replace("\r\n", "\n")
                except OSError:  # how a pseudo-terminal says that the other side is closed
                    assert re.search(pattern, self.said), f"it ended before it said {pattern}\n{self.said}"
        before, self.said = self.said[: found.end()], self.said[found.end() :]
        return before

    def enter(self, line: str) -> str:
        """Type a line; return what it says before the next prompt."""
        self.send(line + "\n")
        # What a long wait shows is cleared before the prompt, on its line.
        return self.expect(r"(?:\n|\x1b\[K)>>> ")

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return exit status and last words."""
        said = self.said
        while True:
            try:
                more = os.read(self._end, 1 << 16)
            except OSError:
                break
            if not more:
                break
            said += more.decode("utf-8", "replace").replace("\r\n", "\n")
        return self.process.wait(30), said

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


def _own_terminal() -> None:
    os.close(
        os.open(os.ttyname(0), os.O_RDWR)
    )  # the first terminal that a session leader opens is its own: Ctrl-C goes there


_open: list[Terminal] = []


@pytest.fixture(scope="module", autouse=True)
def _the_last_prompt_is_closed() -> Iterator[None]:
    yield
    for terminal in _open:
        terminal.close()


@pytest.fixture
def python() -> Iterator[Terminal]:
    """A plain Python that has a session with one worker.

    The next test has a new session in it: a start and its imports take four seconds of a core. A prompt that
    does not come back is not used again.
    """
    terminal = _open.pop() if _open else Terminal("-q")
    try:
        if not terminal.ready:
            terminal.expect(">>> ")
            terminal.enter("import torch, distruntime as dr")
            terminal.ready = True
        terminal.enter("session = dr.init_master_worker(world_size=1)")
        yield terminal
        terminal.enter("if dr.is_initialized(): dr.cancel(); dr.shutdown(timeout=60)\n")
    except BaseException:
        terminal.close()
        raise
    _open.append(terminal)


@pytest.fixture
def repl() -> Iterator[Terminal]:
    """`python -m distruntime repl`, where IPython is not installed."""
    terminal = Terminal("-c", WITHOUT_IPYTHON)
    try:
        terminal.expect("\n>>> ")
        yield terminal
    finally:
        terminal.close()


# The line that says what is waited for may be erased once more, a moment after Ctrl-C.
ERASED = r"(?:\r?\x1b\[K)*"
QUEUED = (
    r"node 0 \(.+\): [\d,]+ operations queued(?:, aten\.mm runs)?\n"
    r"They run on\. dr\.cancel\(\) drops those that have not begun\.\n"
)
# This issues a minute's work at once.
SLOW = "x = torch.ones(1500, 1500, device='remote'); any(x @ x is None for k in range(400))"


@pytest.mark.slow(reason="starts a prompt, 6 s")
def test_a_long_wait_says_what_it_waits_for_and_control_c_leaves_it(python: Terminal) -> None:
    python.enter(SLOW)
    python.send("(x @ x).sum().item()\n")
    python.expect(r"waiting for node 0 \(.+\): \d+ operations under way \(Ctrl-C leaves, and loses nothing\)")
    python.send("\x03")
    traceback = python.expect(rf"KeyboardInterrupt\n{ERASED}{QUEUED}>>> ")
    assert "channel.py" not in traceback and traceback.count("File ") <= 6, traceback
    assert "\n3\n" in python.enter("1 + 2")


@pytest.mark.slow(reason="starts a prompt, 3 s")
def test_a_long_wait_says_which_operator_runs_and_about_how_long_it_takes(python: Terminal) -> None:
    python.enter(SLOW)
    python.send("(x @ x).sum().item()\n")
    python.expect(r"\d+ operations under way, now aten\.mm for \d+\.\d s")
    python.expect(r"under way, now aten\.mm for \d+\.\d s, about (\d+ m )?\d+ s left \(Ctrl-C")
    python.send("\x03")
    python.expect(rf"KeyboardInterrupt\n{ERASED}{QUEUED}>>> ")


@pytest.mark.slow(reason="starts a prompt, 5 s")
def test_after_control_c_in_a_loop_the_prompt_says_what_is_queued_and_how_to_drop_it(
    python: Terminal,
) -> None:
    python.enter("x = torch.ones(1500, 1500, device='remote'); y = x.sum(); y.item()")
    python.send("while True: z = x @ x\n\n")
    python.expect(r"\.\.\. ")
    python.expect(r"waiting for node 0 \(.+\): its queue is full, [\d,]+ operations? until it takes more")
    python.send("\x03")
    python.expect(rf"KeyboardInterrupt\n{ERASED}{QUEUED}>>> ")
    python.enter("dr.cancel()")
    assert "2250000.0" in python.enter("y.item()")
    assert "StreamCancelled" in python.enter("z.sum().item()")
    python.send("import time; time.sleep(60)\n")
    python.expect(r"sleep\(60\)\n")
    python.send("\x03")
    assert "queued" not in python.expect(r"KeyboardInterrupt\n>>> ")


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
@pytest.mark.slow(reason="starts a prompt, 8 s")
def test_ipython_says_it_too(tmp_path: Path) -> None:
    code = "from distruntime.__main__ import main; main(['repl', '--world-size', '1'])"
    shell = Terminal("-c", code, IPYTHONDIR=str(tmp_path))
    try:
        shell.expect(r"In \[1\]: ")
        shell.send(SLOW + "\n")
        shell.expect(r"In \[2\]: ")
        shell.send("(x @ x).sum().item()\n")
        shell.expect(r"waiting for node 0 \(.+\): \d+ operations under way")
        shell.send("\x03")
        shell.expect(rf"KeyboardInterrupt(?s:.*?)\n{QUEUED}(?s:.*?)In \[3\]: ")
    finally:
        shell.close()


@pytest.mark.slow(reason="starts a prompt, 8 s")
def test_a_shutdown_that_waits_says_so_and_control_c_ends_it(python: Terminal) -> None:
    python.enter(SLOW)
    python.send("dr.shutdown()\n")
    python.expect(r"waiting for node 0 \(.+\): \d+ operations under way \(Ctrl-C ends the session now\)")
    python.send("\x03")
    python.expect(r"KeyboardInterrupt\n>>> ")
    assert "False" in python.enter("dr.is_initialized()")


def test_a_session_and_its_nodes_say_what_they_are(python: Terminal) -> None:
    card = python.enter("session")
    assert "<distruntime session, open>" in card and re.search(r"node 0 +\S+ +(ready|busy) +cpu", card)
    assert re.search(r"0     \S+ +\d+ +(ready|busy) +cpu \(remote:0\)", python.enter("session.nodes"))
    python.enter("dr.shutdown()")
    assert "<distruntime session, it was shut down>" in python.enter("session")


def test_an_error_begins_on_its_own_line(python: Terminal) -> None:
    python.enter("dr.shutdown()")
    said = python.enter("dr.init_master_worker(workers=['ipc:///nowhere/at-all'], timeout=1.0)")
    assert re.search(r"connecting 1 worker \.+\nTraceback", said), said
    assert "_attach" not in said, said


@pytest.mark.slow(reason="starts a prompt, 7 s")
def test_leaving_the_repl_with_a_failure_unread_is_no_crash(repl: Terminal) -> None:
    repl.enter("y = torch.ones(3, device='remote')[torch.tensor([9], device='remote')]")
    repl.send("exit()\n")
    status, words = repl.ended()
    assert status == 0 and "Traceback" not in words, words


@pytest.mark.skipif(
    importlib.util.find_spec("readline") is None, reason="this Python was built without readline"
)
@pytest.mark.slow(reason="starts a prompt, 4 s")
def test_the_repl_completes_names_without_ipython(repl: Terminal) -> None:
    repl.enter("tensor = torch.ones(3, device='remote')")
    repl.send("tensor.pla\t")
    repl.expect(r"tensor\.place")
    repl.send("\n")
    repl.expect(r"dr\.place\(0, 'cpu'\)\n>>> ")
