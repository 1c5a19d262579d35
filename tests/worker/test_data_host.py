"""Where other workers reach this one, as the machine itself sees it."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

import distruntime as dr
from distruntime_worker.collectives import listening
from distruntime_worker.session import address
from distruntime_worker.session.config import WorkerConfig


def _has_ipv6() -> bool:
    """Whether this machine's loopback has an address of it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_worker_that_dials_is_reached_where_its_packets_go_out() -> None:
    assert address.data_host(WorkerConfig(master="tcp://127.0.0.1:1"), "") == "127.0.0.1"
    assert address.data_host(WorkerConfig(master="tcp://localhost:1"), "") == "127.0.0.1"
    if _has_ipv6():
        assert address.data_host(WorkerConfig(master="tcp://[::1]:1"), "") == "::1"


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
def test_a_name_that_has_only_ipv6_is_dialled_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [row])
    assert address.data_host(WorkerConfig(master="tcp://master:1"), "") == "::1"


def test_a_master_whose_name_is_unknown_is_said_to_be_unknown() -> None:
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"host 'no-such\.invalid' is not known.*--data-address"
    ):
        address.data_host(WorkerConfig(master="tcp://no-such.invalid:1"), "")


def test_the_address_that_others_have_reached_counts_before_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sockets = WorkerConfig(listen="tcp://0.0.0.0:1"), listening.TCPSockets
    peer = ("10.0.0.1", 50_000)

    def found(*own: str) -> str:
        pairs = frozenset(((host, 1), peer) for host in own)
        seen = sockets(frozenset({("0.0.0.0", 1)}), pairs)
        monkeypatch.setattr(address, "tcp_sockets", lambda: seen)
        return address.data_host(config, "name")

    assert found("10.0.0.7") == found("10.0.0.7", "127.0.0.1") == "10.0.0.7"
    # Nobody has come from elsewhere, or others have come to two addresses: then the master's word counts.
    assert found() == found("127.0.0.1") == found("10.0.0.7", "10.1.0.7") == "name"
    monkeypatch.setattr(address, "tcp_sockets", lambda: None)
    assert address.data_host(config, "name") == "name"


def test_connections_of_this_process_are_seen_from_its_own_end() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
        closing(server.accept()[0]),
    ):
        seen = listening.tcp_sockets()
        assert seen is not None and (server.getsockname(), client.getsockname()) in seen.connected
