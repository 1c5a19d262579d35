"""`dr.data.push` and `dr.data.pull`: files and folders to a worker and from it."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence

import torch

from ..errors import ProtocolError, UsageError, without_our_frames
from ..log.handle import Residence
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.session import active_session
from ..tensors.fetch import Fetched, fetch, fetch_async
from ..tensors.tensor import DistributedTensor
from .callee import Options
from .sent import host, run_at
from .sent_files import Entry, Incoming, ended, here, listed, piece_of, received, whole_file

# A file travels in parts of so many bytes.
_PART = 4 << 20
# So many parts are asked for ahead.
_AHEAD = 4


def _path(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise UsageError(f"expected the path of a file or a folder, got {path!r:.80}")
    return os.fspath(path)


@without_our_frames
def push(path: str | os.PathLike[str], node: object, to: str | os.PathLike[str] | None = None) -> str:
    """Send a file or a folder to a worker; return its path there. Block until it is there.

    A file that is there already (its size and its SHA-256 say so) does not travel. One that was left half-way
    goes on where it stopped. Each file gets its name at one stroke, when all of it is there. Whatever else is
    in the folder there stays. Empty folders do not travel.

    Args:
        path: a file or a folder here. Links are followed.
        node: the number of a node, or one of its places.
        to: the path of the file or the folder there. None means the same path, as it was given. "~" is the
            home of the worker's user there, and a relative path begins at the worker's working directory.

    Raises:
        FileNotFoundError: there is nothing at `path`. OSError: the worker cannot write there.
        NotSupportedError: the worker was started with `--no-functions`.
    """
    home, given = host(node), _path(path)
    whole, is_folder, entries = listed(given)
    there, have = _answer(
        run_at(
            home, here, "dr.data.push", _path(given if to is None else to), is_folder, [*map(list, entries)]
        )
    )
    left = [(e, start) for e, start in zip(entries, have) if start >= 0]
    total = sum(e[1] - start for e, start in left)
    moved = [0]
    ends: list[object] = []
    with active_session().requests.announcer.working(f"pushing {given}", total, lambda: moved[0]):
        for entry, start in left:
            ends.append(_sent(home, whole_file(whole, entry[0]), there, entry, start, moved))
            # So many files at most are open there.
            if len(ends) == 64:
                fetch(ends)
                ends = []
        fetch(ends)
    return there


def _answer(asked: object) -> tuple[str, list[int]]:
    match fetch(asked):
        case (str(there), list(have)) if all(isinstance(n, int) for n in have):
            return there, have
        case other:
            raise ProtocolError(f"a worker said {other!r:.80} of its files")


def _sent(home: Residence, path: str, there: str, entry: Entry, start: int, moved: list[int]) -> object:
    """Send what is missing of a file. Return what is its name there, once it has that."""
    incoming = run_at(home, Incoming, "dr.data.push", there, [*entry], start)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while data := file.read(_PART):
            part = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            sent = wrap(DistributedTensor, upload(part, home, stay_on_cpu=True))
            # Each part is written to what the one before has left. So the first failure is everybody's.
            incoming = run_at(home, received, "dr.data.push", incoming, sent)
            moved[0] += len(data)
    return run_at(home, ended, "dr.data.push", incoming)


@without_our_frames
def pull(path: str | os.PathLike[str], node: object, to: str | os.PathLike[str] | None = None) -> str:
    """Bring a file or a folder of a worker here; return its path here. Block until it is here.

    It is `push` the other way round: what is here already does not travel, what was left half-way goes on,
    and each file gets its name when all of it is here.

    Args:
        path: a file or a folder at the worker.
        node: the number of a node, or one of its places.
        to: the path of the file or the folder here. None means the same path, as it was given.

    Raises:
        FileNotFoundError: there is nothing at `path`. OSError: this process cannot write there.
        NotSupportedError: the worker was started with `--no-functions`.
    """
    home, given = host(node), _path(path)
    match fetch(run_at(home, listed, "dr.data.pull", given)):
        case (str(there), bool(is_folder), list(entries)):
            pass
        case other:
            raise ProtocolError(f"a worker said {other!r:.80} of its files")
    for entry in entries:
        _require_below(entry)
    whole, have = here(_path(given if to is None else to), is_folder, entries)
    left = [(e, start) for e, start in zip(entries, have) if start >= 0]
    total = sum(e[1] - start for e, start in left)
    moved = [0]
    with active_session().requests.announcer.working(f"pulling {given}", total, lambda: moved[0]):
        for entry, start in left:
            _received(home, whole_file(there, entry[0]), whole, entry, start, moved)
    return whole


def _require_below(entry: Sequence[object]) -> None:
    """Refuse a file that a worker puts elsewhere than below the folder that was asked for."""
    match entry:
        case (str(name), int(), int(), str()) if not name.startswith("/"):
            if not any(part in ("..", ".") for part in name.split("/")) and "\0" not in name:
                return
    raise ProtocolError(f"a worker has a file {entry!r:.80}")


def _received(home: Residence, path: str, whole: str, entry: Entry, start: int, moved: list[int]) -> None:
    incoming, nbytes = Incoming(whole, entry, start), entry[1]
    coming: deque[Fetched[object]] = deque()
    while start < nbytes or coming:
        while start < nbytes and len(coming) < _AHEAD:
            count = min(_PART, nbytes - start)
            coming.append(
                fetch_async(run_at(home, piece_of, "dr.data.pull", path, start, count, options=_bytes(count)))
            )
            start += count
        data = coming.popleft().result()
        assert isinstance(data, torch.Tensor)
        incoming.add(data)
        moved[0] += data.numel()
    incoming.end()


@functools.cache
def _bytes(count: int) -> Options:
    return Options(returns=torch.empty(count, dtype=torch.uint8, device="meta"), random=False)
