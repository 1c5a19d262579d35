"""Structure-aware mutations of recorded messages and sessions, all from one `random.Random`: the same seed
gives the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

import msgpack

from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import MESSAGES, Hello, MeshBody, MeshSegment, Segment
from fuzz_seeds import Recording, Seed

INTS = [
    0,
    1,
    2,
    3,
    7,
    15,
    16,
    17,
    255,
    4095,
    4096,
    65535,
    1 << 20,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -1,
    -2,
    -16,
    -4096,
    -(1 << 31),
    -(1 << 62),
    -(1 << 63),
]
FLOATS = [0.0, -0.0, 1.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "", "x", "\0", "cpu", "cuda:0", "cuda:9", "meta", "member", "float32", "int64", "float99", "tensor",
    "item", "text", "passed", "done", "signal", "é\u202e\U0001f600", "a\nb", "%s%n{}", "../../x",
    "/proc/self/fd/9999", "x" * 5000, "group::all_reduce", "aten::add.Tensor", "1e999", "9" * 5000, "gloo",
    "tcp", "tcp+tls", "nccl", "127.0.0.1", "operand", "list", "__class__", "None", "new", "again", "resume",
    "force new", "force resume", "checkpoint", "distruntime.json",
]  # fmt: skip
BYTES = [b"", b"\0", b"\0\0\0\0", b"\x80\x04.", b"\xff" * 16, b"x" * 5000]
OPTIONS = [
    "quiet",
    "shared",
    "precision",
    "threshold",
    "edgeitems",
    "linewidth",
    "sci_mode",
    "indent",
    "profile",
    "x",
    "",
]
# msgpack's own limit is 1024 levels. `bomb` writes by hand what is deeper.
DEPTHS = [
    3,
    50,
    400,
    10_000,
]

# A mutated call may not name these operators. Whoever holds the key may run any, but these would end the
# worker by their nature, or crash torch itself, which checks no arguments of functions that only its autograd
# calls. `resize_storage` frees memory under tensors that are then read, as torch's own does: a segmentation
# fault. `set_rng_state` takes the recorded state only: torch copies any bytes of the right length into its
# generator. Backward functions, fused optimizers and private operators read past the end of what does not
# have the sizes that their forward promised.
UNSAFE = (
    "resize_storage",
    "set_rng_state",
    "backward",
    "fused",
    "aten::_",
    "as_strided",
    "aten::set_",
    "resize_",
)
UNKNOWN = [
    "aten::none_such",
    "aten::add.NoSuch",
    "nothing::at_all",
    "aten",
    "",
    "::",
    "group::",
    "group::none_such",
    "distruntime::none_such",
]


class Mutator:
    """Makes hostile messages out of recorded ones."""

    def __init__(self, recordings: list[Recording], random: Random) -> None:
        self.random = random
        self.recordings = recordings
        self.pool = [seed for recording in recordings for seed in recording.seeds]
        self.by_kind: dict[str, list[Seed]] = {}
        for seed in self.pool:
            self.by_kind.setdefault(seed.kind, []).append(seed)
        self.operators = sorted(operators(self.pool)) + UNKNOWN

    # -- values ------------------------------------------------------------------------------------

    def value(self) -> Any:
        """Return a value of any type."""
        make: Callable[[], Any] = self.random.choice(
            [self.integer, self.integer, lambda: self.random.choice(TEXTS), self.other]
        )
        return make()

    def other(self) -> Any:
        lists = [
            [],
            [[]],
            [None],
            [1, 2, 3],
            [[1, 0]],
            [0] * 7,
            {},
            {"a": 1},
            [OPERAND],
            ["list"],
            ["int", "x"],
            ["dtype", "nn"],
            ["device", "x:y"],
        ]
        return copy.deepcopy(self.random.choice([None, True, False, *FLOATS, *BYTES, *lists]))

    def integer(self) -> int:
        return self.random.choice(INTS)

    def near(self, number: int) -> int:
        """Return another integer: one beside it, its negative, a boundary, or one that may name something
        else of the session.
        """
        how = self.random.randrange(6)
        if how == 0:
            return number + self.random.choice((-1, 1))
        if how == 1:
            return -number
        if how == 2:
            return self.integer()
        return self.random.randrange(40)

    def changed(self, value: Any) -> Any:
        """Return a value like this one, or one of another type."""
        if self.random.random() < 0.1:
            return self.value()
        match value:
            case bool():
                return not value
            case int():
                return self.near(value)
            case float():
                return self.random.choice(FLOATS)
            case str():
                return self.text(value)
            case bytes():
                return self.bytes(value)
            case list():
                return self.list(value)
            case dict():
                return self.dict(value)
        return self.value()

    def text(self, value: str) -> str:
        how = self.random.randrange(4)
        if how == 0 and value:
            k = self.random.randrange(len(value))
            return value[:k] + self.random.choice(("", "\0", "é", value)) + value[k + 1 :]
        return value[: self.random.randrange(len(value) + 1)] if how == 1 else self.random.choice(TEXTS)

    def bytes(self, value: bytes) -> bytes:
        how = self.random.randrange(4)
        if how == 0 and value:
            k = self.random.randrange(len(value))
            return value[:k] + bytes([self.random.randrange(256)]) + value[k + 1 :]
        if how == 1:
            return value[: self.random.randrange(len(value) + 1)]
        return value + value if how == 2 and len(value) < 1 << 16 else self.random.choice(BYTES)

    def list(self, value: list[Any]) -> list[Any]:
        """Drop, double, swap, insert, cut, nest, or change what is in it."""
        found = list(value)
        how = self.random.randrange(9)
        if not found or how == 0:
            found.insert(self.random.randrange(len(found) + 1), self.value())
        elif how == 1:
            del found[self.random.randrange(len(found))]
        elif how == 2:
            found.insert(self.random.randrange(len(found)), copy.deepcopy(self.random.choice(found)))
        elif how == 3:
            a, b = self.random.randrange(len(found)), self.random.randrange(len(found))
            found[a], found[b] = found[b], found[a]
        elif how == 4:
            del found[self.random.randrange(len(found)) :]
        elif how == 5 and self.random.random() < 0.2:
            for _ in range(self.random.choice(DEPTHS[:3])):
                found = [found]
        else:
            k = self.random.randrange(len(found))
            found[k] = self.changed(found[k])
        return found

    def dict(self, value: dict[str, Any]) -> dict[Any, Any]:
        found = dict(value)
        if found and self.random.random() < 0.6:
            key = self.random.choice(list(found))
            found[key] = self.changed(found[key])
        else:
            found[self.random.choice(OPTIONS)] = self.value()
        return found

    # -- messages ----------------------------------------------------------------------------------

    def seed(self, seed: Seed) -> Seed:
        """Change a field or two of a message, or its payload frames."""
        message, payloads = seed.message, list(seed.payloads)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            if payloads and self.random.random() < 0.4:
                payloads = self.payloads(payloads)
            elif self.random.random() < 0.03:
                payloads.append(bytes(self.random.choice((0, 1, 1000, 1 << 20))))
            else:
                names = [f.name for f in fields(message)]
                name = self.random.choice(names)
                message = replace(message, **{name: self.changed(getattr(message, name))})
        return Seed(restrained(message, self), tuple(payloads))

    def payloads(self, payloads: list[Any]) -> list[Any]:
        k, how = self.random.randrange(len(payloads)), self.random.randrange(6)
        if isinstance(payloads[k], MeshBody) and how:
            payloads[k] = self.seed(Seed(payloads[k])).message
        elif how == 0:
            del payloads[k]
        elif how == 1:
            payloads.insert(k, payloads[k])
        elif how == 2:
            payloads[k] = bytes(self.random.choice((0, 1, 3, 1 << 16, 1 << 22)))
        elif isinstance(payloads[k], bytes):
            payloads[k] = self.bytes(payloads[k])
        return payloads

    def frames(self, seed: Seed) -> list[bytes]:
        """Return the bytes of a message, mutated as bytes too once in a while; what cannot travel becomes
        noise.
        """
        try:
            frames = seed.frames()
        except (
            ValueError,
            OverflowError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            # msgpack takes such a message no more than a master could send it.
            return [self.noise()]
        if self.random.random() < 0.06:
            k = self.random.randrange(len(frames))
            frames[k] = self.bitten(frames[k])
        return frames

    def bitten(self, frame: bytes) -> bytes:
        """Flip, cut, or append bytes of a frame."""
        data = bytearray(frame[: 1 << 16])
        for _ in range(self.random.choice((1, 1, 4, 30))):
            if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        if self.random.random() < 0.3:
            del data[self.random.randrange(len(data) + 1) :]
        return bytes(data)

    def noise(self) -> bytes:
        """Return a frame that is no message, or a bomb."""
        kind = self.random.randrange(len(MESSAGES))
        deep = self.random.choice(DEPTHS)
        head = bytes([0x92, kind])
        return self.random.choice([
            b"", b"\xc1", self.random.randbytes(self.random.randrange(200)),
            msgpack.packb([99]), msgpack.packb([kind]), msgpack.packb([kind, *[None] * 20]),
            b"\x91" * deep + b"\xc0", head + b"\x91" * deep + b"\xc0", head + b"\x81\xa1a" * deep + b"\xc0",
            b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\x01", b"\xdb\x7f\xff\xff\xffx",
            b"\xc6\xff\xff\xff\xffx", b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 100,
            b"\xc9\x00\x00\x00\x05\x01hello", b"\xd6\xff\0\0\0\0",
            b"\x95\x05" + b"\xcf" + b"\xff" * 8 + b"\xc0\xc0\xc0",
        ])  # fmt: skip

    # -- sessions ----------------------------------------------------------------------------------

    def session(self, by: str, most: int = 60) -> list[Seed | bytes]:
        """Return a recorded session, mutated: messages changed, dropped, doubled, swapped, those of another
        spliced in.
        """
        random = self.random
        recorded = [r for r in self.recordings if r.by == by]
        seeds: list[Any] = list(random.choice(recorded).seeds)
        if random.random() < 0.3:
            other = random.choice(recorded).seeds
            cut = random.randrange(len(seeds) + 1)
            seeds = [*seeds[:cut], *other[random.randrange(len(other)) :]]
        start = random.randrange(max(1, len(seeds) - most)) if random.random() < 0.3 else 0
        seeds = seeds[start : start + most]
        # If it is calm, it is changed in one place only: what is behind makes sense, as long as anybody reads
        # it.
        calm = random.random() < 0.6
        rate = 0.0 if calm else random.choice((0.02, 0.1, 0.5))
        found: list[Any] = []
        for seed in seeds:
            dice = random.random()
            if dice < rate * 0.2:
                continue
            if dice < rate * 0.4:
                found.append(seed)
            if dice < rate * 0.5 and len(found) > 1:
                k = random.randrange(len(found))
                found[k], seed = seed, found[k]
            if random.random() < rate * 0.3:
                found.append(
                    self.noise()
                    if random.random() < 0.2
                    else self.seed(random.choice(self.by_kind[random.choice(sorted(self.by_kind))]))
                )
            found.append(self.seed(seed) if dice < rate and isinstance(seed, Seed) else seed)
        if calm and found:
            k = random.randrange(len(found))
            found[k] = self.seed(found[k])
        return renumbered(found) if random.random() < 0.7 else found


def operators(pool: list[Seed]) -> set[str]:
    """Return the names in the templates of recorded messages that are safe with any arguments."""
    found = set()
    for seed in pool:
        for message in (seed.message, *seed.payloads):
            for template in getattr(message, "templates", ()):
                found.add(template[1])
    return {name for name in found if not any(word in name for word in UNSAFE)}


def restrained(message: Any, mutator: Mutator) -> Any:
    """Return a message whose templates name operators that may be called with anything."""
    if not isinstance(getattr(message, "templates", None), list):
        return message
    templates = []
    for row in message.templates:
        if (
            isinstance(row, list)
            and len(row) > 1
            and isinstance(row[1], str)
            and row[1] not in mutator.operators
        ):
            row = [row[0], mutator.random.choice(mutator.operators), *row[2:]]
        templates.append(row)
    return replace(message, templates=templates)


def renumbered(seeds: list[Any]) -> list[Any]:
    """Return messages whose segments are numbered as a master would, so that more is wrong with them than
    that.
    """
    seq = start = 0
    found: list[Any] = []
    for seed in seeds:
        message = getattr(seed, "message", None)
        if isinstance(message, Hello):
            seq = start = 0
        if isinstance(message, Segment):
            seq += 1
            seed = Seed(replace(message, seq=seq, start=start), seed.payloads)
            start += len(message.words) if isinstance(message.words, list) else 0
        elif isinstance(message, MeshSegment):
            seq += 1
            seed = Seed(MeshSegment(seq), seed.payloads)
        found.append(seed)
    return found
