"""The folder of a checkpoint: its index, which names the files of one save, and what the master asks about it
outside the log.

The index is replaced at one stroke, so a reader finds either save, and whole.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from distruntime.errors import CheckpointError, ProtocolError
from distruntime.wire.codec import failure_fields
from distruntime.wire.messages import (
    CommitSave,
    Failed,
    FileSize,
    FolderListing,
    IndexSummary,
    ListFolder,
    Message,
    ReadIndex,
    RemoveFiles,
    Reply,
    SweepSaves,
)

from ..machine import threads
from ..values.objects import failure
from .files import sync
from .plan import INDEXES, OURS, explained

INDEX = "distruntime.json"
# Transformers and other libraries find a tensor's file in this table.
WEIGHTS = "model.safetensors.index.json"


def commit(folder: str, save: str, index: str, weights: str) -> None:
    """Make a save that all workers have written the current one.

    The index before it stays under the name of its save.
    """
    with explained(
        f"the checkpoint in {folder} was written, and could not be made the current one", folder, len(index)
    ):
        old = _summary(folder, INDEX)
        if old is not None and not old.problem and old.save != save:
            with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
                _replace(folder, f"distruntime-{old.save}.json", file.read())
        if _weights_are_ours(folder):
            _replace(folder, WEIGHTS, weights)
        _replace(folder, INDEX, index)
        sync(folder)


def _weights_are_ours(folder: str) -> bool:
    """Whether the table of tensors and files names files of saves only, or is not there.

    Else it belongs to a model that is kept here.
    """
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
    # This may be a disk of its own, of a worker that has no part in this save.
    if current is not None and current.save != save:
        old = [WEIGHTS, INDEX] if _weights_are_ours(folder) else [INDEX]
        for name in old:
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))
    remove(folder, [name for name in _names(folder) if OURS.fullmatch(name) and name not in keep])


def remove(folder: str, names: list[str]) -> None:
    """Remove files of a save, as far as they are there."""
    for name in names:
        if OURS.fullmatch(name):
            # Another worker that shares the disk was faster.
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def look(folder: str) -> FolderListing:
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
        return FolderListing(found, sizes)


def _summary(folder: str, name: str) -> IndexSummary | None:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            index = json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        # The second comes where the text is nested thousands deep.
        return _spoilt(name, f"it is no JSON: {error}")
    try:
        if index["format"] != "distruntime":
            return _spoilt(name, f"its format is {index['format']!r:.80}, not 'distruntime'")
        version = int(index["version"])
        if version != 1:
            return IndexSummary(name, "", version, 0, "", [])
        files = [FileSize(str(file), int(entry["bytes"])) for file, entry in index["files"].items()]
        return IndexSummary(name, "", version, int(index["number"]), str(index["save"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return _spoilt(name, f"it makes no sense: {type(error).__name__}: {error}")


def _spoilt(name: str, problem: str) -> IndexSummary:
    return IndexSummary(name, problem, 0, 0, "", [])


def index_of(folder: str, name: str) -> str:
    """Return the text of an index."""
    if not INDEXES.fullmatch(name):
        raise CheckpointError(f"{name!r:.80} is not the name of an index")
    with (
        explained(f"the checkpoint in {folder} cannot be read", folder),
        open(os.path.join(folder, name), encoding="utf-8") as file,
    ):
        return file.read()


FolderQuestion = ListFolder | ReadIndex | CommitSave | SweepSaves | RemoveFiles
# An error says in these words, for people, what was done.
_SHOWN: dict[type[FolderQuestion], str] = {
    ListFolder: "checkpoint: look",
    ReadIndex: "checkpoint: index",
    CommitSave: "checkpoint: commit",
    SweepSaves: "checkpoint: sweep",
    RemoveFiles: "checkpoint: remove",
}


def answer(question: FolderQuestion, send: Callable[[Message], object]) -> None:
    """Do what the master asks for, and reply when it is done. Return at once (the reader).

    A thread does it: the disk may be slow, and neither the log nor the reader waits for it.
    """
    what = type(question).__name__
    names: list[str] = []
    match question:
        case SweepSaves(keep=keep):
            names = keep
        case RemoveFiles(files=files):
            names = files
    if not all(isinstance(name, str) for name in names):
        raise ProtocolError(f"{what} of files called {names!r:.80}")
    threads.begin(partial(_answer, question, send), what)


def _answer(question: FolderQuestion, send: Callable[[Message], object]) -> None:
    try:
        send(Reply(question.request, _reply(question)))
    except Exception as error:
        # Whatever the error is, it is the answer.
        cause = failure(error, seq=0, position=0, op=_SHOWN[type(question)], operands="")
        send(Failed(question.request, failure_fields(cause)))


def _reply(question: FolderQuestion) -> FolderListing | str | None:
    match question:
        case ListFolder(folder=folder):
            return look(folder)
        case ReadIndex(folder=folder, index=index):
            return index_of(folder, index)
        case CommitSave(folder=folder, save=save, index=index, weights=weights):
            commit(folder, save, index, weights)
        case SweepSaves(folder=folder, save=save, keep=keep):
            sweep(folder, save, keep)
        case RemoveFiles(folder=folder, files=files):
            remove(folder, files)
    return None
