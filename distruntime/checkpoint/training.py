"""`run_with_restarts`: a training that goes on from its last checkpoint when a worker is lost."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..backend.random import get_rng_state, set_rng_state
from ..cluster.restart import restart
from ..errors import ConnectionFailed, DistruntimeError, NodeFailed, UsageError
from ..log.handle import Place
from ..session.session import Session, active_session
from .load import find_newest
from .phases import Saving
from .save import folder_of, save

log = logging.getLogger("distruntime")

T = TypeVar("T")


class Checkpoint:
    """What `run_with_restarts` gives to the function that it calls: the training's last checkpoint.

    `attempt` counts the calls, from 0.
    """

    def __init__(self, path: str, attempt: int) -> None:
        self.path, self.attempt = path, attempt

    def __repr__(self) -> str:
        return f"<distruntime checkpoint of a training, in {self.path}, attempt {self.attempt}>"

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
        return whole["tree"]


def _places(session: Session) -> list[Place]:
    there = [node.index for node in session.nodes if node.failed is None]
    return [session.places.place(node, device) for node in there for device in session.places.devices(node)]


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
                _start_again(active_session(), attempt)
            return train(Checkpoint(path, attempt))
        except Exception as error:
            if attempt >= max_restarts or not _is_loss(error):
                raise
            log.warning("attempt %d ended: %s", attempt, str(error).partition("\n")[0])
        # The error is gone here, and with it the frames of the attempt and the tensors in them.
        gc.collect()
        attempt += 1


def _start_again(session: Session, attempt: int) -> None:
    """Let the workers that are there run what the last attempt has left, and start the lost ones again."""
    for index, node in enumerate(list(session.nodes)):
        if node.failed is None:
            try:
                session.synchronize(node)
            except DistruntimeError as error:
                # It belongs to the attempt that has ended, and the next one does not want it.
                log.info("%s: left from the attempt before: %s", node, str(error).partition("\n")[0])
        # The look above may have found it lost. Another worker may have taken its place meanwhile, and is to
        # keep it.
        if session.nodes[index].failed is not None:
            where = (
                f"at {node.address}" if not session.workers.can_start else "that is started on this machine"
            )
            log.warning(
                "attempt %d waits for a worker %s to be node %d again, %g s at most",
                attempt,
                where,
                index,
                session.patience,
            )
            restart(index)


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
