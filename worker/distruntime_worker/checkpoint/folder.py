"""The folder of a checkpoint: its index, which names the files of one save, and what the master asks about it outside the log.

The index is replaced at one stroke, so a reader finds either save, and whole.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distruntime.errors import CheckpointError, ProtocolError
from distruntime.wire.codec import failure_fields
from distruntime.wire.messages import Failed, Message, Reply

from ..values.objects import failure
from .files import INDEXES, OURS, explained, sync

INDEX = "distruntime.json"
WEIGHTS = "model.safetensors.index.json"  # by which transformers and others find a tensor's file


def commit(folder: str, save: str, index: str, weights: str) -> None:
    """Make a save that all workers have written the current one. The index before it stays under the name of its save."""
    with explained(
        f"the checkpoint in {folder} was written, and could not be made the current one", folder, len(index)
    ):
        old = _summary(folder, INDEX)
        if old is not None and not old[1] and old[4] != save:
            with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
                _replace(folder, f"distruntime-{old[4]}.json", file.read())
        if _weights_are_ours(folder):
            _replace(folder, WEIGHTS, weights)
        _replace(folder, INDEX, index)
        sync(folder)


def _weights_are_ours(folder: str) -> bool:
    """Whether the table of tensors and files names files of saves only, or is not there: else it belongs to a model that is kept here."""
    try:
        with open(os.path.join(folder, WEIGHTS), encoding="utf-8") as file:
            return all(OURS.fullmatch(name) for name in json.load(file)["weight_map"].values())
    except FileNotFoundError:
        return True
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _replace(folder: str, name: str, text: str) -> None:
    draft = os.path.join(folder, f".distruntime-{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, os.path.join(folder, name))
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(draft)
        raise


def sweep(folder: str, save: str, keep: list[str]) -> None:
    """Remove the files of other saves, those that did not come to an end among them."""
    current = _summary(folder, INDEX)
    if (
        current is not None and current[4] != save
    ):  # on a disk of its own, of a worker that has no part in this save
        old = [WEIGHTS, INDEX] if _weights_are_ours(folder) else [INDEX]
        for name in old:
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))
    remove(folder, [name for name in _names(folder) if OURS.fullmatch(name) and name not in keep])


def remove(folder: str, names: list[str]) -> None:
    """Remove files of a save, as far as they are there."""
    for name in names:
        if OURS.fullmatch(name):
            with suppress(FileNotFoundError):  # another worker that shares the disk was faster
                os.remove(os.path.join(folder, name))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


Summary = list[
    Any
]  # name of the index, what is wrong with it or "", version, number of the save, its id, [[file, bytes], ...]


def look(folder: str) -> list[Any]:
    """Return what of checkpoints is in a folder: a summary of each index, and the bytes of each file."""
    with explained(f"there is no checkpoint to be read in {folder}", folder):
        names = _names(folder)
        found = [
            summary
            for name in names
            if INDEXES.fullmatch(name) and (summary := _summary(folder, name)) is not None
        ]
        sizes: dict[str, int] = {}
        for name in names:
            if name.endswith(".safetensors"):
                with suppress(FileNotFoundError):
                    sizes[name] = os.stat(os.path.join(folder, name)).st_size
        return [found, sizes]


def _summary(folder: str, name: str) -> Summary | None:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            index = json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # the second where it is nested thousands deep
        return [name, f"it is no JSON: {error}", 0, 0, "", []]
    try:
        if index["format"] != "distruntime":
            return [name, f"its format is {index['format']!r:.80}, not 'distruntime'", 0, 0, "", []]
        version = int(index["version"])
        if version != 1:
            return [name, "", version, 0, "", []]
        files = [[str(file), int(entry["bytes"])] for file, entry in index["files"].items()]
        return [name, "", version, int(index["number"]), str(index["save"]), files]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [name, f"it makes no sense: {type(error).__name__}: {error}", 0, 0, "", []]


def index_of(folder: str, name: str) -> str:
    """Return the text of an index."""
    if not INDEXES.fullmatch(name):
        raise CheckpointError(f"{name!r:.80} is not the name of an index")
    with (
        explained(f"the checkpoint in {folder} cannot be read", folder),
        open(os.path.join(folder, name), encoding="utf-8") as file,
    ):
        return file.read()


# Asked for outside the log, and done in a thread: the disk may be slow, and neither the log nor the reader waits for it.
_VERBS: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "look": (look, (str,)),
    "index": (index_of, (str, str)),
    "commit": (commit, (str, str, str, str)),
    "sweep": (sweep, (str, str, list)),
    "remove": (remove, (str, list)),
}


def answer(request: int, detail: list[Any], send: Callable[[Message], Any]) -> None:
    """Do what the master asks for, and reply when it is done. Return at once (the reader)."""
    verb, *args = detail or [None]
    act, kinds = _VERBS.get(verb, (None, ())) if isinstance(verb, str) else (None, ())
    names = args[-1] if args and isinstance(args[-1], list) else []
    if act is None or tuple(map(type, args)) != kinds or not all(isinstance(name, str) for name in names):
        raise ProtocolError(f"nothing is known about checkpoints and {str(detail)[:80]}")
    try:
        threading.Thread(
            target=_answer, args=(request, verb, act, args, send), name=f"checkpoint-{verb}", daemon=True
        ).start()
    except RuntimeError as error:  # of threading: there is no more room for one
        raise ProtocolError(f"{verb} of a checkpoint cannot be begun: {error}") from error


def _answer(
    request: int, verb: str, act: Callable[..., Any], args: list[Any], send: Callable[[Message], Any]
) -> None:
    try:
        send(Reply(request, act(*args)))
    except Exception as error:  # whatever it is, it is the answer
        send(
            Failed(
                request,
                failure_fields(failure(error, seq=0, position=0, op=f"checkpoint: {verb}", operands="")),
            )
        )
