"""`run_with_restarts`: a training that goes on from its last checkpoint when a worker is lost."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..backend.random import get_rng_state, set_rng_state
from ..cluster.workers import restart
from ..errors import ConnectionFailed, DistruntimeError, NodeFailed, UsageError, without_our_frames
from ..log.handle import Place
from ..session.fetching import drain
from ..session.session import Session, active_session
from .load import find_newest
from .phases import Saving
from .save import folder_of, save

log = logging.getLogger("distruntime")

T = TypeVar("T")


class Checkpoint:
    """What `run_with_restarts` gives to the function that it calls: the training's last checkpoint.

    `attempt` counts the calls, from 0. There are `attempts` at most.
    """

    def __init__(self, path: str, attempt: int, attempts: int) -> None:
        self.path, self.attempt, self.attempts = path, attempt, attempts
        self._told = False

    def __repr__(self) -> str:
        # People count from 1, and so does the log.
        which = f"attempt {self.attempt + 1} of {self.attempts}"
        return f"<distruntime checkpoint of a training, in {self.path}, {which}>"

    def save(self, tree: object, *, async_op: bool = False) -> Saving | None:
        """Save a tree as `dr.save` does, with the random states of all places and of this process."""
        session = active_session()
        states = {str(place): get_rng_state(session.places.residence(place)) for place in _places(session)}
        return save(
            {"tree": tree, "here": torch.get_rng_state(), "places": states}, self.path, async_op=async_op
        )

    # Its type is that of `dr.load`, for the reason given there.
    def load(self, *, place: object = None) -> Any:  # type: ignore[explicit-any]
        """Return the tree of the last complete checkpoint, as `dr.load` does, and set its random states.

        Return None if there is no checkpoint. Call it after seeding, and after whatever else draws random
        numbers before the training goes on.
        """
        session = active_session()
        found = find_newest(session, self.path)
        if found is None:
            self._say_start("the beginning, as there is no checkpoint")
            return None
        form = found.index["tree"]
        if not isinstance(form, dict) or set(form) != {"tree", "here", "places"}:
            raise UsageError(
                f"the checkpoint in {self.path} was not saved by a training of run_with_restarts: dr.load "
                "reads it"
            )
        whole = found.tree(place)
        assert isinstance(whole, dict)
        torch.set_rng_state(whole["here"])
        for there in _places(session):
            state = whole["places"].get(str(there))
            if state is not None:
                set_rng_state(state, session.places.residence(there))
        tree = whole["tree"]
        step = tree.get("step") if isinstance(tree, dict) else None
        self._say_start(f"step {step}" if type(step) is int else f"the last checkpoint in {self.path}")
        return tree

    def _say_if_none(self) -> None:
        """Say that an attempt starts from the beginning: a training that saves nothing may load nothing."""
        if find_newest(active_session(), self.path) is None:
            self._say_start("the beginning, as there is no checkpoint")

    def _say_start(self, where: str) -> None:
        if self._told:
            return
        self._told = True
        # The first attempt is no news.
        level = logging.WARNING if self.attempt else logging.INFO
        log.log(level, "attempt %d of %d starts from %s", self.attempt + 1, self.attempts, where)


def _places(session: Session) -> list[Place]:
    there = [node.index for node in session.nodes if node.failed is None]
    return [session.places.place(node, device) for node in there for device in session.places.devices(node)]


@without_our_frames
def run_with_restarts(
    train: Callable[[Checkpoint], T], *, max_restarts: int = 3, checkpoint: str | os.PathLike[str]
) -> T:
    """Call `train` with a `Checkpoint` and return its result; call it anew when a lost worker is back.

    Args:
        train: makes its model and optimizer, takes up what `ckpt.load()` returns unless that is None, and
            calls `ckpt.save(tree)` from time to time. Called again it must make its remote tensors anew, as
            those of a lost worker are gone.
        max_restarts: how often at most. Then the last error is raised, with its causes. A lost worker that
            nobody replaces within the session's own `timeout` counts as a restart, too.
        checkpoint: the folder. It may have a checkpoint of an earlier run, and then the training goes on from
            that.

    Blocks for the whole training. Only `NodeFailed` and `ConnectionFailed`, and what has one of them among
    its causes, lead to a new attempt. Anything else is raised at once.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise UsageError(f"max_restarts is a number of restarts, 0 or more, got {max_restarts!r:.80}")
    path = folder_of(checkpoint)
    attempt = 0
    while True:
        try:
            if attempt:
                _start_again(active_session(), attempt, max_restarts + 1)
            ckpt = Checkpoint(path, attempt, max_restarts + 1)
            if attempt:
                ckpt._say_if_none()
            return train(ckpt)
        except Exception as error:
            if attempt >= max_restarts or not _is_loss(error):
                raise
            log.warning("attempt %d of %d ended: %s", attempt + 1, max_restarts + 1, _first_sentence(error))
        # The error is gone here, and with it the frames of the attempt and the tensors in them.
        gc.collect()
        attempt += 1


def _start_again(session: Session, attempt: int, attempts: int) -> None:
    """Let the workers that are there run what the last attempt has left, and start the lost ones again."""
    for index, node in enumerate(list(session.nodes)):
        if node.failed is None:
            try:
                drain(session, node)
            except DistruntimeError as error:
                log.info("%s: left from the attempt before: %s", node, _first_sentence(error))
            # They belong to the attempt that has ended, and the next one does not want them.
            if node.failure_log.unread:
                log.info("%s: %d operations of the attempt before failed", node, len(node.failure_log.unread))
                node.failure_log.unread.clear()
        # The look above may have found it lost. Another worker may have taken its place meanwhile, and is to
        # keep it.
        if session.nodes[index].failed is not None:
            log.warning(
                "attempt %d of %d waits for a replacement of node %d, %g s at most",
                attempt + 1,
                attempts,
                index,
                session.patience,
            )
            restart(index)


def _first_sentence(error: BaseException) -> str:
    """Return what an error says before its details."""
    line, _, details = str(error).partition("\n")
    # A line with details below it may end within a sentence.
    whole = line.rpartition(". ")[0] if details else ""
    return f"{whole}." if whole else line


def _is_loss(error: BaseException) -> bool:
    """Whether an error, or what led to it, is the loss of a worker."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (NodeFailed, ConnectionFailed)):
            return True
        causes = [
            one.__cause__,
            None if one.__suppress_context__ else one.__context__,
            *getattr(one, "exceptions", ()),
        ]
        left += [cause for cause in causes if isinstance(cause, BaseException)]
    return False
