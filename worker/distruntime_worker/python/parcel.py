"""A large pickle as one tensor of bytes: `distruntime/python/objects.py` takes it apart."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import torch

from distruntime.wire.codec import ALIGNED, tensor_bytes


def assembled(parts: Sequence[memoryview]) -> torch.Tensor:
    """Return a tensor of 8 bytes for a header's length, the header with each part's length, and the parts.

    Each part begins at a multiple of `ALIGNED`.
    """
    header: bytes = msgpack.packb([part.nbytes for part in parts])
    places, end = [], 8 + len(header)
    for part in parts:
        begin = -(-end // ALIGNED) * ALIGNED
        places.append(begin)
        end = begin + part.nbytes
    whole = torch.empty(end, dtype=torch.uint8)
    room = tensor_bytes(whole)
    room[:8] = len(header).to_bytes(8, "little")
    room[8 : 8 + len(header)] = header
    for begin, part in zip(places, parts):
        if part.nbytes:
            room[begin : begin + part.nbytes] = part.cast("B")
    return whole
