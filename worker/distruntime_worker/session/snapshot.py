"""A snapshot of a worker's memory, for its master: where each value is, and what torch's allocator says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Literal, final

from distruntime.errors import ConfigurationError
from distruntime.wire.messages import SnapshotMade

from ..log.budget import memory_in
from ..log.state import State
from ..machine import hardware
from ..values.mesh_lanes import Shards
from ..values.step import int_word

# A reply has so many bytes of a snapshot at most.
_CHUNK = 1 << 20


@final
class Snapshot:
    """The snapshot of one session, from when its master asks for it until it has taken it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._data = b""

    def make(self, then: Callable[[SnapshotMade | Exception], None]) -> None:
        """Note what memory is in use, in a thread of its own: torch may take a while for long histories.
        Call `then` with its size, or with why there is no snapshot (the reader).
        """

        def work() -> None:
            try:
                noted, values = self._noted()
                self._data = json.dumps(noted, separators=(",", ":")).encode()
            except (RuntimeError, ValueError, TypeError) as error:
                # The allocator of a lost device raises, and JSON does where torch adds something new.
                then(error)
                return
            then(SnapshotMade(len(self._data), values))

        threading.Thread(target=work, name="snapshot", daemon=True).start()

    def take(self, offset: int) -> bytes:
        """Return the bytes from an offset on. After the last ones they are forgotten (the reader)."""
        found = self._data[max(0, offset) : offset + _CHUNK]
        if offset + _CHUNK >= len(self._data):
            self._data = b""
        return found

    def _noted(self) -> tuple[dict[str, object], int]:
        state = self._state
        names = state.devices.names
        gpus = [name for name in names if name != "cpu"]
        # torch numbers GPUs as it does everywhere. The CPU comes after the last of them.
        numbers = {name: int(name.partition(":")[2] or 0) for name in gpus}
        cpu = max(numbers.values(), default=-1) + 1
        told = hardware.tells_of_blocks(state.devices.asynchronous)
        whole = hardware.blocks() if told else None
        stacks = list[object]()
        if whole is not None:
            _set_apart(whole, stacks, {})
        values = list(self._values(numbers, cpu))
        noted: dict[str, object] = {
            "values": values,
            "torch": whole,
            "stacks": stacks,
            "devices": {str(number): name for name, number in [*numbers.items(), ("cpu", cpu)]},
        }
        return noted, len(values)

    def _values(self, numbers: dict[str, int], cpu: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield where each value's memory is: ref, member, device number, address, bytes."""
        for word, value in self._state.slots.copy().items():
            lanes = enumerate(value) if isinstance(value, Shards) else [(-1, value)]
            for member, one in lanes:
                for memory in memory_in([one]):
                    number = numbers.get(str(memory.device), cpu)
                    yield int_word(word), member, number, memory.data_ptr(), memory.nbytes()


def record(state: State, enabled: str | None, most: int) -> None:
    """Switch the history of torch's allocator here on or off, where it keeps one."""
    mode: Literal["all", "state"] | None = "all" if enabled == "all" else "state" if enabled else None
    if enabled != mode:
        raise ConfigurationError(f'got the memory history {enabled!r}, expected "all", "state" or None')
    if hardware.tells_of_blocks(state.devices.asynchronous):
        hardware.record_blocks(mode, most)


def _set_apart(thing: object, stacks: list[object], known: dict[str, int]) -> None:
    """Put a number in the place of each list of frames: most of them stand there many times."""
    if isinstance(thing, dict):
        frames = thing.get("frames")
        if isinstance(frames, list):
            text = json.dumps(frames)
            if text not in known:
                known[text] = len(stacks)
                stacks.append(frames)
            thing["frames"] = known[text]
        for one in thing.values():
            _set_apart(one, stacks, known)
    elif isinstance(thing, (list, tuple)):
        for one in thing:
            _set_apart(one, stacks, known)
