"""Small data in the formats that the scripts of list.toml look for. Each function writes some into a folder.

Texts and pictures are drawn from a seed, or come from packages that are installed anyway.
"""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Maker = Callable[[Path], None]
MAKERS: dict[str, Maker] = {}
WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards quietly mix strange potions "
    "in an old tower near the river and nobody ever asks them why"
).split()


def maker(make: Maker) -> Maker:
    MAKERS[make.__name__] = make
    return make


def sentences(number: int, seed: int = 0) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(number):
        yield " ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 12)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# -- texts ------------------------------------------------------------------------------------------------


@maker
def nanogpt_text(folder: Path) -> None:
    """Write train.bin, val.bin and meta.pkl, as nanoGPT's prepare.py does for characters."""
    text = "\n".join(sentences(400))
    letters = sorted(set(text))
    numbers = {letter: k for k, letter in enumerate(letters)}
    ids = np.array([numbers[letter] for letter in text], dtype=np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    ids[: -len(ids) // 10].tofile(folder / "train.bin")
    ids[-len(ids) // 10 :].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": numbers}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


@maker
def wikitext(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt."""
    for seed, (name, number) in enumerate({"train": 150, "valid": 20, "test": 20}.items()):
        write(folder / f"{name}.txt", "\n".join(f" {line} " for line in sentences(number, seed)) + "\n")


@maker
def text(folder: Path) -> None:
    write(folder / "input.txt", "\n".join(sentences(400)))


# -- pictures ---------------------------------------------------------------------------------------------


def pictures(number: int, size: int, channels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of ten classes, each a bright square at a place of its own, and their labels."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, number)
    images = draw.integers(0, 60, (number, size, size, channels))
    side = size // 4
    for image, label in zip(images, labels):
        row, column = divmod(int(label), 4)
        image[row * side : (row + 1) * side, column * side : (column + 1) * side] += 150
    return images.astype(np.uint8), labels.astype(np.uint8)


@maker
def mnist(folder: Path) -> None:
    """Write the four files of MNIST, unpacked, where torchvision's class looks for them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for seed, (name, number) in enumerate({"train": 640, "t10k": 200}.items()):
        images, labels = pictures(number, 28, 1, seed)
        head = struct.pack(">iiii", 0x803, number, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, number) + labels.tobytes())
