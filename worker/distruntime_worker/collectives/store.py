"""Where the members of a group find each other: keys and values. Each worker keeps them all, and tells the
other members' workers its own.

They travel over the workers' own channel, so only who holds the session's keys reads them, or sets one.
Nobody listens for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed

from distruntime.errors import NodeFailed, NotSupportedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as _Store
else:
    # A torch that was built without torch.distributed has no store. The data channel tcp needs none of it.
    _Store = getattr(torch.distributed, "Store", object)

# A key has at most so many characters.
LONGEST_KEY = 1 << 10
# A value has at most so many bytes.
LARGEST_VALUE = 1 << 20


class GroupStore(_Store):
    """One group's keys on one worker, a `torch.distributed.Store` for its members there. Any thread.

    `tell` sends a key and its value to the workers of all other members. Whoever waits for a key is woken by
    its arrival, and by `end`.
    """

    def __init__(
        self,
        group: int,
        timeout: float,
        tell: Callable[[str, bytes], None],
        tell_one: Callable[[int, str, bytes], None] | None = None,
        members: int = 0,
    ) -> None:
        super().__init__()
        # So many members are on this worker. It is 0 where nobody has said it.
        self.members = members
        self._group, self._timeout, self._tell, self._tell_one = group, timeout, tell, tell_one
        # It guards what follows.
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._ended = ""

    def arrived(self, key: str, value: bytes) -> None:
        """Take what a member has set. Never blocks."""
        with self._changed:
            if not self._ended:
                self._values[key] = value
                self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Forget everything; whoever waits fails, and whoever comes later. The first reason stays."""
        with self._changed:
            self._ended = self._ended or reason
            self._values.clear()
            self._changed.notify_all()

    # -- what the data channel `relay` moves tensors with ------------------------------------------

    def post(self, rank: int, key: str, value: bytes) -> None:
        """Set a key for one member alone. Return at once; raise `NodeFailed` if the group has ended."""
        assert self._tell_one is not None
        with self._changed:
            self._require()
        self._tell_one(rank, key, value)

    def take(self, key: str) -> bytes:
        """Return a key's value, as `get`, and forget it."""
        with self._changed:
            self._await([key], self._timeout)
            return self._values.pop(key)

    # -- what a Store is asked for, by torch's C++ and by data channels ----------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key for all members.

        Return at once; raise `ValueError` for what is too large, `NodeFailed` if the group has ended.
        """
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(key) > LONGEST_KEY or len(data) > LARGEST_VALUE:
            raise ValueError(
                f"the store of a group takes keys of {LONGEST_KEY} characters and values of {LARGEST_VALUE} "
                f"bytes at most, got {key[:80]!r} with {len(data)} bytes: it is for finding each other, "
                "tensors take the data channel"
            )
        with self._changed:
            self._require()
        self.arrived(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Return a key's value. Block until it is there, up to the group's timeout.

        Raise `TimeoutError` past that, `NodeFailed` if the group ends.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys, as `get`."""
        with self._changed:
            self._await(keys, self._timeout)
            return [self._values[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there, up to the group's timeout or another; raise as `get`."""
        with self._changed:
            self._await(keys, self._timeout if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have arrived here."""
        with self._changed:
            return all(key in self._values for key in keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys, as `set`."""
        for key, value in zip(keys, values):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return False: torch then does without `append` and queues."""
        return False

    def _await(self, keys: list[str], timeout: float) -> None:
        if not self._changed.wait_for(
            lambda: self._ended or all(key in self._values for key in keys),
            min(timeout, threading.TIMEOUT_MAX),
        ):
            missing = [key for key in keys if key not in self._values]
            more = f", and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise TimeoutError(
                f"group {self._group}: no member has set {', '.join(map(repr, missing[:5]))}{more} in its "
                f"store within {timeout:g} s"
            )
        self._require()

    def _require(self) -> None:
        if self._ended:
            raise NodeFailed(f"group {self._group} has ended: {self._ended}")

    # -- what it would need one place for that all ask, and has none -------------------------------

    def _lacks(self, what: str) -> NoReturn:
        raise NotSupportedError(
            f"the store of a group has no {what}: each worker keeps the keys for itself, as they arrive. "
            "Let every member set a key of its own, and get those of the others"
        )

    def add(self, key: str, value: int) -> int:
        """Raise `NotSupportedError`."""
        self._lacks("add")

    def append(self, key: str, value: object) -> None:
        """Raise `NotSupportedError`."""
        self._lacks("append")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Raise `NotSupportedError`."""
        self._lacks("compare_set")

    def delete_key(self, key: str) -> bool:
        """Raise `NotSupportedError`."""
        self._lacks("delete_key")

    def num_keys(self) -> int:
        """Raise `NotSupportedError`."""
        self._lacks("num_keys")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Raise `NotSupportedError`."""
        self._lacks("queues")

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Raise `NotSupportedError`."""
        self._lacks("queues")

    def queue_len(self, key: str) -> int:
        """Raise `NotSupportedError`."""
        self._lacks("queues")

    def list_keys(self) -> list[str]:
        """Raise `NotSupportedError`."""
        self._lacks("list_keys")
