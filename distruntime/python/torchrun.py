"""Scripts that are written for torchrun, on the workers of a session.

Each worker runs torchrun's own agent (`torch.distributed.run`), which starts the ranks there. This process
says where the agents meet, prints what they print, and passes signals and exit codes on.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..collectives.groups import groups_of
from ..errors import InternalError, NodeFailed, UsageError
from ..log.node import Node
from ..session.meeting import proposed
from ..session.session import active_session
from ..session.spelling import on_node
from ..tensors.fetch import fetch, fetch_async
from .callee import Callee
from .objects import object_of

# One command is for all nodes, so what torchrun is told on each of them is known here.
_SAID_HERE = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--local-addr")
# An agent waits so many seconds for something to print before it says that there is nothing.
_LOOK = 0.1
# When one agent has failed, the others have so many seconds to notice.
_GRACE = 5.0
# A script's folder that travels has so many bytes at most.
_MOST = 1 << 26
# Agents of torchrun pass these on to their ranks.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ASIDE = frozenset({"__pycache__", "node_modules", "venv"})


def nodes_of(flags: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """Return the least and the largest number of nodes that the flags want."""
    text = next((value for name, value in reversed(flags) if name == "--nnodes"), "1")
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 0 < int(least) <= int(most or least):
        raise UsageError(f"got --nnodes {text}: expected a number of nodes, or MIN:MAX")
    return int(least), int(most or least)


def run_script(flags: Sequence[tuple[str, str]], script: str, arguments: Sequence[str], module: bool) -> int:
    """Run a script under torchrun on each worker of the session; return the exit code.

    `flags` are torchrun's own, each with its value or "".
    """
    nodes = active_session().nodes
    least, most = nodes_of(flags)
    if any(name == "--standalone" for name, _ in flags) and len(nodes) > 1:
        raise UsageError(f"got --standalone and {len(nodes)} workers: leave it out, or give one worker")
    if not least <= len(nodes) <= most and any(name == "--nnodes" for name, _ in flags):
        asked = f"{least}:{most}" if least != most else str(most)
        raise UsageError(
            f"got --nnodes {asked} and {len(nodes)} workers: a node of torchrun's is a worker here. Leave "
            "--world-size out, or give the number of nodes there"
        )
    groups_of(active_session()).meeting.require_routes(
        [node.index for node in nodes], "a script under torchrun"
    )
    agents = [_Agent(node) for node in nodes]
    where = None if module else Path(script).absolute()
    if where is not None and not where.is_file():
        where = None
    if where is None and not module and not any(name == "--no-python" for name, _ in flags):
        raise UsageError(f"{script}: there is no such file here")
    given = _given(flags, agents)
    packed: bytes | None = None
    for agent in agents:
        here = script
        if where is not None:
            here = str(where)
            if not agent.ask("has", here):
                packed = packed if packed is not None else _packed(where.parent)
                here = f"{agent.ask('unpack', packed)}/{where.name}"
        own = ["--local-addr", agent.host] if len(nodes) > 1 else []
        agent.start(
            [*given, *own, *_rendezvous(flags, agents, agent), *(["-m"] if module else []), here, *arguments],
            logs=not any(name == "--log-dir" for name, _ in flags),
        )
    return _followed(agents)


def _given(flags: Sequence[tuple[str, str]], agents: Sequence[_Agent]) -> list[str]:
    """Return the flags that go to each agent."""
    words = ["--nnodes", str(len(agents))]
    least, most = nodes_of(flags)
    if least != most:
        words[1] = f"{least}:{most}"
    for name, value in flags:
        if name not in _SAID_HERE:
            words += [name, value] if value else [name]
    if not any(name in ("--tee", "--redirects") for name, _ in flags):
        # The agent says before each line which rank has printed it, where it reads what its ranks print.
        words += ["--tee", "3"]
    return words


def _rendezvous(flags: Sequence[tuple[str, str]], agents: Sequence[_Agent], own: _Agent) -> list[str]:
    """Return the flags that say where the agents meet: at the first one, unless the user has said it."""
    names = {name for name, _ in flags}
    if names & {"--standalone", "--rdzv-backend", "--rdzv-endpoint"}:
        return []
    host, first = agents[0].host, own is agents[0]
    endpoint = f"[{host}]:{agents[0].port}" if ":" in host else f"{host}:{agents[0].port}"
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    if "--rdzv-id" not in names:
        words += ["--rdzv-id", agents[0].run]
    given = [value for name, value in flags if name == "--rdzv-conf"]
    return [*words, "--rdzv-conf", ",".join([*given, f"is_host={int(first)}"])]


def _packed(folder: Path) -> bytes:
    """Return a script's folder as it travels."""
    file, size = io.BytesIO(), 0
    with tarfile.open(fileobj=file, mode="w") as files:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if not path.is_file() or any(part.startswith(".") or part in _ASIDE for part in parts):
                continue
            size += path.stat().st_size
            if size > _MOST:
                raise UsageError(
                    f"{folder} has more than {_MOST >> 20} MiB, and a worker does not have the script's "
                    "path: put the script into a folder of its own, or put its folder there, under the same "
                    "path"
                )
            files.add(path, "/".join(parts))
    return file.getvalue()


