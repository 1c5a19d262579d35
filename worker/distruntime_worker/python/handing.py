"""Tensors and messages between a worker and its members' processes: one socket, and memory that both have.

A tensor of the CPU moves into shared memory the first time it is handed over, and its memory's descriptor
goes over the socket. A tensor of a GPU goes by CUDA IPC, as torch.multiprocessing does it.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._pytree import tree_leaves

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire.codec import Opened, opened
from distruntime.wire.descriptors import used_up

from ..values.objects import spec_fields

_HEAD = struct.Struct("<QI")
# torch's shared memory is there.
_SHARED = "/dev/shm"
# Linux takes 253 descriptors in a message.
_MOST_FDS = 250


class Shared(NamedTuple):
    """A tensor in shared memory: the number of its descriptor, the size of its memory, and its metadata."""

    number: int
    nbytes: int
    spec: list[object]


class Device(NamedTuple):
    """A tensor on a GPU: what torch's pickler for processes makes of it."""

    pickled: bytes


class Outgoing:
    """The memories that go with one message. Each goes once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []

    def tensor(self, value: torch.Tensor) -> Shared | Device:
        """Return what stands for a tensor in the message."""
        plain = value.detach()
        if plain.device.type != "cpu":
            return Device(pickle.dumps(reduce_tensor(plain), protocol=5))
        storage = plain.untyped_storage()
        spec: list[object] = [*spec_fields(plain)[:3], plain.dtype, plain.is_conj(), plain.is_neg()]
        nbytes = storage.nbytes()
        if not nbytes:
            return Shared(-1, 0, spec)
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return Shared(number, nbytes, spec)

    def send(self, link: socket.socket, message: object) -> None:
        """Send a message; block until it is in the socket. The memories belong to both sides then."""
        data = pickle.dumps(message, protocol=5)
        # The descriptor is the storage's own, and is open for as long as the storage lives.
        fds = [_shared(storage) for storage in self._storages]
        link.sendall(_HEAD.pack(len(data), len(fds)))
        for k in range(0, len(fds), _MOST_FDS):
            part = array.array("i", fds[k : k + _MOST_FDS])
            link.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])
        link.sendall(data)


def _shared(storage: torch.UntypedStorage) -> int:
    """Move a memory into shared memory; return its descriptor."""
    try:
        with _naming_descriptors():
            descriptor: int = storage._share_fd_cpu_()[0]
    except RuntimeError as error:
        # torch says the number, and not which disk is full.
        if f"({errno.ENOSPC})" not in str(error):
            raise
        # torch leaves its file there, which takes the room that there is.
        for name in re.findall(r"file </(torch_\w+)>", str(error)):
            Path(_SHARED, name).unlink(missing_ok=True)
        room = shutil.disk_usage(_SHARED)
        raise ConfigurationError(
            f"{_SHARED} of this worker is full: {storage.nbytes():,} bytes go through it to a process of "
            f"dr.spmd, and {room.free:,} of {room.total:,} are free. Make it larger (`mount -o "
            f"remount,size=8g {_SHARED}`, in a container `--shm-size=8g`), or remove what is left in it"
        ) from error
    return descriptor


@contextmanager
def _naming_descriptors() -> Iterator[None]:
    """Let an error of torch's that there is no descriptor left say so, and of how many."""
    try:
        yield
    except RuntimeError as error:
        # torch says the number of one, and not that of the other.
        if f"({errno.EMFILE})" not in str(error) and "could not duplicate" not in str(error):
            raise
        raise _no_descriptor() from error


def _no_descriptor() -> ConfigurationError:
    return ConfigurationError(
        f"a tensor on its way between a worker and a process of dr.spmd: {used_up(OSError(errno.EMFILE, ''))}"
    )


