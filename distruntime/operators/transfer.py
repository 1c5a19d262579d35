"""Bytes between the master and a place: uploads and reads.

Copies between nodes do not pass through here: see copies.py of the collectives.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..errors import InternalError, ProtocolError
from ..log.handle import UNNUMBERED, Handle, Residence, new_value
from ..log.issue import issue, issue_bytes, issue_shared, settle
from ..log.line import user_line
from ..log.log import relieve
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..log.shards import member_of, mesh_of
from ..log.spec import Spec, spec_of
from ..log.storage import HeldStorage, Storage, require_writable
from ..log.tape import not_in_a_program, note_value_read, recorded
from ..session.fetching import ask_value
from ..session.requests import Request
from ..session.session import Session, session_of_log
from ..session.stalls import before_wait, note_wait
from ..wire.codec import Buffer, bytes_tensor, dtype_name, tensor_bytes, unpack_constant
from ..wire.descriptors import are_out, used_up
from ..wire.link import LARGE, Delivery
from ..wire.messages import HOST, UPLOAD, Plain
from ..wire.shared import LEAST, Loan

# Up to so many bytes an upload rides in the log itself. A larger one has a payload frame without a copy.
INLINE_BYTES = 1 << 14
# A larger reply comes in parts, or through shared memory.
PART_BYTES = 1 << 19
_SMALL = nullcontext(None)
# So many bytes are copied into shared memory at once: a tenth of a second in fresh pages.
_COPIED = 64 << 20


def upload(
    tensor: torch.Tensor,
    place: Residence,
    *,
    into: Handle | None = None,
    non_blocking: bool = False,
    stay_on_cpu: bool = False,
) -> Handle:
    """Send a local CPU tensor to `place`, as a new value or as the new value of `into`.

    Return when the memory may be written again.

    With `non_blocking` return at once: then the memory must stay as it is until the copy has run.
    `stay_on_cpu` is for the few operators that read an operand on the CPU whatever the device (lengths of
    sequences, seeds): the bytes go to the node, not to its GPU.
    """
    node = place.node
    session = session_of_log(node)
    session.require_open()
    node.require_alive()
    if recorded.name and not tensor.numel() and (into is not None or place.number != UNNUMBERED):
        # There is no data. Libraries begin a cache so.
        empty: Any = None if into else torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
        return into or empty._handle
    if recorded.name and not recorded.lenient:
        raise not_in_a_program(
            "hold data of this process, as each replay would send the same",
            "send it before, and pass it as an argument",
        )
    if into is not None:
        require_writable([into.storage], user_line())
    if node.members:
        return _replicate(tensor, place, into, stay_on_cpu)
    if into is None:
        contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
        spec = spec_of(contiguous)
        handle = new_value(spec, place)
    else:
        contiguous, handle = tensor.detach().contiguous(), into
    data = tensor_bytes(contiguous, lasting=non_blocking)
    head = [
        UPLOAD,
        handle.ref,
        "cpu" if stay_on_cpu else place.place.local_device,
        dtype_name(contiguous.dtype),
        list(contiguous.shape),
    ]
    _send(head, data, [handle], into is not None, place, non_blocking)
    return handle


def _send(
    head: Sequence[object],
    data: memoryview,
    target: list[Handle],
    written: bool,
    place: Residence,
    non_blocking: bool,
) -> None:
    """Issue an upload: in shared memory, in the words, or as bytes behind them.

    The handle in `target` is of a value that is `written` or made. See `upload`.
    """
    node, session, line = place.node, session_of_log(place.node), user_line()
    loan = session.shared.take(len(data)) if place.worker.shared and len(data) >= LEAST else None
    sent = None
    fresh, changed = ([], target) if written else (target, [])
    # A person may wait for a large one, and is shown how far it is.
    with session.requests.announcer.uploads.moving(len(data)) if len(data) >= LARGE else _SMALL as move:
        why = "an upload" if move is not None and not node.busy else "a full window"
        if loan is not None:
            for start in range(0, len(data), _COPIED):
                # The pump shows how far it is between two pieces, and Ctrl-C strikes there.
                piece = data[start : start + _COPIED]
                loan.memory[start : start + len(piece)] = piece
                if move is not None:
                    move.copied = start + len(piece)
            issue_shared([*head, [loan.name, len(data)]], loan.give, fresh, changed, place, line)
        elif len(data) <= INLINE_BYTES:
            issue([*head, bytes(data)], fresh, changed, [h.storage for h in changed], place, line)
        else:
            lasts = non_blocking or len(data) >= LARGE
            sent = issue_bytes(head, data if lasts else bytes(data), fresh, changed, place, line)
            if move is not None:
                move.delivery = sent
            if not lasts or non_blocking:
                sent = None
        # The bytes come first: the window opens when the worker has them and has run the upload.
        if sent is not None:
            _settle(session, place.worker, sent)
        relieve(node, why)


def _settle(session: Session, node: Node, sent: Delivery) -> None:
    """Block until the memory of a message may be written again.

    The message has arrived then, or has been copied because of Ctrl-C or a cut.
    """
    # Another thread may be the reader, and need the lock to go on.
    if session.inside():
        sent.copy_frames()
        return
    try:
        session.requests.wait(lambda: sent.done or node.failed is not None, session.receiver.read, None, node)
    except BaseException:
        sent.copy_frames()
        raise


def upload_small(target: Any, source: object, non_blocking: bool = False) -> bool:
    """Send a local tensor of some KiB as the new value of a proxy that is as large and has its own memory.

    Return False, and do nothing, where there is more to it than one instruction to a worker with one stream.
    """
    if type(source) is not torch.Tensor or source.dtype != target.dtype or source.shape != target.shape:
        return False
    handle = target._handle
    place = handle.place
    node, nbytes = place.node, source.nbytes
    if (
        nbytes > INLINE_BYTES
        or node.order is not None
        or node.members
        or recorded.name
        or not source.is_cpu
        or not source.is_contiguous()
        or source.is_neg()
        or source.is_conj()
        or type(handle.storage) is not Storage
        or not owns_whole(target)
        or not place.cache
    ):
        return False
    # Libraries begin a cache so, and there is nothing to send.
    if nbytes:
        # `tensor_bytes` takes 9 us more. numpy would keep the tensor from being resized.
        data = ctypes.string_at(source.data_ptr(), nbytes)
        relieve(node)
        words = [
            UPLOAD,
            handle.ref,
            place.place.local_device,
            dtype_name(source.dtype),
            [*source.shape],
            data,
        ]
        issue(words, (), (), (handle.storage,), place, user_line())
    return True


def owns_whole(proxy: Any) -> bool:
    """Whether nobody else sees a proxy's storage, so that its slot may take a new tensor."""
    handle = proxy._handle
    # An object of the worker's may hold the memory, too.
    if isinstance(handle.storage, HeldStorage):
        return False
    # A mesh's tensor and its members' tensors are one memory.
    if handle.storage.parts or handle.storage.whole:
        return False
    # The storage has one handle, so its references are the handle's slot and getrefcount's argument.
    return (
        handle.spec.bits == 0
        and handle.spec.offset == 0
        and proxy.is_contiguous()
        and sys.getrefcount(handle.storage) == 2
    )


