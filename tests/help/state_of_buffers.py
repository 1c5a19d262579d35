"""Kinds of state: what lies in C, as arrays of numpy, buffers, values of a thread, and random generators."""

from __future__ import annotations

import array
import asyncio
import contextvars
import ctypes
import decimal
import io
import logging
import mmap
import queue
import random
import struct
import threading
from typing import Any

import numpy as np
import torch

from state_kinds import Here, Holder, State, even, kind

# -- buffers -------------------------------------------------------------------------------------------------


@kind()
def array_of_python(here: Here) -> State:
    values = array.array("d", [1.0, 1.0])
    return (lambda: values[0]), (lambda k: values.__setitem__(0, float(k)))


@kind()
def byte_array(here: Here) -> State:
    values = bytearray(b"\1\1")
    return (lambda: values[0]), (lambda k: values.__setitem__(0, k))


@kind()
def memory_view(here: Here) -> State:
    values = bytearray(b"\1\1")
    view = memoryview(values)
    return (lambda: view[0]), (lambda k: values.__setitem__(0, k))


@kind()
def unpacked_bytes(here: Here) -> State:
    values = bytearray(struct.pack("<d", 1.0))
    return (lambda: struct.unpack_from("<d", values)[0]), (
        lambda k: struct.pack_into("<d", values, 0, float(k))
    )


@kind("guarded or recorded", "c_double")
def array_of_ctypes(here: Here) -> State:
    values = (ctypes.c_double * 2)(1.0, 1.0)
    return (lambda: values[0]), (lambda k: values.__setitem__(0, float(k)))


@kind("guarded or recorded", "Point")
def structure_of_ctypes(here: Here) -> State:
    class Point(ctypes.Structure):
        _fields_ = (("x", ctypes.c_double),)

    point = Point(1.0)
    return (lambda: point.x), (lambda k: setattr(point, "x", float(k)))


@kind("guarded or recorded", "mmap")
def mapped_memory(here: Here) -> State:
    memory = here.enter_context(mmap.mmap(-1, 16))
    memory[0] = 1
    return (lambda: memory[0]), (lambda k: memory.__setitem__(0, k))


@kind("guarded or recorded", "BytesIO|getvalue")
def bytes_in_memory(here: Here) -> State:
    stream = io.BytesIO(b"\1")

    def change(k: int) -> None:
        stream.seek(0)
        stream.write(bytes([k]))

    return (lambda: stream.getvalue()[0]), change


@kind("recorded or refused", "StringIO|read")
def text_in_memory_that_is_read(here: Here) -> State:
    stream = io.StringIO("".join(str(k % 7) for k in range(99)))
    return (lambda: int(stream.read(1))), (lambda k: stream.read(1))


# -- numpy ---------------------------------------------------------------------------------------------------


@kind()
def numpy_in_place(here: Here) -> State:
    values = np.ones(2)
    return (lambda: float(values[0])), (lambda k: values.__setitem__(0, k))


@kind()
def numpy_sum(here: Here) -> State:
    values = np.ones(2)
    return (lambda: values.sum().item()), (lambda k: values.__setitem__(0, k))


@kind()
def numpy_view(here: Here) -> State:
    values = np.ones(4)
    view = values[1:]
    return (lambda: float(view.sum())), (lambda k: values.__setitem__(2, k))


@kind()
def numpy_strided_view(here: Here) -> State:
    values = np.ones((4, 4))
    view = values.T[::2, ::-1]
    return (lambda: float(view.sum())), (lambda k: values.__setitem__((3, 2), k))


@kind()
def numpy_structured(here: Here) -> State:
    values = np.ones(2, dtype=[("a", "f8"), ("b", "i4")])
    return (lambda: float(values[0]["a"])), (lambda k: values["a"].__setitem__(0, k))


@kind("guarded or recorded", "ndarray")
def numpy_of_objects(here: Here) -> State:
    values = np.array([1.0, [1.0]], dtype=object)
    return (lambda: values[1][0]), (lambda k: values[1].__setitem__(0, float(k)))


@kind()
def numpy_without_dimensions(here: Here) -> State:
    values = np.array(1.0)
    return (lambda: float(values)), (lambda k: values.fill(k))


@kind("guarded or recorded", "ndarray")
def numpy_large(here: Here) -> State:
    values = np.zeros(1 << 17)
    return (lambda: float(values.sum()) + 1), (lambda k: values.__setitem__(70_000, k))


