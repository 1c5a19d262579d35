"""The cluster's key: its file, who may read it, and which addresses need it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import zmq.auth

import distruntime as dr
from distruntime.cluster import named_sessions as registry
from distruntime.errors import ConfigurationError
from distruntime.publishing import signing
from distruntime.wire.keys import KeyPair, choose, default_path, is_local, needs_key, warn_of_strangers
from processes import STARTING, ListeningWorker


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRUNTIME_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_saved_key_loads_again_and_is_for_its_owner_only(tmp_path: Path) -> None:
    key, path = KeyPair.generate(), tmp_path / "new" / "key"
    key.save(path)
    assert KeyPair.load(path) == key
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["key"]


def test_the_file_is_one_of_zmq_auth(tmp_path: Path) -> None:
    key = KeyPair.generate()
    key.save(tmp_path / "ours")
    assert zmq.auth.load_certificate(tmp_path / "ours") == (key.public, key.secret)
    _, theirs = zmq.auth.create_certificates(tmp_path, "theirs")
    os.chmod(theirs, 0o600)
    KeyPair.load(Path(theirs))


def test_the_secret_is_not_shown() -> None:
    key = KeyPair.generate()
    assert key.secret.decode() not in repr(key) and key.public.decode() in repr(key)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    key = KeyPair.generate()
    key.save(tmp_path / "key")
    with pytest.raises(ConfigurationError, match="never overwritten"):
        KeyPair.generate().save(tmp_path / "key")
    assert KeyPair.load(tmp_path / "key") == key
    assert os.listdir(tmp_path) == ["key"]


ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "given", [pytest.param("file", marks=ROOT_ALONE), pytest.param("folder", marks=ROOT_ALONE), "open folder"]
)
@pytest.mark.parametrize("kind", ["key", "signing key", "trusted keys", "note of a session"])
def test_a_file_that_another_user_can_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: str
) -> None:
    folder = tmp_path / "mine" / "sessions"
    folder.mkdir(parents=True)
    path = folder / "name.json"
    for variable in ("SIGNING_KEY", "TRUSTED_KEYS"):
        monkeypatch.setenv(f"DISTRUNTIME_{variable}", str(path))
    monkeypatch.setenv("DISTRUNTIME_STATE", str(folder.parent))

    def read() -> object:
        match kind:
            case "key":
                return KeyPair.load(path)
            case "signing key":
                return signing.own_key()
            case "trusted keys":
                return signing.trusted_keys()
        return registry.read("name")

    if kind == "key":
        KeyPair.generate().save(path)
    elif kind == "trusted keys":
        path.write_text("# nobody\n", encoding="utf-8")
    elif kind == "note of a session":
        registry.write(registry.Entry("name", ("tcp://127.0.0.1:1",), "", "", False, "", 0, 0.0))
    read()
    if given == "open folder":
        folder.chmod(0o777)
        wanted = f"others may write {folder}, and so change it. Do: chmod go-w"
    else:
        os.chown(path if given == "file" else folder, 65534, 65534)
        wanted = (
            "user 65534, who can change it; this process is user 0's. "
            "Copy the file to where only you can write, or do: chown 0 "
        )
    with pytest.raises(ConfigurationError, match=wanted):
        read()
    folder.chmod(0o1777)  # in which one replaces one's own files
    if given == "open folder":
        read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    KeyPair.generate().save(tmp_path / "key")
    os.chmod(tmp_path / "key", mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        KeyPair.load(tmp_path / "key")


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="distruntime-worker keygen"):
        KeyPair.load(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="regular file"):
        KeyPair.load(tmp_path)
    one, two = KeyPair.generate(), KeyPair.generate()
    contents = [
        b"",
        b"hello",
        b"\xff\xfe\x00",
        b'curve\n public-key = "%b"\n' % one.public,
        b'curve\n public-key = "%b"\n secret-key = "%b"\n' % (one.public, two.secret),
        b'curve\n public-key = "%b"\n secret-key = "%b"\n' % (one.public[:-1], one.secret),
        b'curve\n public-key = "%b"\n secret-key = "%b"\n' % (one.public, b"\xc3" * 40),
    ]
    for number, content in enumerate(contents):
        path = tmp_path / f"key{number}"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigurationError, match="whole key pair"):
            KeyPair.load(path)


def test_where_the_key_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_path() == tmp_path / "config" / "distruntime" / "key"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path() == tmp_path / "home" / ".config" / "distruntime" / "key"
    monkeypatch.setenv("DISTRUNTIME_KEY", "~/elsewhere")
    assert default_path() == tmp_path / "home" / "elsewhere"


def test_only_a_socket_file_in_a_private_directory_needs_no_key(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o755)
    assert not needs_key(f"ipc://{private}/s")
    for address in (
        f"ipc://{shared}/s",
        f"ipc://{tmp_path}/missing/s",
        "ipc://@abstract",
        "tcp://127.0.0.1:1",
        "tcp://gpu1:1",
        "tcp://*:1",
    ):
        assert needs_key(address), address


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///run/x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://eth0:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_what_only_this_machine_can_reach(address: str, local: bool) -> None:
    assert is_local(address) == local


def test_loopback_makes_the_default_key_on_first_use() -> None:
    key = choose("tcp://127.0.0.1:*")
    assert key is not None and KeyPair.load(default_path()) == key == choose("tcp://localhost:5")


def test_all_who_come_first_at_once_get_one_key() -> None:
    found: list[KeyPair | None] = []
    together = threading.Barrier(8)

    def first_use() -> None:
        together.wait(20)
        found.append(choose("tcp://127.0.0.1:*"))

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and None not in found and len(set(found)) == 1


@pytest.mark.parametrize("address", ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://gpu1:1", "tcp://10.1.2.3:1"])
def test_other_machines_need_a_key_that_exists_or_the_word_insecure(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"keygen.*--insecure"):
        choose(address)
    assert not default_path().exists()
    assert choose(address, insecure=True) is None
    KeyPair.generate().save(default_path())
    assert choose(address) == KeyPair.load(default_path())


def test_a_named_key_is_always_used(tmp_path: Path) -> None:
    key = KeyPair.generate()
    key.save(tmp_path / "mine")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for address in ("tcp://127.0.0.1:1", "tcp://gpu1:1", f"ipc://{private}/s"):
        assert choose(address, path=tmp_path / "mine") == key
    with pytest.raises(ConfigurationError, match="missing"):
        choose("tcp://127.0.0.1:1", path=tmp_path / "missing")


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected tcp://host:port"):
        choose("gpu1:29400")


@pytest.mark.parametrize(
    ("addresses", "where", "who"),
    [
        (["tcp://127.0.0.1:1"], "tcp://127.0.0.1:1", "every user of this machine"),
        (["tcp://10.0.0.7:1"], "tcp://10.0.0.7:1", "whoever reaches that"),
        (
            ["tcp://127.0.0.1:1", "tcp://10.0.0.7:1", "tcp://10.0.0.8:1"],
            "tcp://127.0.0.1:1 and 2 more",
            "whoever reaches that",
        ),
    ],
)
def test_who_does_without_a_key_reads_once_what_that_means(
    caplog: pytest.LogCaptureFixture, addresses: list[str], where: str, who: str
) -> None:
    with caplog.at_level(logging.WARNING, "distruntime"):
        warn_of_strangers(addresses)
    (record,) = caplog.records
    assert (
        f"insecure: at {where} nobody has to prove who they are" in record.getMessage()
        and who in record.getMessage()
    )


def test_a_private_socket_needs_no_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    warn_of_strangers([f"ipc://{tmp_path}/s"])
    assert not caplog.text


def test_both_sides_say_it_at_every_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--insecure")
    try:
        dr.shutdown()
        with dr.init_master_worker(workers=[worker.address], insecure=True, quiet=True, timeout=STARTING):
            assert f"insecure: at {worker.address} nobody has to prove" in caplog.text
        assert "insecure: at tcp://127.0.0.1:0 nobody has to prove" in worker.text()
    finally:
        worker.stop()
