"""What a worker does with packages of the user's that come.

These functions travel to workers.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from contextlib import suppress
from types import ModuleType

import torch

from distruntime.wire.descriptors import on_full_disk
from distruntime.wire.scratch import scratch_folder

# This module has the state, as each function that travels comes with globals of its own.
STATE = "_distruntime_shipped"


def install(archive: torch.Tensor, name: str, tops: list[str], digest: str) -> None:
    """Unpack an archive, let its modules be imported before others, and forget what of them was imported."""
    state = sys.modules.setdefault(STATE, ModuleType(STATE))
    # The processes of `dr.spmd` get these, too.
    known: dict[str, tuple[str, str, list[str]]] = state.__dict__.setdefault("known", {})
    before = known.get(name)
    # Several sessions may share this process, and data loaders' processes may read the older folder still.
    if before is not None and before[0] == digest:
        return
    folder = tempfile.mkdtemp(prefix=f"{name[:40]}-", dir=_folder(state))
    with zipfile.ZipFile(io.BytesIO(bytes(archive.numpy()))) as packed:
        try:
            packed.extractall(folder)
        except OSError as error:
            nbytes = sum(entry.file_size for entry in packed.infolist())
            # A part of it would take what room there is, and nobody would use it.
            shutil.rmtree(folder, ignore_errors=True)
            raise on_full_disk(error, os.path.dirname(folder), nbytes) from error
    if before is not None:
        with suppress(ValueError):
            sys.path.remove(before[1])
    sys.path.insert(0, folder)
    known[name] = digest, folder, tops
    for module in [m for m in sys.modules if m.partition(".")[0] in tops]:
        del sys.modules[module]
    importlib.invalidate_caches()


def _folder(state: ModuleType) -> str:
    """Return this process's folder for packages. It is removed when the process ends."""
    found: str | None = state.__dict__.get("folder")
    if found is None:
        found = state.__dict__["folder"] = str(scratch_folder("code"))
    return found
