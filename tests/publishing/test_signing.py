"""This process opens a pickle only if a key that is trusted has signed it, as what it is taken for.

The worker is hostile here: whatever it holds is changed between a publish and a lookup, and what it sends
instead would leave a mark if it were opened.
"""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from nacl.signing import SigningKey

import distruntime as dr
from agree import REMOTE
from distruntime.publishing import envelope, signing, structure
from keeping import Keeping, enter, keeping

ROOT = Path(__file__).resolve().parents[2]


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTRUNTIME_SIGNING_KEY", str(tmp_path / "keys" / "own"))
    monkeypatch.setenv("DISTRUNTIME_TRUSTED_KEYS", str(tmp_path / "keys" / "trusted"))
    return tmp_path / "keys"


@pytest.fixture
def daemon(tmp_path: Path, keys: Path, fresh_session: Callable[..., Any]) -> Iterator[Keeping]:
    """A worker on which alice has published two things, and is no more connected to; her successor is."""
    with keeping(tmp_path) as (found,):
        enter(fresh_session, [found], "alice")
        dr.publish("x", torch.ones(3, device=REMOTE), shared=True)
        dr.publish("y", torch.zeros(5, device=REMOTE), shared=True)
        enter(fresh_session, [found], "alice")
        yield found


def body(daemon: Keeping, name: str = "x") -> list[Any]:
    """Return what was signed: form, by, session, name, version, Python, listed, leaves, pickle."""
    (record,) = daemon.kept["alice"].versions(name)
    found: list[Any] = msgpack.unpackb(msgpack.unpackb(record.envelope)[0])
    return found


def put(daemon: Keeping, sealed: Any, name: str = "x") -> None:
    """Have the worker hold other bytes in the place of an envelope."""
    (record,) = daemon.kept["alice"].versions(name)
    record.envelope = sealed


def signed(fields: list[Any], key: SigningKey | None = None) -> bytes:
    data = msgpack.packb(fields)
    public, signature = signing.sign(data)
    if key is not None:
        public, signature = key.verify_key.encode(), key.sign(b"distruntime publication\0" + data).signature
    packed: bytes = msgpack.packb([data, public, signature])
    return packed


# -- what a hostile worker can do ----------------------------------------------------------------------------

FORM, BY, SESSION, NAME, VERSION, PYTHON, LISTED, LEAVES, PICKLE = range(9)


@pytest.mark.parametrize("part", ["BY", "SESSION", "NAME", "VERSION", "PYTHON", "LISTED", "LEAVES", "PICKLE"])
def test_whatever_is_changed_in_it_is_noticed(daemon: Keeping, tmp_path: Path, part: str) -> None:
    (record,) = daemon.kept["alice"].versions("x")
    data, public, signature = msgpack.unpackb(record.envelope)
    fields = msgpack.unpackb(data)
    k = globals()[part]
    if part == "LEAVES":
        fields[k][0][4] = [[4], [1], 0, "float32", 0]
    elif part == "LISTED":
        fields[k][0][1] = 7
    elif part == "PICKLE":
        fields[k] = pickle.dumps(Mark(tmp_path / "mark"))
    else:
        fields[k] = fields[k] + 1 if part == "VERSION" else fields[k] + "!"
    put(daemon, msgpack.packb([msgpack.packb(fields), public, signature]))
    with pytest.raises(dr.errors.UntrustedError, match="does not match its signature"):
        dr.lookup("x")
    assert not (tmp_path / "mark").exists()
    assert dr.lookup("y").sum().item() == 0.0