def _replicate(
    tensor: torch.Tensor, home: Residence, into: Handle | None, stay_on_cpu: bool = False
) -> Handle:
    """Send a local tensor to every member of a mesh, as a new value or as the new value of `into`."""
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = tensor_bytes(contiguous)
    if len(data) > INLINE_BYTES:
        places = [mesh_log.session.places.residence(place, numbered=False) for place in mesh_log.members]
        shards = [upload(contiguous, place, stay_on_cpu=stay_on_cpu) for place in places]
        return mesh_of(mesh_log, home, shards, into)
    spec = spec_of(contiguous)
    handle = new_value(spec, home) if into is None else into
    where = "cpu" if stay_on_cpu else "member"
    head = [UPLOAD, handle.ref, where, dtype_name(contiguous.dtype), list(contiguous.shape), bytes(data)]
    fresh, written = ([handle], []) if into is None else ([], [handle])
    issue(head, fresh, written, [h.storage for h in written], home, user_line())
    relieve(mesh_log)
    return handle


def ready(handle: Handle) -> list[int]:
    """Return [stream, position, ...]: where a value is what a read issued now must see."""
    node = handle.place.worker
    if node.meshes:
        with node.lock:
            node.follow_meshes(user_line())
            settle(node)
            if node.order is not None:
                found: list[int] = node.order.ready(handle, meshed=True)
                return found
    if node.order is None and not node.in_doubt:
        return [0, max(handle.ready_at, node.checked)]
    with node.lock:
        settle(node)
        if node.order is None:
            return [0, max(handle.ready_at, node.checked)]
        after: list[int] = node.order.ready(handle)
        return after


