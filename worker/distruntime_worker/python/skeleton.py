"""The arguments of a call as they come: a pickle, with a number in the place of each operand.

Invariant: nothing is unpickled that has not come from a master with the key. See `Calls`.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgpack
import numpy
import torch

from distruntime.errors import ProtocolError, UsageError
from distruntime.wire.codec import OPERAND_CODE

# Msgpack's first byte of a list of two. A pickle begins with another.
_PLAIN = b"\x92"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, operands: Sequence[object], device: Real) -> None:
        super().__init__(file)
        self._operands, self._device = operands, device

    def persistent_load(self, number: object) -> object:
        """Return the operand of a number, or the device of a name."""
        if isinstance(number, str) and number.startswith("device "):
            return self._device(torch.device(number.removeprefix("device ")))
        match number:
            case ("array", int(k), str(dtype), tuple(shape)):
                tensor = self.persistent_load(k)
                assert isinstance(tensor, torch.Tensor)
                return tensor.numpy().view(numpy.dtype(dtype)).reshape(shape)
        if not isinstance(number, int) or not 0 <= number < len(self._operands):
            raise ProtocolError(f"an operand {number!r:.40} that did not come")
        return self._operands[number]


# It returns the device that a worker's name of one stands for.
Real = Callable[[torch.device], torch.device]


def load(pickled: bytes, operands: Sequence[object], device: Real) -> object:
    """Return what was pickled, with its operands; raise `UsageError` that names a module that is missing."""
    try:
        return _Unpickler(io.BytesIO(pickled), operands, device).load()
    except ModuleNotFoundError as error:
        raise UsageError(missing(error)) from error
    except AttributeError as error:
        raise UsageError(
            f"the code on this worker is another version than yours: {error}. dr.workers.ship(module) "
            "sends yours"
        ) from error


def load_code(pickled: bytes, device: Real) -> object:
    """Return a function, or any other object, that has come with the text of its files."""
    match load(pickled, (), device):
        case (value, dict(sources)):
            pass
        case _:
            raise ProtocolError("code that came is no pair")
    for name, text in sources.items():
        # A traceback shows these lines, whether this machine has the file or not.
        if not os.path.exists(name):
            linecache.cache[name] = len(text), None, text.splitlines(True), name
    return value


def missing(error: ModuleNotFoundError) -> str:
    """Return what to do about a module that this worker does not have."""
    return (
        f"the module {error.name!r} is not installed on this worker: install it there, or send it, "
        f'dr.workers.ship("{(error.name or "").partition(".")[0]}")'
    )


def arguments(
    pickled: bytes, operands: Sequence[object], device: Real
) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the arguments of a call. Nothing pickled means that they are its operands, in order."""
    if not pickled:
        return operands, {}
    if pickled[:1] == _PLAIN:
        found: object = msgpack.unpackb(pickled, ext_hook=partial(_operand, operands), strict_map_key=False)
    else:
        found = load(pickled, operands, device)
    match found:
        case (args, dict(kwargs)) if isinstance(args, (tuple, list)):
            return args, kwargs
    raise ProtocolError("the arguments of a call are no pair")


def _operand(operands: Sequence[object], code: int, number: bytes) -> object:
    k = int.from_bytes(number, "big")
    if code != OPERAND_CODE or k >= len(operands):
        raise ProtocolError(f"an operand {number!r:.40} that did not come")
    return operands[k]