class _Agent:
    """The agent of one worker."""

    def __init__(self, node: Node) -> None:
        session = active_session()
        self.node, self.run = node, uuid.uuid4().hex
        self._callee = Callee("torchrun", "agent")
        home = session.places.residence(on_node(session.places, node.index))
        self._object = object_of(self._callee, home=home)
        match self.ask("reached_at", proposed(node)):
            case (str(host), int(port)):
                self.host, self.port = host, port
            case found:
                raise InternalError(f"a worker is reached at {found!r:.80}")
        self.code: int | None = None
        self._rest = b""

    def issue(self, method: str, *args: object) -> object:
        """Have a method run there. Return at once."""
        callee = self._callee.child(method, f"torchrun {method}", f"method {method}")
        return object_of(callee, self._object, *args)

    def ask(self, method: str, *args: object) -> object:
        """Return what a method returns there."""
        return fetch(self.issue(method, *args))

    def start(self, arguments: Sequence[str], *, logs: bool) -> None:
        """Start the agent, with a folder for its logs if it has none. Return when it has been asked for."""
        variables = {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[node {self.node.index} rank ${{rank}}] ",
            # What a rank prints would come at its end only.
            "PYTHONUNBUFFERED": "1",
            # Ranks that share their agents' store look under their own agent's number of restarts. An agent
            # that starts its ranks again for another one does not count that, and they would not meet.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.ask("start", [*arguments], variables, os.getcwd(), logs)

    def took(self, found: object) -> bool:
        """Print what has come of it, and note its end. Return whether anything has come."""
        match found:
            case (bytes(data), code) if code is None or isinstance(code, int):
                self.code = code
            case _:
                raise InternalError(f"an agent sent {found!r:.80}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.code is not None and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = line.decode(errors="replace")
            own = "" if text.startswith("[node ") else f"[node {self.node.index}] "
            print(f"{own}{text}", flush=True)
        return bool(data)


def _followed(agents: Sequence[_Agent]) -> int:
    """Print what the agents print, and pass signals on, until all have ended; return the exit code."""
    first = 0
    ends_at: float | None = None
    with _signals() as came:
        passed = 0
        while any(agent.code is None for agent in agents):
            running = [agent for agent in agents if agent.code is None]
            for number in came[passed:]:
                # Whoever asks again does not want to wait.
                for agent in running:
                    agent.issue("signal", number if passed == 0 else signal.SIGKILL)
                passed += 1
            arriving = [(agent, fetch_async(agent.issue("read", _LOOK))) for agent in running]
            for agent, future in arriving:
                try:
                    agent.took(future.result())
                except NodeFailed as error:
                    print(f"[node {agent.node.index}] {error}", file=sys.stderr, flush=True)
                    agent.code = 1
                first = first or agent.code or 0
            if first and ends_at is None:
                ends_at = time.monotonic() + _GRACE
            if ends_at is not None and time.monotonic() > ends_at:
                ends_at = float("inf")
                for agent in running:
                    agent.issue("signal", signal.SIGTERM)
    if came:
        return 128 + came[0]
    # A negative code is a signal's, as a shell shows it.
    return 128 - first if first < 0 else first


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that end this process, in a list."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    # Who has started this with `nohup` wants it to outlive the terminal.
    ended_by = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in ended_by}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