def _on_host(handle: Handle) -> Handle:
    """Issue a copy of a GPU's value to the memory of its node: a read like any other, in the order of the
    current stream.
    """
    copy, node = new_value(handle.spec, handle.place), handle.place.worker
    with node.lock:
        settle(node)
        # A mesh's log has other positions.
        if node.meshes:
            made: list[int] = []
        else:
            made = [0, max(handle.ready_at, node.checked)] if node.order is None else node.order.made(handle)
        issue([HOST, handle.ref, copy.ref, made], [copy], [handle], (), handle.place, user_line())
    return copy


def request(handle: Handle, form: str, options: dict[str, Plain] | None = None) -> Request[object]:
    """Ask for a value as it is after everything issued so far. Return at once."""
    if recorded.name:
        raise not_in_a_program(
            "read a value, as it is replayed without Python",
            "return the tensor, and read it outside; torch.where chooses on the worker",
        )
    note_value_read()
    if handle.place.node.members:
        handle = member_of(handle, 0)
    node, nbytes = handle.place.worker, handle.spec.nbytes
    session = session_of_log(node)
    if node.asynchronous and form != "text" and handle.place.place.local_device != "cpu":
        handle = _on_host(handle)
    after = ready(handle)
    if form != "tensor" or nbytes <= PART_BYTES:
        return ask_value(session, node, handle.ref, after, form, options or {})
    loan = session.shared.take(nbytes)
    shared: dict[str, Plain] = {"shared": loan.name} if loan is not None and node.shared else {}
    # Fresh pages come as the parts do. A bytearray of 1.6 GB would be zeroed first, and nothing else would
    # run for a second.
    try:
        room = loan if loan is not None else mmap.mmap(-1, nbytes)
    except OSError as error:
        raise _no_room(nbytes, node.index, error) from error
    return ask_value(session, node, handle.ref, after, form, shared, room)


def _no_room(nbytes: int, node: int, error: OSError) -> MemoryError:
    return MemoryError(
        f"no room here for the {nbytes:,} bytes of a tensor of node {node}: {used_up(error) or error}. The "
        "tensor is still there; read a part of it, or let go of something here"
    )


def _owned(loan: Loan, nbytes: int) -> Buffer | mmap.mmap:
    """Return what a loan has, in memory that its tensor may keep.

    A mapping takes a descriptor, and a copy takes none.
    """
    try:
        return loan.private(nbytes)
    except OSError as error:
        if not are_out(error):
            raise
    return bytearray(memoryview(loan.memory)[:nbytes])


def tensor_from(reply: Request[object], spec: Spec) -> torch.Tensor:
    """Return the tensor that a reply brought.

    It has the strides that torch's own copy to the CPU would give it.
    """
    value: Any = reply.value
    dtype, sizes, data = value
    if data in ("shared", "parts"):
        buffer = reply.buffer
        if buffer is None:
            raise ProtocolError("a worker sent a large value that was not asked for")
        tensor = bytes_tensor(
            dtype, sizes, _owned(buffer, spec.nbytes) if isinstance(buffer, Loan) else buffer
        )
    else:
        # The clone is in memory that can be resized.
        tensor = bytes_tensor(dtype, sizes, reply.payload or b"" if data is None else data).clone()
    if tensor.shape != spec.size or tensor.dtype != spec.dtype:
        raise InternalError(f"a worker sent {tuple(tensor.shape)} {dtype} for {spec}")
    wanted = torch.empty_like(spec.meta()).stride()
    if wanted != tensor.stride():
        tensor = torch.empty_strided(spec.size, wanted, dtype=spec.dtype, device="cpu").copy_(tensor)
    return tensor


def read(handle: Handle, form: str, why: str) -> Request[object]:
    """Block until a value is here; raise the failure that poisoned it."""
    session = session_of_log(handle.place.node)
    session.require_open()
    before_wait(why)
    # The answer may be on its way before this thread gets to wait for it.
    started = time.perf_counter()
    reply = request(handle, form)
    waits = not reply.done
    try:
        session.result(reply)
    finally:
        if waits:
            note_wait(why, started)
    session.raise_for(reply)
    return reply


def download(handle: Handle, why: str = "copy to the master") -> torch.Tensor:
    """Block until a value is here as a local tensor."""
    return tensor_from(read(handle, "tensor", why), handle.spec)


def item(handle: Handle, why: str = "item") -> Any:
    """Block until a one-element value is here as a Python number."""
    value: Any = read(handle, "item", why).value
    return unpack_constant(value) if isinstance(value, list) else value
