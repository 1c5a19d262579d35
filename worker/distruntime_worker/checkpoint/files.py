"""A worker's part in checkpoints: files in a folder, written here, so that no tensor's bytes pass
the master.

A save has two phases. First each worker writes its tensors under a name that is new (`write`), and nothing
refers to that file; when all have, each replaces the index (`commit`). What came before is readable until
then, and its files go last (`sweep`). See docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from distruntime.wire.codec import bytes_tensor, tensor_bytes

from ..values.step import Operator
from ..values.streams import HostCopy
from .plan import explained, format_code, plan_of, stored
from .reading import read, read_packed, sums

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
            "dtype": format_code(form.dtype),
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


# -- reading ---------------------------------------------------------------------------------------


FUNCTIONS: dict[str, Operator] = {
    "distruntime::checkpoint_write": write,
    "distruntime::checkpoint_read": read,
    "distruntime::checkpoint_read_packed": read_packed,
    "distruntime::checkpoint_sums": sums,
}