@kind()
def numpy_shape(here: Here) -> State:
    values = np.ones((2, 3))

    def change(k: int) -> None:
        values.resize((3, 2) if even(k) else (2, 3), refcheck=False)

    return (lambda: values.shape[0]), change


@kind()
def numpy_scalar_swapped(here: Here) -> State:
    box = Holder(np.float64(1))
    return (lambda: float(box.v)), (lambda k: setattr(box, "v", np.float64(k)))


@kind()
def numpy_dtype_swapped(here: Here) -> State:
    box = Holder(np.dtype("f4"))
    return (lambda: box.v.itemsize), (lambda k: setattr(box, "v", np.dtype("f8" if even(k) else "f2")))


@kind()
def numpy_array_swapped(here: Here) -> State:
    box = Holder(np.ones(2))
    return (lambda: float(box.v[0])), (lambda k: setattr(box, "v", np.full(2, k)))


@kind("guarded or recorded", "[Mm]ask|ndarray")
def numpy_masked(here: Here) -> State:
    values: Any = np.ma.masked_array([1.0, 2.0], mask=[False, False])
    return (lambda: float(values.sum())), (lambda k: values.__setitem__(0, np.ma.masked if even(k) else k))


# -- tensors of this process ---------------------------------------------------------------------------------


@kind()
def local_tensor_in_place(here: Here) -> State:
    values = torch.ones(2)
    return (lambda: values[0].item()), (lambda k: values.fill_(k))


@kind()
def local_tensor_that_numpy_wrote(here: Here) -> State:
    values = torch.ones(2)
    return (lambda: values[0].item()), (lambda k: values.numpy().__setitem__(0, k))


@kind()
def local_tensor_over_an_array(here: Here) -> State:
    values = np.ones(2)
    tensor = torch.from_numpy(values)
    return (lambda: float(tensor.sum())), (lambda k: values.__setitem__(0, k))


@kind()
def local_tensor_written_by_its_data(here: Here) -> State:
    values = torch.ones(2)
    return (lambda: values.tolist()[0]), (lambda k: values.data.fill_(k))


@kind()
def local_tensor_given_other_data(here: Here) -> State:
    values = torch.ones(2)
    return (lambda: values[0].item()), (lambda k: setattr(values, "data", torch.full((2,), float(k))))


@kind()
def local_tensor_written_through_its_storage(here: Here) -> State:
    values = torch.ones(2, dtype=torch.uint8)
    storage = values.untyped_storage()
    return (lambda: values[0].item()), (lambda k: storage.__setitem__(0, k))


@kind()
def local_tensor_swapped(here: Here) -> State:
    box = Holder(torch.ones(2))
    return (lambda: box.v[0].item()), (lambda k: setattr(box, "v", torch.full((2,), float(k))))


@kind()
def local_tensor_that_decides(here: Here) -> State:
    flag = torch.zeros((), dtype=torch.bool)
    return (lambda: 2.0 if flag else 1.0), (lambda k: flag.fill_(even(k)))


@kind("refused", "data of this process", acts=True)
def local_tensor_that_is_sent(here: Here) -> State:
    values = torch.ones(2, dtype=torch.float64)
    return (lambda x: x * values.to(here.device)), (lambda k: values.fill_(k))


@kind("refused", "data of this process", acts=True)
def local_array_that_is_sent(here: Here) -> State:
    values = np.ones(2)
    return (lambda x: x * torch.from_numpy(values).to(here.device)), (lambda k: values.fill(k))


# -- threads, tasks, logs ------------------------------------------------------------------------------------


@kind()
def value_of_a_thread(here: Here) -> State:
    own = threading.local()
    own.v = 1.0
    return (lambda: own.v), (lambda k: setattr(own, "v", float(k)))


@kind()
def context_variable(here: Here) -> State:
    variable = contextvars.ContextVar("variable", default=1.0)
    return (lambda: variable.get()), (lambda k: variable.set(float(k)))


@kind()
def context_variable_without_a_value(here: Here) -> State:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    return (lambda: variable.get(1.0)), (lambda k: variable.set(float(k)))


@kind()
def context_variable_that_has_raised(here: Here) -> State:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")

    def read() -> float:
        try:
            return variable.get()
        except LookupError:
            return 1.0

    return read, (lambda k: variable.set(float(k)))


