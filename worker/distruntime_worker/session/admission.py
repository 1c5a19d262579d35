"""Which masters a worker lets into which session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hmac import compare_digest

from distruntime.errors import ProtocolError
from distruntime.wire.messages import PROTOCOL, Hello

from .session import Session

# The log shows so many characters of the names in a greeting.
_LONGEST = 300


def refusal(hello: Hello, found: Session | None, sessions: Mapping[str, Session]) -> str:
    """Return why there is no session for this master.

    Nothing if there is one. `found` has the name that it asks for.
    """
    if hello.protocol != PROTOCOL:
        return (
            f"this worker speaks protocol {PROTOCOL}, the master {hello.protocol}: install the same "
            "distruntime on both. There, `distruntime-worker --version` shows its version"
        )
    if not 0 <= hello.keep <= 1e9:
        raise ProtocolError(f"a session cannot be kept for {hello.keep} s")
    if not all(0 < len(name) <= _LONGEST and name.isprintable() for name in (hello.session, hello.host)):
        raise ProtocolError(
            f"a session is not called {hello.session!r:.80}, nor a machine {hello.host!r:.80}"
        )
    match hello.mode:
        case "again" if found is not None and compare_digest(found.token, hello.token):
            return (
                ""
                if found.link.acknowledged <= hello.received <= found.link.sent
                else "it was left with other messages than this worker has sent"
            )
        case "again" if found is not None:
            return f"it was taken over by a master on {found.master.rpartition(' on ')[2]}"
        case "again":
            return (
                f"the worker (pid {os.getpid()}) has no session {hello.session!r}: somebody "
                "restarted the worker, or the session expired"
            )
        case "new" | "resume" | "auto" if found is not None and compare_digest(found.token, hello.token):
            # Its own master has given it up, and begins anew: the connection, or all of it.
            return ""
        case "new" | "resume" | "auto" if found is not None and found.link.peer is not None:
            pid = ", ".join(map(str, found.process[1:2]))
            return (
                f"the session {hello.session!r} is in use, by pid {pid} on "
                f"{found.master.rpartition(' on ')[2]}: force=True takes it over, or choose another name"
            )
        case "new" if found is not None:
            return (
                f"there is a session {hello.session!r} already, without a master: "
                'resume="auto" attaches to it, force=True drops it'
            )
        case "resume" | "force resume" if found is None:
            return f"there is no session {hello.session!r} here; there {_listed(sessions)}"
        case "new" | "force new" | "resume" | "force resume" | "auto" | "force auto":
            return ""
    raise ProtocolError(f"a Hello of mode {hello.mode[:40]!r}")


def _listed(sessions: Mapping[str, Session]) -> str:
    names = [
        f"{name!r} ({'in use' if session.link.peer is not None else 'without a master'})"
        for name, session in sorted(sessions.items())
        if session.lasting
    ]
    return "are " + ", ".join(names) if names else "are none that have a name"
