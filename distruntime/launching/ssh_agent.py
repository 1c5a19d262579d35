"""The other end of an ssh connection: it starts a worker on its machine and ends it.

It tells what becomes of the worker. The master sends this file's text through ssh, and that of
`distruntime.wire.scratch`. So both import Python's own library alone. A connection has an agent of its own.
The worker outlives it: when the connection is cut, the next one's agent finds the worker by its folder. A
process beside the worker waits for the worker's end and notes it.

Each line on standard input is a request in JSON. Each line on standard output that begins with the mark is an
answer or some news.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from distruntime.wire.scratch import let_go, lock_of, scratch_folder

# What the master reads begins with it.
MARK = "distruntime> "
# The worker says this in its log once it listens.
LISTENS = re.compile(rb"listening on tcp://127\.0\.0\.1:(\d+), ")
# So many seconds lie between two looks, before the worker listens and later.
SOON, LATER = 0.02, 0.25
# The note of how a worker has ended stays so many seconds, for a master that connects again.
STAYS = 120.0
# When standard input has ended, the agent looks so often for its sshd. If that is there, the master died.
LOOKS = 6
# A log is sent in pieces of so many bytes. One that has been sent begins anew behind so many.
PIECE, MOST = 1 << 16, 64 << 20
# A connection to another worker is tried for so many seconds.
REACH = 2.0


def say(**news: object) -> None:
    """Send news to the master; raise `OSError` if the connection is no more."""
    data = (MARK + json.dumps(news) + "\n").encode("ascii")
    while data:
        data = data[os.write(1, data) :]


def network() -> str:
    """Return what is the same for two processes that share a loopback; nothing where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def reached_at() -> str:
    """Return this machine's address as ssh has reached it; loopback where nobody knows."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    host = words[2] if len(words) == 4 else ""
    return host if host and "%" not in host else "127.0.0.1"


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] not in ("Z", "X")
    except OSError:
        return True


def read(path: str) -> str:
    """Return a small file's text; nothing if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def write(path: str, text: str) -> None:
    """Write a small file, whole or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(path + ".new", path)


def remove(folder: str) -> None:
    """Remove a worker's folder. Whoever would still write there finds none from the first moment on."""
    with suppress(OSError):
        os.rename(folder, folder + ".gone")
    shutil.rmtree(folder + ".gone", ignore_errors=True)
    let_go(Path(folder))
    if os.path.basename(os.path.dirname(folder)) == "ssh":
        # The folders of sessions that have names were made for them, and go with the last one.
        with suppress(OSError):
            os.rmdir(os.path.dirname(folder))
            os.rmdir(os.path.dirname(os.path.dirname(folder)))


def number(text: str) -> int:
    """Return the number that a file had; 0 if it had none."""
    return int(text) if text.strip().isdigit() else 0