class Incoming:
    """A message that has come, and its memories."""

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self._fds = fds
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.message: object = pickle.loads(data)

    def tensor(self, shown: Shared | Device) -> torch.Tensor:
        """Return the tensor that something in the message stands for."""
        if isinstance(shown, Device):
            rebuild, args = pickle.loads(shown.pickled)
            found: torch.Tensor = rebuild(*args)
            return found
        sizes, strides, offset, dtype, conjugate, negative = shown.spec
        storage = self._storages.get(shown.number)
        if storage is None:
            with _naming_descriptors():
                storage = (
                    torch.UntypedStorage(0)
                    if shown.number < 0
                    else torch.UntypedStorage._new_shared_fd_cpu(  # type: ignore[attr-defined]
                        self._fds[shown.number], shown.nbytes
                    )
                )
            self._storages[shown.number] = storage
        made = torch.empty(0, dtype=dtype).set_(storage, offset, sizes, strides)  # type: ignore[call-overload]
        made = torch.conj(made) if conjugate else made
        return torch._neg_view(made) if negative else made

    def close(self) -> None:
        """Let go of the descriptors. The tensors stay."""
        while self._fds:
            os.close(self._fds.pop())


def receive(link: socket.socket) -> Incoming | None:
    """Return the next message, or None where the other side has gone. Block until it is there.

    Raise `ConfigurationError` where no descriptor is left for what comes with it. The socket is of no use
    then.
    """
    head = _exactly(link, _HEAD.size)
    if head is None:
        return None
    length, count = _HEAD.unpack(head)
    fds: list[int] = []
    while len(fds) < count:
        mark, found, flags, _ = socket.recv_fds(link, 1, _MOST_FDS)
        fds += found
        if mark and flags & socket.MSG_CTRUNC:
            for descriptor in fds:
                os.close(descriptor)
            raise _no_descriptor()
        if not mark or not found:
            return None
    data = _exactly(link, length)
    return None if data is None else Incoming(data, fds)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        found = link.recv(min(count - len(data), 1 << 20))
        if not found:
            return None
        data += found
    return bytes(data)


# -- results -------------------------------------------------------------------------------------------------


class Circular(Exception):
    """A result is in itself."""


class Stays(NamedTuple):
    """An object that stays in its member's process, under a number."""

    number: int
    kind: str


# Values of these classes travel; an object of any other class stays where it is.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_DEEPEST = 32


def written(
    value: object, tensor: Callable[[torch.Tensor], object], keep: Callable[[object], Stays]
) -> object:
    """Return a result as it travels: its tensors by `tensor`, plain values, and by `keep` what stays."""

    around: list[int] = []

    def visit(part: object) -> object:
        if id(part) in around:
            raise Circular
        around.append(id(part))
        found = travelling(part, len(around))
        around.pop()
        return found

    def travelling(part: object, depth: int) -> object:
        if type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided:  # type: ignore[attr-defined]
            return tensor(part)  # type: ignore[arg-type]
        if type(part) in _PLAIN:
            return part
        if type(part).__module__ == "numpy":
            return part
        if depth < _DEEPEST and type(part) in (tuple, list):
            return type(part)(visit(item) for item in part)  # type: ignore[attr-defined, call-arg]
        if depth < _DEEPEST and type(part) is dict and all(type(key) in _PLAIN for key in part):
            return {key: visit(item) for key, item in part.items()}
        tree = opened(part) if depth < _DEEPEST else None
        # The worker need not have the class.
        if tree is not None and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves([*tree.parts])):
            return tree._replace(parts=[visit(item) for item in tree.parts])
        return keep(part)

    try:
        return visit(value)
    except Circular:
        return keep(value)


def read(value: object, make: Callable[[object], object]) -> object:
    """Return a result that has travelled; `make` turns what stands for something into that."""
    if isinstance(value, (Shared, Device, Stays)):
        return make(value)
    if type(value) in (tuple, list):
        return type(value)(read(item, make) for item in value)  # type: ignore[attr-defined, call-arg]
    if isinstance(value, Opened):
        return value._replace(parts=[read(item, make) for item in value.parts])
    if type(value) is dict:
        return {key: read(item, make) for key, item in value.items()}
    return value


def require(message: object, length: int) -> tuple[object, ...]:
    """Return a message that is a tuple of so many things."""
    if not isinstance(message, tuple) or len(message) != length:
        raise ProtocolError(f"a member's process sent {message!r:.80}")
    return message
