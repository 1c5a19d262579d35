"""A worker's part in checkpoints: files in a folder, written and read here, so that no tensor's bytes pass
the master.

A save has two phases. First each worker writes its tensors under a name that is new (`write`), and nothing
refers to that file; when all have, each replaces the index (`commit`). What came before is readable until
then, and its files go last (`sweep`). See docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Protocol, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized

from distruntime.errors import CheckpointError
from distruntime.wire.codec import bytes_tensor, dtype_name, dtype_named, tensor_bytes

from ..values.step import Operator
from ..values.streams import HostCopy

OURS = re.compile(r"distruntime-[0-9a-f]{12}(-node\d+\.safetensors|\.json)|\.distruntime-[0-9a-f]{12}\.tmp")
INDEXES = re.compile(r"distruntime(-[0-9a-f]{12})?\.json")

# An entry has the key, a function that gives the values in main memory, and a tensor of their metadata.
Entry = tuple[str, Callable[[], torch.Tensor], torch.Tensor]


class Writing(HostCopy):
    """What a save leaves in a slot: a fetch of it is answered, with the number of bytes or with what went
    wrong, when the file is written.

    Nothing stands still for it, as for a copy to the host.
    """

    __slots__ = ("_error", "_nbytes", "_over")

    def __init__(self) -> None:
        self.event, self.device, self._buffer = self, None, None
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._nbytes = 0

    def __repr__(self) -> str:
        return "a checkpoint's file"

    def run(self, write: Callable[[], int]) -> None:
        """Write, in whichever thread; note the outcome."""
        try:
            with torch.no_grad():
                self._nbytes = write()
        except Exception as error:
            # Whatever the error is, it is the answer.
            self._error = error
        self._over.set()

    def query(self) -> bool:
        """Return whether the file is written, or will not be."""
        return self._over.is_set()

    def synchronize(self) -> None:
        """Block until it is."""
        self._over.wait()

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The number of bytes in the file; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return torch.tensor(self._nbytes)


# -- writing ---------------------------------------------------------------------------------------


class CheckpointPlan(TypedDict, total=False):
    """What the master sends along as JSON: of a save the keys of its tensors, of a load where they are."""

    folder: str
    file: str
    save: str
    keys: list[str]
    small: list[tuple[str, str, list[int], int]]
    tensors: list[tuple[str, str, str, list[int], list[int] | None]]


def plan_of(packed: torch.Tensor) -> tuple[CheckpointPlan, memoryview]:
    """Return what the master sends along as bytes.

    A JSON object, then the values of small tensors of its own.
    """
    data = tensor_bytes(packed.cpu())
    (size,) = struct.unpack("<Q", data[:8])
    plan: CheckpointPlan = json.loads(bytes(data[8 : 8 + size]))
    return plan, data[8 + size :]


def write(packed: torch.Tensor, background: bool, tensors: list[torch.Tensor]) -> Writing:
    """Write tensors, as they are at this point of the log, to a new file.

    In a thread of its own, from copies, if `background`.
    """
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        # Where a tensor is poisoned, the master tells its first cause instead.
        raise TypeError("what is to be saved is not here")
    plan, rest = plan_of(packed)
    take = _snapshot if background else _as_it_is
    entries: list[Entry] = [(key, take(t), t.to("meta")) for key, t in zip(plan["keys"], tensors)]
    for key, dtype, sizes, nbytes in plan["small"]:
        value = bytes_tensor(dtype, sizes, bytes(rest[:nbytes]))
        entries.append((key, partial(_same, value), value.to("meta")))
        rest = rest[nbytes:]
    writing = Writing()
    work = partial(writing.run, partial(_write, plan["folder"], plan["file"], plan["save"], entries))
    if background:
        threading.Thread(target=work, name="writes-checkpoint", daemon=True).start()
    else:
        work()
    return writing


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _as_it_is(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return value.cpu


def _snapshot(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    copy = HostCopy(value.resolve_conj().resolve_neg())
    return partial(_settled, copy)


def _settled(copy: HostCopy) -> torch.Tensor:
    if copy.event is not None:
        copy.event.synchronize()
    return copy.tensor


@lru_cache(maxsize=256)
def _code(dtype: torch.dtype) -> str | None:
    """Return safetensors' name of a dtype; None if it has none."""
    try:
        head = serialized({"x": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, RuntimeError, SafetensorError):
        return None
    code: str = json.loads(head[8 : 8 + struct.unpack("<Q", head[:8])[0]])["x"]["dtype"]
    # F4 has two numbers in a byte, and torch counts them one by one.
    return code if code != "F4" else None


def stored(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the file has it.

    Complex128 as pairs of numbers, other dtypes that the format does not have as bytes.
    """
    if _code(value.dtype) is not None:
        return value
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj().resolve_neg())
    return value.contiguous().unsqueeze(-1).view(torch.uint8)


def restored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `stored`."""
    if value.dtype == dtype:
        return value
    # torch's `view_as_complex` does not know every complex dtype.
    return value.view(dtype).squeeze(-1)


def _write(folder: str, name: str, save: str, entries: list[Entry]) -> int:
    """Write a file as safetensors has it, one tensor after the other, with a checksum of each; return its
    size in bytes.

    The library's own writer wants all tensors in main memory at once, which a GPU's need not fit into.
    """
    # This order aligns each tensor, as the format wants.
    order = sorted(entries, key=lambda entry: (-entry[2].dtype.itemsize, entry[0]))
    header: dict[str, object] = {}
    end = 0
    for key, _, meta in order:
        form = stored(meta)
        header[key] = {
            "dtype": _code(form.dtype),
            "shape": list(form.shape),
            "data_offsets": [end, end + form.nbytes],
        }
        end += form.nbytes
    path = os.path.join(folder, name)
    with explained(
        f"the checkpoint in {folder} was not written; what was there before is as it was", folder, end
    ):
        _make(folder)
        try:
            with open(path, "xb") as file:
                length = file.write(_header(header, save, [0] * len(order)))
                sums: dict[str, int] = {}
                for key, values, _ in order:
                    data = tensor_bytes(stored(values()))
                    file.write(data)
                    sums[key] = zlib.crc32(data)
                file.seek(0)
                # The new header has the length of the old one, and so takes its place.
                file.write(_header(header, save, [sums[key] for key in sorted(sums)]))
                file.flush()
                os.fsync(file.fileno())
            sync(folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.remove(path)
            raise
    return length + end


def _header(entries: dict[str, object], save: str, sums: Sequence[int]) -> bytes:
    metadata = {"format": "pt", "distruntime": save, "crc32": " ".join(f"{n:08x}" for n in sums)}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; a checkpoint is a folder", folder) from None


def sync(folder: str) -> None:
    """Have the kernel write a folder's entries, so that a file's name lasts as its bytes do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(what: str, folder: str, nbytes: int = 0) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        lines = [f"{what}: {error.strerror or error} ({error.filename or folder})"]
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            there = next(p for p in _upwards(folder) if os.path.isdir(p))
            lines.append(
                f"{nbytes} bytes were to be written, and {shutil.disk_usage(there).free} are free there: "
                "make room, or save elsewhere"
            )
        elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
            lines.append(
                f"the worker runs as user {os.getuid()}, who must be allowed to write there: choose a "
                "folder where it is"
            )
        else:
            lines.append(
                "a checkpoint is a folder, the same path on every worker, which is made if its disk is there"
            )
        raise type(error)("\n  ".join(lines)) from error


def _upwards(path: str) -> Iterator[str]:
    while True:
        yield path
        if path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


# -- reading ---------------------------------------------------------------------------------------


def read(packed: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return tensors of files in memory of their own on a device, after one that says that all are there."""
    plan, _ = plan_of(packed)
    found = [torch.zeros((), dtype=torch.int64)]
    for values, stride in _values(plan):
        if stride is not None:
            target = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=device)
            found.append(target.copy_(values))
        elif device.type == "cpu":
            found.append(values.clone())
        else:
            found.append(values.to(device))
    return found


def read_packed(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of many small tensors of files in one."""
    plan, _ = plan_of(packed)
    parts = [bytes(tensor_bytes(values)) for values, _ in _values(plan)]
    return (
        torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        if any(parts)
        else torch.empty(0, dtype=torch.uint8)
    )


def sums(packed: torch.Tensor) -> torch.Tensor:
    """Return the checksums of tensors, as their files have them."""
    plan, _ = plan_of(packed)
    folder, files = plan["folder"], dict[str, _File]()
    found = []
    for name, key, *_ in plan["tensors"]:
        if name not in files:
            files[name] = _File(folder, name, plan["save"])
        found.append(files[name].sum_of(key))
    return torch.tensor(found, dtype=torch.int64)


def _values(plan: CheckpointPlan) -> Iterator[tuple[torch.Tensor, list[int] | None]]:
    """Yield the values of each tensor of a plan, in the file's memory, and the strides that it is to have."""
    folder, files = plan["folder"], dict[str, _File]()
    for name, key, dtype, sizes, stride in plan["tensors"]:
        if name not in files:
            files[name] = _File(folder, name, plan["save"])
        yield files[name].tensor(key, dtype_named(dtype), sizes), stride


class _Opened(Protocol):
    """What safetensors opens."""

    def metadata(self) -> dict[str, str] | None: ...

    def keys(self) -> list[str]: ...

    def get_tensor(self, key: str) -> torch.Tensor: ...


def _opened(path: str) -> _Opened:
    file: _Opened = safe_open(path, framework="pt")
    return file


class _File:
    """A file of a save, opened and checked."""

    def __init__(self, folder: str, name: str, save: str) -> None:
        if not OURS.fullmatch(name):
            raise CheckpointError(
                f"the index in {folder} names a file {name!r:.80}, which no save has written"
            )
        self._path = os.path.join(folder, name)
        try:
            self._file = _opened(self._path)
            metadata = self._file.metadata() or {}
        except SafetensorError as error:
            raise self._damaged(str(error)) from None
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}; it is part of the checkpoint, which is of no use "
                "without it"
            ) from None
        keys, sums = sorted(self._file.keys()), str(metadata.get("crc32", "")).split()
        if metadata.get("distruntime") != save or len(sums) != len(keys):
            raise self._damaged(
                f"it belongs to save {metadata.get('distruntime')!r:.40}, and the index to {save!r}"
            )
        self._sums = dict(zip(keys, sums))

    def sum_of(self, key: str) -> int:
        """Return the checksum of a tensor's bytes. Raise `CheckpointError` if the file has none."""
        try:
            return int(self._sums[key], 16)
        except (KeyError, ValueError):
            raise self._damaged(f"it has no checksum of {key!r}") from None

    def tensor(self, key: str, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
        """Return a tensor in the memory of the file.

        Raise `CheckpointError` if its bytes are not those that were written.
        """
        if key not in self._sums:
            raise self._damaged(f"it has no tensor {key!r}")
        try:
            found: torch.Tensor = self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from None
        if f"{zlib.crc32(tensor_bytes(found)):08x}" != self._sums[key]:
            raise self._damaged(
                f"the bytes of {key!r} have the checksum {zlib.crc32(tensor_bytes(found)):08x}, not "
                f"{self._sums[key]}"
            )
        values = restored(found, dtype)
        if list(values.shape) != sizes:
            raise self._damaged(
                f"{key!r} is {tuple(values.shape)} {dtype_name(values.dtype)}, and the index says "
                f"{tuple(sizes)} {dtype_name(dtype)}"
            )
        return values

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {why}. Expected: the file as dr.save wrote it; take another copy of "
            "the checkpoint"
        )


FUNCTIONS: dict[str, Operator] = {
    "distruntime::checkpoint_write": write,
    "distruntime::checkpoint_read": read,
    "distruntime::checkpoint_read_packed": read_packed,
    "distruntime::checkpoint_sums": sums,
}
