"""Workers on machines that a person can `ssh` to.

One ssh process leads to each worker. Through it, this process looks what is there, starts the worker, hands
the key over, reads the log, and reaches the worker's socket. When ssh ends, another one takes its place: the
session sees a cut of the network, and goes on.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from ..errors import ConfigurationError, ConnectionFailed, DistruntimeError
from ..session.launcher import Launcher, LaunchSpec, WorkerProcess
from ..wire.keys import KeyPair
from ..wire.shield import RLock
from .log_ends import cut, last_lines
from .ssh_address import SshAddress
from .ssh_connection import Broken, SshConnection
from .ssh_probe import best, interpreters, lacking, script
from .ssh_setup import set_up
from .ssh_tunnels import SshTunnels

log = logging.getLogger("distruntime")

# So many seconds lie between two attempts to connect again. They double up to the most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
# A worker that is to end has so many seconds before its agent kills it.
_STOP = 3.0


@final
class SshWorker(WorkerProcess):
    """A worker that is reached by ssh. A thread of its own follows it.

    Args:
        name: the folder there for a session that has a name; "" if it has none.
        must_run: whether the worker must be there already.
        patience: seconds for each step until it runs, other than making an environment.
        say: shows a line about a step that takes long.
    """

    def __init__(
        self,
        address: SshAddress,
        spec: LaunchSpec,
        keys: KeyPair,
        name: str,
        must_run: bool,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self.address, self.node = address, spec.node
        self._spec, self._keys, self._name, self._must_run = spec, keys, name, must_run
        self._patience, self._say = patience, say
        self._socket = Path(spec.listen.removeprefix("ipc://"))
        self._log = (spec.logs or spec.directory) / f"worker-{spec.node}.log"
        # It says what is under way until the worker is ready.
        self.step, self.takes_long = "connecting", False
        self.ready = threading.Event()
        # It is True of a worker that ran before this process came.
        self.found = False
        # These are of the worker's own machine.
        self._pid, self.network, self._folder, self._offset, self._sshd = 0, "", "", 0, 0
        self._python = ""
        self._ended: str | None = None
        # An exception would keep its traceback, and the values in it.
        self._failure: tuple[type[DistruntimeError], str] | None = None
        # Other workers come by these.
        self.ways = SshTunnels(address)
        # It guards what follows.
        self._lock = RLock()
        self._connection: SshConnection | None = None
        self._connections = 0
        # Nothing is begun after this time (of `time.monotonic`), and no connection is made anew once it is
        # not infinite.
        self._give_up_at = math.inf
        self._over, self._left = threading.Event(), False
        self._thread = threading.Thread(target=self._live, name=f"distruntime-ssh-{spec.node}", daemon=True)
        self._thread.start()

    # -- what a session asks ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id on its machine; 0 before it runs."""
        return self._pid

    def poll(self) -> str | None:
        """Return how it has ended, or why it did not start; None while it runs."""
        if self._failure is not None:
            return self._failure[1]
        return self._ended

    def require_started(self) -> None:
        """Raise why it could not be started, if it could not."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)

    def last_lines(self, count: int = 20) -> str:
        """Return the end of what the worker wrote."""
        return last_lines(self._log, count) if self._log.exists() else ""

    def terminate(self) -> None:
        """Ask it to end. Return at once."""
        self._end_within(_STOP)

    def _end_within(self, seconds: float) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            self._give_up_at = time.monotonic() + seconds + 1.0
            connection = self._connection
        if connection is not None and self._folder:
            try:
                connection.ask(do="stop", timeout=seconds)
            except Broken:
                # The worker hears of the end of its session, or ends when its time without a master is over.
                return
        elif connection is not None:
            connection.hang_up()

    def stop(self, timeout: float = 5.0) -> None:
        """Block until it has ended, for `timeout` seconds and some more at most."""
        self._end_within(min(timeout, _STOP))
        with self._lock:
            self._give_up_at = min(self._give_up_at, time.monotonic() + timeout + 2.0)
        self._thread.join(timeout + 8.0)

    def leave(self) -> None:
        """Let the worker run on, and end the connection."""
        with self._lock:
            self._left = True
            self._over.set()
            self._give_up_at = time.monotonic() + 2.0
            # Connections between workers would keep it alive, and this process may end next.
            if self._connection is not None:
                self._connection.process.terminate()

    def __repr__(self) -> str:
        return f"<SshWorker node {self.node}, {self.address.shown}, {self.poll() or self.step}>"

    # -- its thread ------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._follow_until_its_end()
        except DistruntimeError as error:
            self._failure = type(error), str(error)
        except Exception as error:
            # The thread has nobody to raise to. The session hears of it as the worker's end.
            log.exception("the thread that follows %s ends", self.address.shown)
            self._failure = ConnectionFailed, f"{self.address.shown}: {type(error).__name__}: {error}"

    def _follow_until_its_end(self) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            began, why = time.monotonic(), ""
            try:
                if self._serve_connection():
                    return
                why = "ssh has ended"
            except ConnectionFailed as error:
                # Before the worker runs, the user waits for this.
                if not self.ready.is_set():
                    raise
                why = str(error)
            if self._over.is_set():
                return
            self.step = "connecting again"
            log.info("%s: %s. Connecting again", self.address.shown, why)
            if time.monotonic() - began > 10 * _LONGEST_PAUSE:
                pause = _SHORTEST_PAUSE
            if self._over.wait(pause):
                return
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _serve_connection(self) -> bool:
        """Make a connection and follow the worker on it; return whether the worker has ended."""
        connection = self._connect()
        try:
            first = not self._folder
            try:
                if first:
                    self._python = self._look(connection)
                self.step = "starting" if first else self.step
                deadline = time.monotonic() + self._patience
                connection.become_agent(self._python, deadline, self._goes_on)
                return self._follow(connection, first)
            except Broken:
                if not self.ready.is_set() and not self._over.is_set():
                    raise connection.failure() from None
                return False
        finally:
            with self._lock:
                self._connection = None
            self.ways.carried_by(None)
            connection.close()

    def _connect(self) -> SshConnection:
        with self._lock:
            if self._over.is_set():
                raise ConnectionFailed(f"{self.address.shown}: the session is over")
            self._connections += 1
            control = self._spec.directory / f"ssh-{self.node}"
            errors = self._spec.directory / f"ssh-{self.node}.log"
            self._connection = made = SshConnection(self.address, control, errors, self._patience)
            return made

    def _look(self, connection: SshConnection) -> str:
        """Return the Python there that runs the worker; raise why there is none."""
        deadline = time.monotonic() + self._patience
        connection.send(script(self.address))
        self.step = "looking what is there"
        said: list[str] = []
        for line in connection.lines(deadline, self._goes_on):
            if line == "done":
                break
            said.append(line)
        else:
            raise ConnectionFailed(
                f"{self.address.shown}: nothing answers there within {self._patience:g} s. "
                f"Try by hand: {self.address.command} python3 --version"
            )
        found, gpus = interpreters(said)
        chosen = best(found)
        if chosen is not None and chosen.is_complete:
            count = f", {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""
            self.step = f"{chosen.shown}{count}"
            return chosen.executable
        if self.address.options.get("setup") != "auto":
            raise lacking(self.address, chosen)
        self.takes_long = True
        try:
            return set_up(connection, self.address, found, self._tell, self._goes_on)
        finally:
            self.takes_long = False

    def _tell(self, step: str) -> None:
        """Take note of a step that takes long, and show it."""
        self.step = step
        self._say(f"\n {self.address.shown}: {step} ")

    def _goes_on(self) -> bool:
        return time.monotonic() < self._give_up_at

    def _request(self) -> dict[str, object]:
        """Return what starts the worker."""
        options = self.address.options
        arguments = ["--once", "--key", "-", "--threads", options.get("threads", str(self._spec.threads))]
        arguments += ["--simulate-cuda", options.get("simulate_cuda", str(self._spec.simulate_cuda))]
        for option in ("devices", "max_memory"):
            if option in options:
                arguments += [f"--{option.replace('_', '-')}", options[option]]
        return {
            "do": "start",
            "name": self._name,
            "must_run": self._must_run,
            "address": options.get("address", ""),
            "arguments": arguments,
            "environment": dict(self._spec.environment),
            "key": f"{self._keys.public.decode('ascii')} {self._keys.secret.decode('ascii')}",
        }

    def _follow(self, connection: SshConnection, first: bool) -> bool:
        """Act on what the agent says; return whether the worker has ended."""
        for line in connection.lines(None, self._goes_on):
            said: object = json.JSONDecoder().decode(line)
            match said:
                case {"hello": _, "sshd": int(sshd), "network": str(network)}:
                    before, self._sshd, self.network = self._sshd, sshd, network
                    self.ways.carried_by(connection)
                    lasting = self._name != ""
                    if first:
                        connection.ask(**self._request())
                    else:
                        connection.ask(
                            do="watch", folder=self._folder, offset=self._offset, lasting=lasting, sshd=before
                        )
                    # The session may have ended while there was no connection.
                    if self._over.is_set() and not self._left:
                        connection.ask(do="stop", timeout=_STOP)
                case {"started": str(folder), "found": bool(found)}:
                    self._folder, self.found = folder, found
                case {"port": int(port), "pid": int(pid)}:
                    self._pid = pid
                    self.ways.open_on(connection)
                    connection.forward(self._socket, "127.0.0.1", port)
                    self.step = "running"
                    self.ready.set()
                case {"log": str(text), "offset": int(offset)}:
                    # Its folder may have gone with the session.
                    with suppress(FileNotFoundError), self._log.open("ab") as file:
                        file.write(base64.b64decode(text))
                    cut(self._log)
                    self._offset = offset
                case {"request": int(number), "reached": list(reached)}:
                    self.ways.answered(number, reached)
                case {"failed": str(why)}:
                    raise ConnectionFailed(f"{self.address.shown}: {why}")
                case {"ended": str(how)}:
                    self._ended = how
                    return True
        return False


@final
class SshLauncher(Launcher):
    """Starts workers on machines that `ssh` reaches, one at each address.

    A worker listens on its machine's loopback, and appears here at the socket `spec.listen`, through ssh.

    Args:
        addresses: by node; None for a node that is not reached by ssh.
        session: the session's name, with which the workers stay; "" if it has none.
        must_run: whether the workers must be there already.
        patience: seconds for each step of starting one.
        say: shows a line about a step that takes long.
    """

    def __init__(
        self,
        addresses: Sequence[SshAddress | None],
        *,
        session: str = "",
        must_run: bool = False,
        patience: float = 30.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._addresses, self._session, self._must_run = addresses, session, must_run
        self._patience, self._say = patience, say
        self.workers: dict[int, SshWorker] = {}

    def start(self, spec: LaunchSpec) -> SshWorker:
        """Start a worker. Return at once."""
        address = self._addresses[spec.node]
        if address is None or not spec.listen.startswith("ipc://") or spec.key is None:
            raise ConfigurationError(
                "a worker that ssh reaches listens, and needs a key. Name it in the list of workers: "
                'init_master_worker(workers=["ssh://gpubox"])'
            )
        keys = KeyPair.load(spec.key)
        name = f"{self._session}-{spec.node}" if self._session else ""
        made = SshWorker(address, spec, keys, name, self._must_run, self._patience, self._say)
        self.workers[spec.node] = made
        return made
