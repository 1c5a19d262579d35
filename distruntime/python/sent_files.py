"""Files on a worker: what is there, parts of them, and files that arrive in parts.

These functions travel to workers. What arrives here is written by the same class.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from distruntime.wire.codec import tensor_bytes
from distruntime.wire.descriptors import on_full_disk

# A file's path below the folder that was named, its size, its permissions, and its SHA-256.
Entry = tuple[str, int, int, str]
# This file has what has arrived of another one.
PART = ".distruntime-part-"
# So many bytes are read at once to hash them.
_STEP = 1 << 22


def absolute(path: str) -> str:
    """Return a path as this process means it: from its home and its working directory."""
    return os.path.abspath(os.path.expanduser(path))


def listed(path: str) -> tuple[str, bool, list[Entry]]:
    """Return the whole path, whether it is a folder, and its files. The only file of a file is called ""."""
    whole = absolute(path)
    if os.path.isdir(whole):
        found = sorted(_below(whole, "", set()))
        return whole, True, [_entry(os.path.join(whole, name), name) for name in found]
    if not os.path.isfile(whole):
        raise FileNotFoundError(f"{whole} is neither a file nor a folder here")
    return whole, False, [_entry(whole, "")]


def _below(folder: str, name: str, above: set[str]) -> Iterator[str]:
    """Yield the files below a folder; links are followed, and a link to a folder above it is none."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for item in os.scandir(folder):
        if item.is_dir():
            yield from _below(item.path, f"{name}{item.name}/", above | {real})
        elif item.is_file() and PART not in item.name:
            yield f"{name}{item.name}"


def _entry(path: str, name: str) -> Entry:
    status = os.stat(path)
    return name, status.st_size, status.st_mode & 0o777, digest(path)


def digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_STEP):
            found.update(piece)
    return found.hexdigest()


def _file(whole: str, name: str) -> str:
    return os.path.join(whole, *name.split("/")) if name else whole


def here(path: str, is_folder: bool, entries: Sequence[Entry]) -> tuple[str, list[int]]:
    """Return the whole path, and how much is here of each file that is to come: -1 where it is here already.

    Make the folder of a folder.
    """
    whole = absolute(path)
    if is_folder:
        os.makedirs(whole, exist_ok=True)
    elif os.path.isdir(whole):
        raise IsADirectoryError(f"{whole} is a folder here, and a file is to go there: name the file, to=...")
    return whole, [_have(_file(whole, name), nbytes, sha) for name, nbytes, _, sha in entries]


def _have(path: str, nbytes: int, sha: str) -> int:
    if os.path.isfile(path) and os.path.getsize(path) == nbytes and digest(path) == sha:
        return -1
    with suppress(FileNotFoundError):
        return min(nbytes, os.path.getsize(_part(path, sha)))
    return 0


def _part(path: str, sha: str) -> str:
    # The name has the hash: what is left of another file is not taken for a part of this one.
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)[:100]}{PART}{sha[:16]}")


class Incoming:
    """A file that arrives in parts. It has its name when it is whole, and its bytes are those of its hash."""

    def __init__(self, whole: str, entry: Sequence[object], start: int) -> None:
        name, self._nbytes, self._mode, self._sha = entry
        self.path = _file(whole, str(name))
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._part = _part(self.path, str(self._sha))
        self._hash = hashlib.sha256()
        self._file = open(self._part, "r+b" if start else "wb", buffering=0)
        left = start
        while left > 0 and (piece := self._file.read(min(left, _STEP))):
            self._hash.update(piece)
            left -= len(piece)
        self._file.truncate(start)

    def add(self, data: torch.Tensor) -> Incoming:
        """Write the next part; return this."""
        memory = tensor_bytes(data)
        self._hash.update(memory)
        try:
            while memory:
                memory = memory[self._file.write(memory) :]
        except OSError as error:
            raise on_full_disk(error, os.path.dirname(self.path), len(memory)) from error
        return self

    def end(self) -> str:
        """Give the file its name; return that. Raise `OSError` if other bytes have arrived."""
        size = self._file.tell()
        os.fsync(self._file.fileno())
        self._file.close()
        if size != self._nbytes or self._hash.hexdigest() != self._sha:
            os.remove(self._part)
            raise OSError(
                f"{self.path}: expected {self._nbytes} bytes with the SHA-256 {self._sha}, and {size} bytes "
                f"with {self._hash.hexdigest()} have come. Was the file changed meanwhile? Send it again"
            )
        os.chmod(self._part, int(str(self._mode)))
        os.replace(self._part, self.path)
        return self.path


def received(incoming: Incoming, data: torch.Tensor) -> Incoming:
    """Write the next part of a file; return the file."""
    return incoming.add(data)


def ended(incoming: Incoming) -> str:
    """Give a file its name; return that."""
    return incoming.end()


def piece_of(path: str, start: int, count: int) -> torch.Tensor:
    """Return bytes of a file."""
    data = bytearray(count)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = memoryview(data)
        while left and (got := file.readinto(left)):
            left = left[got:]
    if left:
        raise OSError(f"{path} has become shorter while it was read: send it again")
    return torch.frombuffer(data, dtype=torch.uint8)


def whole_file(whole: str, name: str) -> str:
    """Return the path of a file of a listing."""
    return _file(whole, name)