@kind()
def list_in_a_context_variable(here: Here) -> State:
    values = [1.0]
    variable = contextvars.ContextVar("variable", default=values)
    return (lambda: variable.get()[0]), (lambda k: values.__setitem__(0, float(k)))


@kind("guarded or recorded", "Event|is_set")
def event_of_threads(here: Here) -> State:
    event = threading.Event()
    return (lambda: 2.0 if event.is_set() else 1.0), (lambda k: event.set() if even(k) else event.clear())


@kind("guarded or recorded", "lock")
def lock_of_threads(here: Here) -> State:
    lock = threading.Lock()

    def change(k: int) -> None:
        if even(k) != lock.locked():
            lock.acquire() if even(k) else lock.release()

    return (lambda: 2.0 if lock.locked() else 1.0), change


# In Python 3.14 what the queue's lock gives is named.
@kind("guarded or recorded", r"[Qq]ueue|\b_thread\.lock\b")
def queue_of_threads(here: Here) -> State:
    items: queue.Queue[float] = queue.Queue()
    return (lambda: items.qsize() + 1), (lambda k: items.put(1.0))


@kind("guarded or recorded", "Future")
def future_of_tasks(here: Here) -> State:
    loop = asyncio.new_event_loop()
    here.callback(loop.close)
    future = loop.create_future()

    def change(k: int) -> None:
        if not future.done():
            future.set_result(float(k))

    return (lambda: future.result() if future.done() else 1.0), change


@kind("guarded or recorded", "[Ll]ogg|isEnabledFor")
def level_of_a_logger(here: Here) -> State:
    logger = logging.getLogger("state.of.a.program")
    here.callback(logger.setLevel, logging.NOTSET)
    logger.setLevel(logging.ERROR)

    def change(k: int) -> None:
        logger.setLevel(logging.DEBUG if even(k) else logging.ERROR)

    return (lambda: 2.0 if logger.isEnabledFor(logging.INFO) else 1.0), change


@kind("guarded or recorded", "[Dd]ecimal")
def precision_of_decimals(here: Here) -> State:
    here.enter_context(decimal.localcontext())
    decimal.getcontext().prec = 1

    def change(k: int) -> None:
        decimal.getcontext().prec = k

    return (lambda: len(str(decimal.Decimal(1) / decimal.Decimal(3)))), change


# -- generators of random numbers ----------------------------------------------------------------------------


@kind("recorded or refused", "random numbers")
def draws_of_python(here: Here) -> State:
    random.seed(1)
    return (lambda: random.random()), (lambda k: random.seed(k))


@kind("recorded or refused", "random numbers")
def draws_of_a_generator_of_python(here: Here) -> State:
    generator = random.Random(1)
    return (lambda: generator.random()), (lambda k: generator.seed(k))


@kind("recorded or refused", "random numbers")
def draws_of_numpy(here: Here) -> State:
    np.random.seed(1)
    return (lambda: float(np.random.rand())), (lambda k: np.random.seed(k))


@kind("recorded or refused", "random numbers")
def draws_of_a_generator_of_numpy(here: Here) -> State:
    generator = np.random.default_rng(1)
    return (lambda: float(generator.random())), (lambda k: generator.random())


@kind("recorded or refused", "random numbers")
def draws_of_torch(here: Here) -> State:
    torch.default_generator.manual_seed(1)
    return (lambda: torch.rand(1).item()), (lambda k: torch.default_generator.manual_seed(k))


@kind("recorded or refused", "random numbers")
def draws_of_a_generator_of_torch(here: Here) -> State:
    generator = torch.Generator().manual_seed(1)
    return (lambda: torch.rand(1, generator=generator).item()), (lambda k: generator.manual_seed(k))


@kind("recorded or refused", "random numbers")
def draws_that_are_put_back(here: Here) -> State:
    """The generator's state is as before when the call ends."""
    random.seed(1)

    def read() -> float:
        state = random.getstate()
        found = random.random()
        random.setstate(state)
        return found

    return read, (lambda k: random.seed(k))


@kind("guarded or recorded or refused", "seed")
def seed_that_is_read(here: Here) -> State:
    torch.default_generator.manual_seed(1)
    return (lambda: torch.initial_seed()), (lambda k: torch.default_generator.manual_seed(k))
