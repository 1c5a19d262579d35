"""The sessions of one worker: how each begins, goes on when its master comes back, and ends.

The reader's thread alone calls this. What peers without a session say, it does not know.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hmac import compare_digest

import torch

from distruntime.errors import ConfigurationError
from distruntime.wire import messages
from distruntime.wire.channel import Channel, PeerGone
from distruntime.wire.codec import encode
from distruntime.wire.deadlines import FINISH
from distruntime.wire.identity import has_died, process
from distruntime.wire.strangers import Tally

from ..log.budget import Budget, limits
from ..log.turns import Turns
from ..machine import hardware, lost, threads
from ..machine.devices import Devices
from ..machine.figures import give_pages_back
from ..machine.settings import restore
from ..publishing.published import Published
from ..values.staging import downloads, uploads
from .address import data_host
from .admission import refusal
from .config import WorkerConfig
from .finishing import Finishing
from .session import Session

log = logging.getLogger("distruntime.worker")


class Sessions:
    """The sessions by their names, and by the connections on which their masters are.

    `ended` is called with each session that has ended.
    """

    def __init__(
        self, config: WorkerConfig, devices: Devices, channel: Channel, ended: Callable[[Session], None]
    ) -> None:
        self._config, self._devices, self._channel, self._ended = config, devices, channel, ended
        self.incarnation = os.urandom(16)
        self.by_name: dict[str, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        # These have a successor, and finish what their masters have issued.
        self._finishing: list[Finishing] = []
        self._finish = FINISH.get()
        # Masters have given up these connections.
        self._retired: deque[bytes] = deque(maxlen=4096)
        # Those of them that have ended are here. Their greetings may still lie unread.
        self._gone: deque[bytes] = deque(maxlen=4096)
        self.turns = Turns()
        # It counts what peers without a session here make this worker say.
        self.strangers = Tally(log.warning)
        # It is True once there was a session.
        self.served = False

    def published(self) -> dict[str, Published]:
        """Return what each session has published."""
        return {name: session.published for name, session in list(self.by_name.items())}

    def greet(self, peer: bytes, message: messages.Message) -> None:
        """Send one message to whoever is at the other end of a connection, who may be gone."""
        # It did not wait for the answer; an event tells of it.
        with suppress(PeerGone):
            self._channel.send(peer, [encode(message)])

    # -- connections -----------------------------------------------------------------------------------------

    def connected(self, peer: bytes) -> None:
        """Note that a connection has begun, perhaps under the name of an earlier one."""
        with suppress(ValueError):
            self._gone.remove(peer)

    def disconnected(self, peer: bytes) -> None:
        """Note that a connection has ended."""
        self._gone.append(peer)
        self.give_up(peer)

    def give_up(self, peer: bytes) -> None:
        """Note that no master speaks on a connection any more: if a session's did, it is away."""
        session = self._retire(peer)
        if session is None:
            return
        session.leave()
        if session.spent:
            self.end(session, "its master has died")
        else:
            log.info(
                "session of master %s: connection closed. This worker keeps it for %.0f s",
                session.master,
                session.keep,
            )

    def is_retired(self, peer: bytes) -> bool:
        """Whether what comes on a connection may be of a master that has given it up."""
        return peer in self._retired

    def _retire(self, peer: bytes) -> Session | None:
        """Ignore what comes on a connection from now on. Return the session that it was of."""
        self._retired.append(peer)
        return self.by_peer.pop(peer, None)

    # -- the end ---------------------------------------------------------------------------------------------

    def every(self) -> list[Session]:
        """Return all sessions, with those that only finish what their masters have issued."""
        return [*self.by_name.values(), *(one.session for one in self._finishing)]

    def end(self, session: Session, why: str) -> None:
        """End a session, whose values go with it."""
        log.info("session of master %s ended (%s)", session.master, why)
        if session.link.peer is not None:
            self._retire(session.link.peer)
        session.close()
        if self.by_name.get(session.name) is session:
            del self.by_name[session.name]
        # What is published ends with it.
        for one in [one for one in self._finishing if one.session.published is session.published]:
            self._finishing.remove(one)
            one.session.close()
        self._ended(session)

    def _hand_over(self, session: Session, why: str) -> None:
        """Have a session end when what its master has issued has run: what is published stays."""
        log.info("session of master %s ends (%s)", session.master, why)
        if session.link.peer is not None:
            self._retire(session.link.peer)
        del self.by_name[session.name]
        finishing = Finishing(session, self._finish, _nothing if self.by_name else restore)
        self._finishing.append(finishing)
        if self._config.data_port and session.release_address():
            # What other workers have to do with this session cannot go on.
            finishing.drop("that one needs the address that --data-address names")
        self._ended(session)

    def drop(self, session: Session, why: str) -> None:
        """End a session whose master has broken the protocol."""
        log.warning("dropped a peer: %s", why)
        session.send(messages.Goodbye(why))
        self.end(session, "protocol error")

    def bury(self, name: str, witness: Session) -> None:
        """End a session whose master is away, and has died as another master says."""
        dead = self.by_name.get(name)
        if dead is not None and dead.alone_since is not None and not dead.lasting:
            self.end(dead, f"its master has died, says {witness.master}")

    def end_spent(self) -> None:
        """End the sessions whose masters have been away for too long, or have died, or have successors."""
        for one in [one for one in self._finishing if one.look()]:
            self._finishing.remove(one)
            one.session.close()
            self._ended(one.session)
        for session in [session for session in self.by_name.values() if session.spent]:
            dead = not session.lasting and has_died(session.process)
            self.end(
                session, "its master has died" if dead else f"its master was away for {session.keep:g} s"
            )

    def sweep(self) -> None:
        """Collect what ended sessions leave: threads, mapped memory and sockets' descriptors, all in
        cycles.
        """
        gc.collect()
        give_pages_back()
        if not self.by_name:
            # The devices wait for their kernels there.
            try:
                threads.begin(_give_memory_back, "gives-memory-back")
            except ConfigurationError as error:
                log.warning("%s", error)

    # -- the beginning ---------------------------------------------------------------------------------------

    def welcome(self, peer: bytes, hello: messages.Hello) -> None:
        """Answer a greeting: begin a session, go on with one, or refuse."""
        # The session would be in use for ever, by nobody: no event tells of that connection's end.
        if peer in self._gone:
            return
        found = self.by_name.get(hello.session)
        reason = refusal(hello, found, self.by_name)
        if reason:
            self.strangers.note(f"refused a master on {hello.host}: {reason}")
            self.greet(
                peer,
                messages.Refused(reason, found is not None and not compare_digest(found.token, hello.token)),
            )
            return
        if hello.mode == "again":
            assert found is not None
            # It knows of the break before we do, or this greeting is an older one that was on its way.
            if found.link.peer is not None:
                self.greet(
                    found.link.peer, messages.Refused("the session goes on on another connection", False)
                )
                self._retire(found.link.peer)
            self.by_peer[peer] = found
            self.greet(peer, self._about_us(found))
            found.come_back(peer, hello)
            log.info("session of master %s goes on", found.master)
            return
        try:
            # A session takes one. Where there is none, the one that it was to go on from stays.
            threads.begin(_nothing, "session")
        except ConfigurationError as error:
            self.strangers.note(f"refused a master on {hello.host}: {error}")
            self.greet(peer, messages.Refused(str(error), False))
            return
        before = found if hello.mode.endswith(("resume", "auto")) else None
        if found is not None:
            why = f"taken over by a master on {hello.host}"
            found.send(messages.Detach(f"the session was {why}"))
            self.end(found, why) if before is None else self._hand_over(found, why)
        if not self.by_name and before is None:
            restore()
        most = self._config.max_memory
        budget = None if most is None else Budget(hello.session, limits(most, self._devices))
        turn = self.turns.enter(hello.session)
        session = Session(
            peer, hello, self._devices, self._channel, self.published, turn, budget, before, self._refused()
        )
        session.executor.host = partial(self._data_host, session)
        self.by_name[hello.session] = self.by_peer[peer] = session
        self.served = True
        log.info(
            "session of master %s (torch %s, Python %s) begins", session.master, hello.torch, hello.python
        )
        self.greet(peer, self._about_us(session))

    def _data_host(self, session: Session, proposed: str) -> str:
        """Return this worker's host for other workers, as `data_host`; the session's own once it has one."""
        return data_host(self._config, session.host or proposed)

    def _refused(self) -> str:
        """Return why this worker opens nothing that its masters have pickled, or nothing."""
        if not self._config.functions:
            return (
                "this worker was started with --no-functions: it runs operators only, and no Python of its "
                "masters' own. Start it without that option, or use torch's operators"
            )
        if self._channel.unproven:
            return (
                "this worker has no key, so it cannot know who sends it Python to run, and runs none. Make a "
                "key with `distruntime-worker keygen`, and start the workers and the session with it instead "
                "of --insecure (in Python: insecure=True)"
            )
        return ""

    def _about_us(self, session: Session) -> messages.Welcome:
        return messages.Welcome(
            messages.PROTOCOL,
            self.incarnation,
            session.link.received,
            time.monotonic() - session.began,
            torch.__version__,
            platform.python_version(),
            socket.gethostname(),
            os.getpid(),
            process(),
            session.shared.secret(),
            session.shared.nonce,
            self._devices.info(),
            self._devices.simulated,
            [[other.name, other.process] for other in self.by_name.values() if other.alone_since is not None],
        )


def _nothing() -> None:
    """Return at once."""


def _give_memory_back() -> None:
    """Give back what torch's allocators hold for nobody."""
    with lost.tolerated("giving memory back"):
        uploads().empty()
        downloads().empty()
        hardware.forget_workspaces()
        hardware.empty_cache()
