"""Addresses that cannot be used: the error says what is wrong with them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import distruntime as dr
from distruntime import __main__ as command_line


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    dr.shutdown()
    yield
    dr.shutdown()


def refused(code: Callable[[], object], text: str, kind: type[dr.DistruntimeError]) -> None:
    with pytest.raises(kind) as caught:
        code()
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["mpi", "tcp"])
def test_a_channel_between_workers_is_no_backend(name: str) -> None:
    refused(
        lambda: dr.init_master_worker(backend=name),
        f"backend='{name}' names a channel between workers; the command channel is always ZeroMQ: use "
        f"backend=\"zmq\", data_channel='{name}'",
        dr.errors.ConfigurationError,
    )


@pytest.mark.parametrize("option", ["workers", "listen"])
def test_an_address_without_a_port(option: str) -> None:
    address = "tcp://127.0.0.1"
    where: dict[str, Any] = (
        {"workers": [address]} if option == "workers" else {"listen": address, "world_size": 2}
    )
    refused(
        lambda: dr.init_master_worker(**where, insecure=True),
        "got address 'tcp://127.0.0.1': the port is missing. Expected tcp://host:port or ipc://path "
        "(at most 107 characters of path).",
        dr.errors.ConfigurationError,
    )


def test_an_address_is_looked_at_before_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTRUNTIME_KEY", str(tmp_path / "none"))
    for address in ("tcp://192.0.2.1", "tcp://127.0.0.1"):
        with pytest.raises(dr.errors.ConfigurationError, match="the port is missing"):
            dr.init_master_worker(workers=[address])
    assert command_line.main(["status", "tcp://nohost.invalid:1", "--insecure", "--timeout", "1"]) == 1
    assert "the name 'nohost.invalid' in 'tcp://nohost.invalid:1' does not resolve" in capsys.readouterr().out


def test_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        refused(
            lambda: dr.init_master_worker(listen=address, world_size=2, insecure=True),
            f"got address '{address}': it is in use: another program listens there already. Choose another "
            "port, or end that program",
            dr.errors.ConfigurationError,
        )


def test_a_name_that_does_not_resolve() -> None:
    refused(
        lambda: dr.init_master_worker(workers=["tcp://nohost.invalid:29400"], insecure=True, timeout=1.0),
        "the name 'nohost.invalid' in 'tcp://nohost.invalid:29400' does not resolve on this machine: check "
        "its spelling",
        dr.errors.ConnectionFailed,
    )
