"""What a file of a checkpoint is called, what a worker is told about it, and how its dtypes are stored."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import save as serialized

from distruntime.wire.codec import tensor_bytes
from distruntime.wire.descriptors import used_up

OURS = re.compile(r"distruntime-[0-9a-f]{12}(-node\d+\.safetensors|\.json)|\.distruntime-[0-9a-f]{12}\.tmp")
INDEXES = re.compile(r"distruntime(-[0-9a-f]{12})?\.json")


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


@lru_cache(maxsize=256)
def format_code(dtype: torch.dtype) -> str | None:
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
    if format_code(value.dtype) is not None:
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
        elif used_up(error):
            lines.append(used_up(error))
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
