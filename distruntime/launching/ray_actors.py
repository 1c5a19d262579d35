"""Workers in a Ray cluster: each is the child of an actor, which has the GPUs that Ray has given it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol, final

from ..errors import ConfigurationError, ConnectionFailed
from ..session.launcher import Launcher, LaunchSpec, WorkerProcess
from ..wire.keys import KeyPair
from ..wire.scratch import scratch_folder
from .log_ends import last_lines

# An actor has so many seconds to answer.
_ANSWER = 5.0
# An actor that has not begun by now waits for a machine with room for it.
_BEGUN = 60.0


class Method(Protocol):
    """A method of an actor, as Ray gives it."""

    def remote(self, *arguments: object) -> object:
        """Have the actor run it. Return at once, with what `ray.get` takes."""


class Actor(Protocol):
    """A handle of a `Host`, as Ray gives it."""

    pid: Method
    wait: Method
    last_lines: Method
    terminate: Method


@final
class Host:
    """The actor: it starts a worker, and tells how it ends. The worker ends with it, in any case."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], key: bytes) -> None:
        folder = scratch_folder("ray")
        # The worker cuts a log of such a name where it has grown large.
        self._log = folder / "worker-0.log"
        words = [sys.executable, "-m", "distruntime_worker", *arguments, "--local", str(os.getpid())]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # A key stands in no file and in no arguments there.
        self._process.stdin.write(key + b"\n")

    def pid(self) -> int:
        """Return the number of the worker's process on its machine."""
        return self._process.pid

    def wait(self) -> str:
        """Block until the worker has ended. Return how."""
        code = self._process.wait()
        return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"

    def last_lines(self, count: int) -> str:
        """Return the end of what the worker wrote."""
        return last_lines(self._log, count)

    def terminate(self) -> None:
        """Ask the worker to end."""
        if self._process.poll() is None:
            self._process.terminate()


@final
class RayWorker(WorkerProcess):
    """A worker below an actor."""

    def __init__(self, ray: ModuleType, actor: Actor) -> None:
        self._ray, self._actor = ray, actor
        self._pid, self._ended = actor.pid.remote(), actor.wait.remote()
        self._how: str | None = None
        self._words = ""

    @property
    def pid(self) -> int:
        """The process id on its machine; 0 where the actor has died. Block until the actor has started."""
        try:
            number: int = self._ray.get(self._pid, timeout=_BEGUN)
        except self._ray.exceptions.RayActorError:
            return 0
        except self._ray.exceptions.GetTimeoutError:
            raise ConnectionFailed(
                f"Ray has not started an actor within {_BEGUN:.0f} s: the cluster may have no room for it. "
                "`ray status` shows what is asked for and what there is"
            ) from None
        return number

    def poll(self) -> str | None:
        """Return how the worker has ended, or None while it runs or waits for a machine."""
        if self._how is None:
            done, _ = self._ray.wait([self._ended], timeout=0)
            if done:
                try:
                    how: str = self._ray.get(self._ended)
                    self._how = how
                except self._ray.exceptions.RayError as error:
                    self._how = f"has ended with its actor: {str(error).strip().splitlines()[0]}"
        return self._how

    def last_lines(self, count: int = 20) -> str:
        """Return the end of what the worker wrote; "" where its actor does not answer."""
        try:
            text: str = self._ray.get(self._actor.last_lines.remote(count), timeout=_ANSWER)
        except (self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError):
            return ""
        return text

    def terminate(self) -> None:
        """Have the actor ask the worker to end. Return at once."""
        self._actor.terminate.remote()

    def stop(self, timeout: float = 5.0) -> None:
        """Block until the worker has ended, and the actor with it."""
        if self.poll() is None and timeout > 0:
            self.terminate()
            self._ray.wait([self._ended], timeout=timeout)
        how = self.poll()
        self._ray.kill(self._actor)
        self._how = how or "was killed with its actor"

    def leave(self) -> None:
        """Let the actor run on. It was started to outlive this process."""


@final
class RayLauncher(Launcher):
    """Starts workers as actors of a Ray cluster.

    Args:
        gpus: so many GPUs Ray keeps for each worker, which sees no others.
        cpus: so many cores Ray keeps for each worker.
        address: the cluster's, as `ray.init` takes it; "auto" is the one that $RAY_ADDRESS or this machine
            names.

    Raises:
        ConfigurationError: Ray is not installed. ConnectionFailed: there is no cluster.
    """

    def __init__(self, *, gpus: float = 0, cpus: float = 1, address: str = "auto") -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigurationError("workers in a Ray cluster need Ray here and there:  pip install ray")
        self._ray = importlib.import_module("ray")
        self._gpus, self._cpus = gpus, cpus
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="error")
            except ConnectionError as error:
                raise ConnectionFailed(
                    f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}. Start one with "
                    "`ray start --head`, or name it in $RAY_ADDRESS"
                ) from error

    def start(self, spec: LaunchSpec) -> RayWorker:
        """Ask Ray for an actor with a worker. Return at once, before Ray has a machine for it."""
        key = b""
        if spec.key is not None:
            pair = KeyPair.load(spec.key)
            key = pair.public + b" " + pair.secret
        arguments = [word for word in spec.arguments() if word != "--insecure"]
        if "--key" in arguments:
            at = arguments.index("--key")
            del arguments[at : at + 2]
        # The name of a detached actor is its own, and nobody asks for it. Without a namespace Ray warns.
        lifetime = (
            {
                "lifetime": "detached",
                "name": f"distruntime-{os.urandom(6).hex()}",
                "namespace": "distruntime",
            }
            if spec.lasting
            else {}
        )
        made = self._ray.remote(Host).options(
            num_gpus=self._gpus, num_cpus=self._cpus, max_concurrency=4, **lifetime
        )
        return RayWorker(self._ray, made.remote(arguments, dict(spec.environment), key))
