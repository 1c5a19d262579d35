"""`dr.workers.ship`: the user's packages on the workers."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from ..errors import UsageError, without_our_frames
from ..guards.own_code import send_by_name
from ..log.handle import Residence
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.session import active_session, session_of_log
from ..session.spelling import living
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from .callee import before_code
from .sent import host, run_at
from .sent_code import install

# An archive may have so many bytes: more is data.
_MOST = 256 << 20
_LEFT_OUT = ("__pycache__",)
# Equal files give equal archives.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class _Shipped:
    """A package as it travels. `tops` are the names that are imported of it.

    `only` is the session and the node that have it. Without it all nodes have it, those of later sessions
    too.
    """

    name: str
    tops: tuple[str, ...]
    data: bytes
    digest: str
    only: tuple[str, int] | None


# What was shipped, in that order.
_shipped: list[_Shipped] = []


@without_our_frames
def ship(what: str | os.PathLike[str] | ModuleType, *, node: int | None = None) -> None:
    """Put a package of yours on the workers, where it is imported before any other of its name.

    Block until the workers have it. Call it again after a change: only what has changed travels, and what was
    imported there is imported anew. A worker that joins or restarts later gets it before your code does. Once
    all nodes have a package, its functions and classes travel by name.

    Args:
        what: the name of a package or a module that can be imported here, the module itself, or a folder. A
            folder with `__init__.py` is a package; of any other folder all modules can be imported.
        node: the number of the only node that is to have it. By default all nodes get it.

    Raises:
        UsageError: there is no such package, or it has more than 256 MB.
        NotSupportedError: a worker was started with `--no-functions`.
    """
    session = active_session()
    if node is not None:
        session.places.devices(node)
    only = None if node is None else (session.name, node)
    shipped, before = _packed(what, only), [*_shipped]
    _shipped[:] = [
        other for other in _shipped if other.name != shipped.name or only not in (None, other.only)
    ]
    _shipped.append(shipped)
    if _equip not in before_code:
        before_code.append(_equip)
    try:
        for one in living(session, node):
            _equip(host(one.index))
    except BaseException:
        # Code that does not need it runs all the same. A worker that has it keeps it.
        _shipped[:] = before
        raise
    if node is None:
        for top in shipped.tops:
            send_by_name(top)


def _equip(home: Residence) -> None:
    """Give a worker what is shipped and what it does not have. Block until it has that."""
    log, session = home.node, session_of_log(home.node)
    latest = {s.name: s for s in _shipped if s.only in (None, (session.name, home.place.node))}
    for shipped in latest.values():
        if log.packages.get(shipped.name) == shipped.digest:
            continue
        before = log.packages.get(shipped.name)
        # To send `install` is to send code, which comes here again.
        log.packages[shipped.name] = shipped.digest
        try:
            data = torch.frombuffer(bytearray(shipped.data), dtype=torch.uint8)
            sent = wrap(DistributedTensor, upload(data, home, stay_on_cpu=True))
            done = run_at(
                home, install, f"ship {shipped.name}", sent, shipped.name, [*shipped.tops], shipped.digest
            )
            fetch(done)
        except BaseException:
            log.packages.pop(shipped.name, None)
            raise
        if before is not None:
            # Code that is there has what it imported before.
            log.code.clear()
            session.places.forget(log)


def _packed(what: str | os.PathLike[str] | ModuleType, only: tuple[str, int] | None) -> _Shipped:
    name, files = _files(what)
    total = sum(os.path.getsize(path) for _, path in files)
    if total > _MOST:
        raise UsageError(
            f"{name} has {total >> 20} MB, and dr.workers.ship sends {_MOST >> 20} MB of code at most: send "
            "data as docs/data.md does"
        )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for inside, path in files:
            entry = zipfile.ZipInfo(inside, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            with open(path, "rb") as source:
                packed.writestr(entry, source.read())
    data = file.getvalue()
    tops = {inside.partition("/")[0].removesuffix(".py") for inside, _ in files}
    return _Shipped(name, tuple(sorted(tops)), data, hashlib.sha256(data).hexdigest(), only)


def _files(what: str | os.PathLike[str] | ModuleType) -> tuple[str, list[tuple[str, str]]]:
    """Return a package's name, and its files: their names in the archive, and their paths."""
    if isinstance(what, ModuleType):
        what = what.__name__.partition(".")[0]
    text = os.fspath(what)
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path) and (os.sep in text or not isinstance(what, str)):
        name = os.path.basename(path)
        inside = f"{name}/" if os.path.exists(os.path.join(path, "__init__.py")) else ""
        return name, _found(name, [(inside + own, file) for own, file in _below(path)])
    if text == "__main__" or not all(part.isidentifier() for part in text.split(".")):
        raise UsageError(
            f"dr.workers.ship({text!r}): expected the name of a package or a module, a module, or a folder "
            "(a path with a slash). What the script itself defines travels by itself"
        )
    name = text.partition(".")[0]
    spec = importlib.util.find_spec(name)
    if spec is None or (spec.submodule_search_locations is None and not spec.has_location):
        near = (
            f" There is a folder {path}: dr.workers.ship('./{text}') sends that."
            if os.path.isdir(path)
            else ""
        )
        raise UsageError(
            f"dr.workers.ship({text!r}): there is no package {name!r} here that has files; expected what "
            f"`import {name}` finds.{near}"
        )
    if spec.submodule_search_locations is None:
        assert spec.origin is not None
        return name, [(os.path.basename(spec.origin), spec.origin)]
    folders = [*spec.submodule_search_locations]
    return name, _found(name, [(f"{name}/{own}", file) for folder in folders for own, file in _below(folder)])


def _found(name: str, files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if not files:
        raise UsageError(f"dr.workers.ship: {name} has no files")
    return sorted(files)


def _below(folder: str) -> Iterator[tuple[str, str]]:
    for above, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _LEFT_OUT and not f.startswith(".")]
        for name in names:
            path = os.path.join(above, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield os.path.relpath(path, folder).replace(os.sep, "/"), path