def ended_text(code: int) -> str:
    """Return how a process has ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


class Agent:
    """One worker, as this connection knows it."""

    def __init__(self) -> None:
        self.folder = ""
        self.lasting = False
        self.offset = 0
        self.port = 0
        self.ended = ""
        self.sshd = os.getppid()

    # -- the worker ------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        must_run: bool,
        address: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        key: str,
    ) -> None:
        """Start a worker, or find the one that runs already for a session that has a name."""
        self.lasting = name != ""
        if self.lasting:
            base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
            parent = os.path.join(base, "distruntime", "ssh")
            self.folder = os.path.join(parent, name)
            if self.find():
                say(started=self.folder, found=True)
                return
            if must_run:
                say(failed="it has no worker of this session any more")
                return
            remove(self.folder)
            os.makedirs(parent, mode=0o700, exist_ok=True)
            os.mkdir(self.folder, 0o700)
        else:
            # The worker outlives this process.
            self.folder = str(scratch_folder("ssh", outlives=True))
        where = ["--listen", "tcp://127.0.0.1:0", "--data-address", address or reached_at()]
        self.run([*arguments, *where], {**os.environ, **environment}, key)
        say(started=self.folder, found=False)

    def find(self) -> bool:
        """Whether the worker in the folder runs."""
        pid = number(read(os.path.join(self.folder, "pid")))
        if read(os.path.join(self.folder, "ended")) or not pid or not alive(pid):
            return False
        # What it has said long ago is of no use here.
        with suppress(OSError):
            self.offset = max(0, os.path.getsize(os.path.join(self.folder, "log")) - PIECE)
        return True

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], key: str) -> None:
        """Start the worker under a process that outlives this one and waits for the worker's end."""
        if os.fork():
            return
        # Nothing of the connection may stay open here, or ssh would wait for this process.
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            self.stand_by(arguments, environment, key)
        finally:
            os._exit(0)

    def stand_by(self, arguments: Sequence[str], environment: Mapping[str, str], key: str) -> None:
        """Run the worker, and note how it has ended."""
        descriptor = os.open(os.path.join(self.folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            worker = subprocess.Popen(
                [sys.executable, "-m", "distruntime_worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                env=environment,
                # Python looks for modules in the current folder first, and nobody else writes in this one.
                cwd=self.folder,
                # The worker owns the folder, too.
                pass_fds=() if self.lasting else [lock_of(Path(self.folder))],
            )
        except OSError as error:
            write(os.path.join(self.folder, "ended"), f"could not be started: {error}")
            return
        write(os.path.join(self.folder, "pid"), str(worker.pid))
        assert worker.stdin is not None
        # It may have ended already, and its log says why.
        with suppress(OSError), worker.stdin:
            worker.stdin.write(key.encode("ascii") + b"\n")
        code = worker.wait()
        if not os.path.isdir(self.folder):
            return
        write(os.path.join(self.folder, "ended"), ended_text(code))
        until = time.monotonic() + STAYS
        while os.path.isdir(self.folder) and time.monotonic() < until:
            time.sleep(LATER)
        remove(self.folder)

    def look(self) -> None:
        """Send what is new: lines of the log, where the worker listens, and how it has ended."""
        if not self.folder or self.ended:
            return
        ended = read(os.path.join(self.folder, "ended"))
        if not os.path.isdir(self.folder):
            ended = "ended, and nobody knows how: its folder is gone"
        with suppress(FileNotFoundError):
            with open(os.path.join(self.folder, "log"), "rb") as file:
                if not self.port:
                    # A log that has begun anew does not have it.
                    self.port = number(read(os.path.join(self.folder, "port")))
                    if not self.port and (listens := LISTENS.search(file.read(PIECE))):
                        self.port = int(listens.group(1))
                    if self.port:
                        pid = number(read(os.path.join(self.folder, "pid")))
                        say(port=self.port, pid=pid, network=network())
                self.send(file)
        if ended:
            self.ended = ended
            say(ended=ended)
            remove(self.folder)

    def send(self, file: BinaryIO) -> None:
        """Send what is new in the log. Have it begin anew where it has grown large: the master has it."""
        if os.fstat(file.fileno()).st_size < self.offset:
            # It began anew, and the connection broke before the master knew.
            self.offset = 0
        file.seek(self.offset)
        while piece := file.read(PIECE):
            self.offset += len(piece)
            say(log=base64.b64encode(piece).decode("ascii"), offset=self.offset)
        if self.offset > MOST:
            # A disk that is full ends nothing.
            with suppress(OSError):
                write(os.path.join(self.folder, "port"), str(self.port))
                # The worker appends. What it writes between the two is lost.
                os.truncate(file.name, 0)
                self.offset = 0
            say(log="", offset=self.offset)

    def stop(self, timeout: float) -> None:
        """End the worker, and remove what it leaves."""
        pid = number(read(os.path.join(self.folder, "pid")))
        until = time.monotonic() + timeout
        if pid and not read(os.path.join(self.folder, "ended")):
            for how, patience in ((signal.SIGTERM, until), (signal.SIGKILL, until + 5.0)):
                try:
                    os.kill(pid, how)
                except OSError:
                    break
                while alive(pid) and time.monotonic() < patience:
                    time.sleep(SOON)
                if not alive(pid):
                    break
        remove(self.folder)

    # -- the master ------------------------------------------------------------------------------------

    def act(self, request: object) -> bool:
        """Do what the master asks; return whether to go on."""
        match request:
            case {
                "do": "start",
                "name": str(name),
                "must_run": bool(must_run),
                "address": str(address),
                "arguments": list(arguments),
                "environment": dict(environment),
                "key": str(key),
            }:
                self.start(name, must_run, address, arguments, environment, key)
            case {
                "do": "watch",
                "folder": str(folder),
                "offset": int(offset),
                "lasting": bool(lasting),
                "sshd": int(sshd),
            }:
                # The connection before may be half open.
                if sshd != os.getppid():
                    end_sshd(sshd)
                self.folder, self.offset, self.lasting = folder, offset, lasting
            case {"do": "reach", "request": int(asked), "endpoints": list(endpoints)}:
                say(request=asked, reached=reach([(str(host), int(port)) for host, port in endpoints]))
            case {"do": "stop", "timeout": int() | float() as timeout}:
                self.stop(timeout)
                say(ended="stopped")
                return False
            case _:
                return False
        return True

    def serve(self) -> None:
        """Serve the master until it leaves, or is gone."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        say(hello=sys.version.split()[0], sshd=self.sshd, network=network())
        buffered = b""
        while True:
            pause = SOON if self.folder and not (self.port or self.ended) else LATER
            if select.select([0], [], [], pause)[0]:
                piece = os.read(0, PIECE)
                if not piece:
                    self.master_gone()
                    return
                buffered += piece
                *lines, buffered = buffered.split(b"\n")
                for line in lines:
                    if not self.act(json.JSONDecoder().decode(line.decode())):
                        return
            self.look()
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)

    def master_gone(self) -> None:
        """End the worker if the master has died: its connection is there, and nobody is at the other end.

        Where the connection itself has broken, its sshd ends at once, and the master connects again. A
        session that has a name waits for its next master in any case.
        """
        if self.lasting or not self.folder or not is_sshd(self.sshd):
            return
        for _ in range(LOOKS):
            time.sleep(LATER)
            if os.getppid() != self.sshd:
                return
        self.stop(5.0)


def reach(endpoints: Sequence[tuple[str, int]]) -> list[bool]:
    """Return which of these hosts and ports accept a connection from here."""
    found = [False] * len(endpoints)

    def look(k: int, host: str, port: int) -> None:
        with suppress(OSError):
            socket.create_connection((host, port), REACH).close()
            found[k] = True

    threads = [threading.Thread(target=look, args=(k, *endpoint)) for k, endpoint in enumerate(endpoints)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def is_sshd(pid: int) -> bool:
    """Whether a process is one of the ssh server's."""
    return pid > 1 and "sshd" in read(f"/proc/{pid}/cmdline")


def end_sshd(sshd: int) -> None:
    """End a connection's process of the ssh server, which listens at the forwarded ports."""
    if is_sshd(sshd):
        # It has ended by now, or it is another user's.
        with suppress(OSError):
            os.kill(sshd, signal.SIGTERM)


def main() -> None:
    """Be the agent of one connection."""
    # If the connection is no more, the worker stays for the next one.
    with suppress(BrokenPipeError):
        Agent().serve()
    # Workers that speak to each other through ssh would keep it alive.
    end_sshd(os.getppid())


if __name__ == "__main__":
    main()