TAMPERED: dict[str, Callable[[list[Any]], Any]] = {
    "no signature": lambda parts: parts[:1],
    "an empty signature": lambda parts: [*parts[:2], b""],
    "half a signature": lambda parts: [*parts[:2], parts[2][:32]],
    "a signature of zeros": lambda parts: [*parts[:2], bytes(64)],
    "one bit of the signature": lambda parts: [*parts[:2], bytes([parts[2][0] ^ 1]) + parts[2][1:]],
    "no key": lambda parts: [parts[0], b"", parts[2]],
    "a key of zeros": lambda parts: [parts[0], bytes(32), bytes(64)],
    "another key": lambda parts: [parts[0], SigningKey.generate().verify_key.encode(), parts[2]],
    "a key that is a text": lambda parts: [parts[0], "key", parts[2]],
    "none of all": lambda parts: None,
    "a number": lambda parts: 5,
    "one part more": lambda parts: [*parts, b""],
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_signature_that_does_not_hold(daemon: Keeping, tmp_path: Path, how: str) -> None:
    fields = body(daemon)
    fields[PICKLE] = pickle.dumps(Mark(tmp_path / "mark"))
    put(daemon, msgpack.packb(TAMPERED[how](msgpack.unpackb(signed(fields)))))
    with pytest.raises(dr.errors.UntrustedError, match="does not match its signature"):
        dr.lookup("x")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("sealed", [b"", b"\xc1", b"\x93", pickle.dumps(5)], ids=repr)
def test_what_is_no_envelope(daemon: Keeping, sealed: Any) -> None:
    put(daemon, sealed)
    with pytest.raises(dr.errors.UntrustedError, match="does not match its signature"):
        dr.lookup("x")


@pytest.mark.parametrize("sealed", ["text", 7, None, ["list"]], ids=repr)
def test_an_envelope_is_bytes_or_its_worker_is_dropped(daemon: Keeping, sealed: Any) -> None:
    put(daemon, sealed)
    with pytest.raises(dr.errors.UsageError, match="lost, with what was there"):
        dr.lookup("x")


def test_a_strangers_key_is_named_with_how_to_trust_it(daemon: Keeping, tmp_path: Path, keys: Path) -> None:
    stranger, fields = SigningKey.generate(), body(daemon)
    fields[BY], fields[PICKLE] = "mallory@pit", pickle.dumps(Mark(tmp_path / "mark")) + pickle.dumps(None)
    put(daemon, signed(fields, stranger))
    with pytest.raises(dr.errors.UntrustedError) as caught:
        dr.lookup("x")
    shown = signing._text(stranger.verify_key.encode())
    assert f"'x' is signed with the key {shown}, whose holder claims to be mallory@pit" in str(caught.value)
    assert str(caught.value).splitlines()[1].endswith(f"add the line:  {shown} mallory@pit")
    assert not (tmp_path / "mark").exists()
    (keys / "trusted").write_text(str(caught.value).rpartition("add the line:  ")[2] + "\n", encoding="utf-8")
    # This is a file. It is trusted now, and so it is opened.
    dr.lookup("x").close()
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("what", ["another name", "another session", "an older version"])
def test_what_was_signed_as_something_else(daemon: Keeping, tmp_path: Path, what: str) -> None:
    """The owner's own signature, under what he has really signed, in a place that it was not signed for."""
    if what == "another name":
        put(daemon, daemon.kept["alice"].versions("y")[0].envelope)
    elif what == "another session":
        fields = body(daemon)
        fields[SESSION] = "alice's other one"
        put(daemon, signed(fields))
    else:
        old = daemon.kept["alice"].versions("x")[0].envelope
        dr.publish("x", torch.ones(3, device=REMOTE))
        put(daemon, old)
    with pytest.raises(
        dr.errors.UntrustedError,
        match=r"was signed as .*and not as 'x' of 'alice', version \d: somebody has put it",
    ):
        dr.lookup("x")


def test_a_signature_under_anything_else_is_none_here(daemon: Keeping) -> None:
    data = msgpack.packb(body(daemon))
    own = signing.own_key()
    put(daemon, msgpack.packb([data, own.verify_key.encode(), own.sign(data).signature]))
    with pytest.raises(dr.errors.UntrustedError, match="does not match its signature"):
        dr.lookup("x")


def test_workers_that_hold_different_things(
    tmp_path: Path, keys: Path, fresh_session: Callable[..., Any]
) -> None:
    with keeping(tmp_path, 2) as daemons:
        enter(fresh_session, daemons, "alice")
        with dr.node(1):
            far = torch.ones(1, device=REMOTE)
        dr.publish("x", [torch.ones(1, device=REMOTE), far])
        (record,) = daemons[1].kept["alice"].versions("x")
        record.envelope = record.envelope[:-1] + b"!"
        with pytest.raises(
            dr.errors.UntrustedError, match=r"does not match its signature|hold different things"
        ):
            dr.lookup("x")


def test_another_python_is_refused_with_both_named(daemon: Keeping) -> None:
    fields = body(daemon)
    here, fields[PYTHON] = fields[PYTHON], "3.1"
    put(daemon, signed(fields))
    with pytest.raises(dr.errors.UsageError, match=rf"published by Python 3.1, and this is Python {here}"):
        dr.lookup("x")


def test_another_form_is_refused(daemon: Keeping) -> None:
    fields = body(daemon)
    fields[FORM] = 99
    put(daemon, signed(fields))
    with pytest.raises(dr.errors.UsageError, match="in a form that this one does not know"):
        dr.lookup("x")


NONSENSE: list[Any] = [
    None,
    [],
    [5, []],
    ["x", 5],
    ["x", [[1]]],
    ["x", [[1, b"", [[1, 2]]]]],
    ["x", [["1", b"", []]]],
    ["x", [[1, b"", [["a", 2, 3]]]]],
]


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
def test_a_worker_whose_answer_makes_no_sense_is_dropped(daemon: Keeping, answer: Any) -> None:
    (session,) = daemon._by_peer.values()
    session.executor.shelf.find = lambda *_: answer  # type: ignore[method-assign]
    with pytest.raises(dr.errors.UsageError, match="lost, with what was there"):
        dr.lookup("x")
    assert "broke the protocol" in dr.nodes()[0].why


def test_only_one_place_unpickles_and_only_one_calls_it() -> None:
    """`structure.load`, called once, after the envelope was opened."""
    calls = []
    for path in sorted((ROOT / "distruntime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "structure"
                and any(name.name == "load" for name in node.names)
            ):
                calls.append(path.name)
            if isinstance(node, ast.Attribute) and node.attr == "Unpickler":
                assert path.name == "structure.py"
    assert calls == ["adoption.py"]
    assert envelope.open_envelope and structure.load


# -- keys ----------------------------------------------------------------------------------------------------


def test_a_key_is_made_at_the_first_publish_for_its_owner_alone(keys: Path, session: object) -> None:
    assert not keys.exists()
    dr.publish("x", torch.ones(1, device=REMOTE))
    assert (keys / "own").stat().st_mode & 0o777 == 0o600 and keys.stat().st_mode & 0o777 == 0o700
    before = (keys / "own").read_text(encoding="utf-8")
    dr.publish("x", torch.ones(1, device=REMOTE))
    assert (keys / "own").read_text(encoding="utf-8") == before and "SECRET" in before
    dr.unpublish("x")


def test_looking_up_makes_no_key(keys: Path, session: object) -> None:
    with pytest.raises(dr.errors.UsageError):
        dr.lookup("x")
    assert not keys.exists()


def test_the_command_prints_the_line_to_paste(keys: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "key"],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    assert done.stdout == signing.public_line() + "\n"
    public, _, who = done.stdout.strip().partition(" ")
    (keys / "trusted").write_text(f"# people\n\n{done.stdout}", encoding="utf-8")
    assert signing.trusted_keys() == {signing._bytes(public): who}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_is_refused(keys: Path, mode: int) -> None:
    signing.own_key()
    (keys / "own").chmod(mode)
    with pytest.raises(
        dr.errors.ConfigurationError,
        match=f"mode {mode:04o}, expected one that its owner alone may read. Do: chmod 600",
    ):
        signing.own_key()


@pytest.mark.parametrize("text", ["", "# nothing\n", "nonsense\n", "QUJD\n", "two words\nlines\n"])
def test_a_file_that_holds_no_key_is_refused(keys: Path, text: str) -> None:
    signing.own_key()
    (keys / "own").write_text(text, encoding="utf-8")
    with pytest.raises(dr.errors.ConfigurationError, match="without a signing key in it"):
        signing.own_key()


def test_a_list_that_others_may_write_is_refused(keys: Path) -> None:
    keys.mkdir()
    (keys / "trusted").write_text(signing.public_line(), encoding="utf-8")
    (keys / "trusted").chmod(0o666)
    with pytest.raises(dr.errors.ConfigurationError, match=r"writable by others.*chmod go-w"):
        signing.trusted_keys()
    (keys / "trusted").chmod(0o644)
    (keys / "trusted").write_text("AAAA alice\n", encoding="utf-8")
    with pytest.raises(
        dr.errors.ConfigurationError,
        match="line 1: expected a key as `python -m distruntime key` prints it, got 'AAAA alice'",
    ):
        signing.trusted_keys()


def test_the_default_is_beside_the_clusters_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("DISTRUNTIME_SIGNING_KEY", "DISTRUNTIME_TRUSTED_KEYS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert signing.key_path() == tmp_path / "distruntime" / "signing-key"
    assert signing.trusted_path() == tmp_path / "distruntime" / "trusted-keys"


def test_importing_distruntime_does_not_import_what_signs() -> None:
    code = "import sys, distruntime, distruntime_worker.session.daemon; "
    code += "print({'nacl', 'distruntime.publishing.publish'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'worker'}"}
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        ).stdout
        == "set()\n"
    )
