"""Every deadline.

What waits how long for what, and how to change it. docs/sessions.md has this table; a test holds the two
together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Deadline:
    """Seconds after which something is given up or called by another name.

    `argument` is what sets it in a call, `variable` in the environment of the process that waits.
    """

    name: str
    seconds: float
    variable: str
    argument: str
    meaning: str

    def get(self, given: object = None, argument: str = "timeout") -> float:
        """Return the seconds: those given in a call, as `argument`, else the environment's, else the default.

        Raise `ConfigurationError` for what cannot be.
        """
        source, value = argument, given
        if given is None:
            source, value = self.variable, os.environ.get(self.variable, "")
            if value == "":
                return self.seconds
        # This is a timedelta.
        if hasattr(value, "total_seconds"):
            value = value.total_seconds()
        try:
            seconds = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            seconds = -1.0
        if isinstance(value, bool) or not 0 < seconds <= 1e9:
            raise ConfigurationError(
                f"{source} is a number of seconds above 0 (up to 1e9, some thirty years), got {value!r}"
            )
        return seconds


CONNECT = Deadline(
    "connect",
    30.0,
    "DISTRUNTIME_TIMEOUT",
    "init_master_worker(timeout=), restart(timeout=)",
    "workers to start or answer",
)
# A cluster's scheduler may start the workers that dial in. Its machines may have to boot, and to read torch
# over a network. torchrun waits as long for its members.
DIAL = Deadline(
    "dial",
    600.0,
    "DISTRUNTIME_DIAL_TIMEOUT",
    "init_master_worker(timeout=), restart(timeout=)",
    "workers to dial in, where `listen=` is given",
)
UNREACHABLE = Deadline(
    "unreachable",
    10.0,
    "DISTRUNTIME_UNREACHABLE",
    "init_master_worker(unreachable=)",
    "silence after which a worker is called unreachable (set it for the worker too)",
)
GRACE = Deadline(
    "grace",
    600.0,
    "DISTRUNTIME_GRACE",
    "init_master_worker(grace=)",
    "a worker that is unreachable, before it is lost",
)
KEEP = Deadline(
    "keep",
    12 * 3600.0,
    "DISTRUNTIME_KEEP",
    "init_master_worker(keep=)",
    "a named session without a master, before its values are dropped",
)
SHUTDOWN = Deadline(
    "shutdown",
    10.0,
    "DISTRUNTIME_SHUTDOWN_TIMEOUT",
    "shutdown(timeout=)",
    "what is in flight at the end of a session",
)
DETACH = Deadline(
    "detach",
    10.0,
    "DISTRUNTIME_DETACH_TIMEOUT",
    "detach(timeout=)",
    "what is in flight to arrive, before this process leaves",
)
ASK = Deadline(
    "ask", 1.0, "DISTRUNTIME_ASK_TIMEOUT", "", "dr.nodes() and dr.memory() for one worker's figures"
)
LOOK = Deadline(
    "look", 5.0, "DISTRUNTIME_LOOK_TIMEOUT", "", "a worker to answer `python -m distruntime status`"
)
TRACE = Deadline(
    "trace",
    10.0,
    "DISTRUNTIME_TRACE_TIMEOUT",
    "trace(timeout=)",
    "what still runs at the end of a trace, before the trace is written without its end",
)
REPR = Deadline(
    "repr",
    2.0,
    "DISTRUNTIME_REPR_TIMEOUT",
    "",
    "showing a tensor at a prompt, before it says what is computing instead",
)
MEET = Deadline(
    "meet", 30.0, "DISTRUNTIME_MEET_TIMEOUT", "", "workers to find each other for a group, a mesh or a copy"
)
GROUP = Deadline(
    "group",
    1800.0,
    "DISTRUNTIME_GROUP_TIMEOUT",
    "new_group(timeout=)",
    "one operation of a group, late members included",
)
FINISH = Deadline(
    "finish",
    60.0,
    "DISTRUNTIME_FINISH_TIMEOUT",
    "",
    "one instruction of a master that has left, when another one resumes the session: after it, the worker "
    "drops the rest",
)
ORPHAN = Deadline(
    "orphan",
    3.0,
    "DISTRUNTIME_ORPHAN_TIMEOUT",
    "",
    "a worker whose master has died to stop by itself, before it is ended",
)

DEADLINES = (
    *(CONNECT, DIAL, UNREACHABLE, GRACE, KEEP, SHUTDOWN, DETACH),
    *(ASK, LOOK, TRACE, REPR, MEET, GROUP, FINISH, ORPHAN),
)
