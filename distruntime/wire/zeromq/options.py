"""How a channel's ROUTER socket is set up: its options, who is let in, and where it listens."""

from __future__ import annotations

import hmac
import os

import zmq
import zmq.auth.thread

from ..address import listener, resolve, unusable, wants_ipv6
from ..keys import KeyPair
from ..strangers import Strangers
from .connections import Peer
from .frames import FRAME, ROOM

_ZAP_DOMAIN = "distruntime"
# The kernel holds at most so many connections until they are accepted.
_BACKLOG = 1024
# A connection has so many seconds to prove its key. The proof takes four short messages, and a peer that is
# slower dials again. A silent stranger holds a descriptor for that long.
HANDSHAKE = 2.0
# A dialled address that nobody listens at is tried again after so many milliseconds, which double up to the
# most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 100, 2_000
# A network that brings fewer bytes a second is as good as none. A frame takes 16 s on it. If the rest of a
# frame has not come by then, it does not come: its length was changed on the way, or the other side has gone.
_SLOWEST = 1 << 15


def set_up(router: zmq.Socket[bytes], name: Peer | None, keys: KeyPair | None, *, server: bool) -> None:
    """Set the options that a channel's socket has before it listens or dials."""
    router.linger = 0
    # The windows of the command log bound memory; a send must never block or drop.
    router.sndhwm = router.rcvhwm = 0
    router.router_mandatory = True
    # A peer that reconnects under its name replaces its half-open predecessor.
    router.router_handover = True
    router.maxmsgsize = FRAME + ROOM
    router.backlog = _BACKLOG
    router.handshake_ivl = round(HANDSHAKE * 1000)
    # Without this the kernel would try for two minutes, at the end once a minute.
    router.connect_timeout = 5_000
    router.reconnect_ivl = _SHORTEST_PAUSE
    (
        router.tcp_keepalive,
        router.tcp_keepalive_idle,
        router.tcp_keepalive_intvl,
        router.tcp_keepalive_cnt,
    ) = 1, 30, 10, 3
    router.tcp_maxrt = 60_000
    if name is not None:
        router.routing_id = name
    if keys is not None:
        router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
        if server:
            router.curve_server = True
            router.zap_domain = _ZAP_DOMAIN.encode("ascii")


def let_in(guard: zmq.auth.thread.ThreadAuthenticator, keys: KeyPair) -> None:
    """Have a guard ask whoever dials for the key."""
    guard.start()
    guard.configure_curve_callback(_ZAP_DOMAIN, _OnlyKey(keys.public))


class _OnlyKey:
    """The credentials provider of zmq.auth that lets in the holders of one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def beat(router: zmq.Socket[bytes], silence: float, patient: bool) -> None:
    """Have a socket disconnect a peer that says nothing for so many seconds: see `Channel`."""
    router.heartbeat_ivl = every = max(1, round(silence * 1000 / 5))
    # A frame counts when it is whole. The side that gets the large ones must not take them for silence;
    # the other hears its beats.
    longest = (FRAME + ROOM) / _SLOWEST if patient else 0.0
    router.heartbeat_timeout = max(1, round((silence + longest) * 1000) - every)
    router.tcp_maxrt = max(1, round(silence * 1000))


def bind(router: zmq.Socket[bytes], strangers: Strangers, address: str) -> str:
    """Listen at an address; return it as libzmq has it, with the port that it has chosen.

    Raise `ConfigurationError` where that cannot be.
    """
    try:
        router.ipv6 = wants_ipv6(address, resolve(address))
        own = listener(address, _BACKLOG)
        if own is None:
            router.bind(address)
        else:
            with own:
                # libzmq's own way asks for the system's interfaces, and ends the process where there is
                # no descriptor for that.
                router.setsockopt(zmq.USE_FD, own.fileno())
                router.bind(address)
                strangers.listen(own.fileno())
                own.detach()
            router.setsockopt(zmq.USE_FD, -1)
    except (zmq.ZMQError, UnicodeError, OSError) as error:
        raise unusable(address, error) from error
    bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
    if address.startswith("ipc://") and not address.startswith("ipc://@"):
        os.chmod(address[len("ipc://") :], 0o600)
    return bound


def dial(router: zmq.Socket[bytes], keys: KeyPair | None, address: str, peer: Peer) -> list[str]:
    """Dial an address, and call what answers there `peer`. Return what the monitor calls such connections.

    Raise `ConfigurationError` where that cannot be.
    """
    try:
        if keys is not None:
            router.curve_serverkey = keys.public
        resolved = resolve(address)
        router.ipv6 = wants_ipv6(address, resolved)
        router.setsockopt(zmq.CONNECT_ROUTING_ID, peer)
        # 0 lets the pause between attempts not grow. On this machine an attempt costs nothing, and a
        # script's session waits for workers that have been there before it.
        router.reconnect_ivl_max = 0 if address.startswith("ipc://") else _LONGEST_PAUSE
        router.connect(address)
    except (zmq.ZMQError, UnicodeError) as error:
        raise unusable(address, error) from error
    # The monitor names the first connection as it was dialled, later ones as it was resolved.
    return [address, router.getsockopt_string(zmq.LAST_ENDPOINT), *resolved]
