"""Collectives and copies between workers as instructions: one covers all of a group's members on this worker.

Template: "group::all_reduce", [group, options, [[rank, device, inputs, outputs], ...]], each input and output
[dtype, sizes, strides]. Instruction: template, sequence, then the refs of inputs and outputs, member by
member. Outputs are new values, or, with the option "inplace", tensors that are written. Members whose input
is poisoned take part all the same, with zeros, so that nobody hangs; the others are told first, so that
nobody takes the zeros for values.

What an operation does with its inputs and outputs, each list laid out flat, one tensor after the other:

    copy         the root's input becomes the other one's output          send, receive
    broadcast    the root's input becomes every output                    broadcast
    all_reduce   the inputs reduced, in every output                      all_reduce
    reduce       the same, where there is an output                       reduce
    all_gather   the inputs one after the other, in every output          all_gather
    gather       the same, at the root                                    gather
    scatter      the root's input cut up, one part in every output        scatter
    reduce_scatter  the inputs reduced and cut up                         reduce_scatter
    all_to_all   part k of an input goes to member k                      all_to_all
    barrier      nothing                                                  barrier
    close        the group ends                                           close
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.codec import dtype_named
from distruntime.wire.data_channel import DataChannel, Reduction, Unfinished
from distruntime.wire.messages import Plain

from ..values.step import Run, Slots, Step, Words, int_word, list_word, real_word, text_word
from .group import Act, Group, Tensors

PREFIX = "group::"
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class OperandSpec:
    """What a value will look like, known before there is one."""

    dtype: torch.dtype
    sizes: list[int]
    strides: list[int] | None
    device: torch.device

    def empty(self) -> torch.Tensor:
        """Return memory for it."""
        if self.strides is None:
            return torch.empty(self.sizes, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        """Return zeros in its stead."""
        return torch.zeros(self.sizes, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Options:
    """The constants of an operation."""

    root: int = -1
    op: Reduction | None = None
    inplace: bool = False
    # These are the bytes per rank of all_to_all, in and out.
    splits: tuple[list[list[int]], list[list[int]]] = ([], [])


class TakePart(Protocol):
    """Has a session's members take part in an operation: see taking_part.py."""

    def __call__(
        self,
        collective: Collective,
        slots: Slots,
        p: Words,
        i: int,
        error: BaseException | None = None,
        at: tuple[Words, int] | None = None,
    ) -> int: ...


class Collective(Step):
    """One compiled template of an operation of a group."""

    joint = True

    def __init__(
        self,
        name: str,
        args: list[Plain],
        device: Callable[[torch.device], torch.device],
        take_part: TakePart,
    ) -> None:
        self.operation = name.removeprefix(PREFIX)
        try:
            group, options, members = args
            self.group = int_word(group)
            root, op, factor, inplace, inputs, outputs = list_word(options)
            reduction = None if op is None else Reduction(text_word(op), real_word(factor))
            splits = _rows(inputs), _rows(outputs)
            self.options = Options(int_word(root), reduction, bool(inplace), splits)
            self.members: list[tuple[int, list[OperandSpec], list[OperandSpec]]] = []
            self.member_devices: list[torch.device] = []
            for member in list_word(members):
                number, where, came, go = list_word(member)
                here = device(torch.device(text_word(where)))
                self.members.append((int_word(number), _specs(came, here), _specs(go, here)))
                self.member_devices.append(here)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"{name} makes no sense: {error}") from error
        self.name = f"{self.operation} of group {self.group}"
        offset = 2
        self.reads: list[int] = []
        written: list[int] = []
        for rank, ins, outs in self.members:
            # Along a mesh every member has an input, of which the root's counts: another's may be poisoned.
            if self.operation not in ("broadcast", "scatter") or rank == self.options.root:
                self.reads += range(offset, offset + len(ins))
            written += range(offset + len(ins), offset + len(ins) + len(outs))
            offset += len(ins) + len(outs)
        self.mutates, self.writes = (written, []) if self.options.inplace else ([], written)
        self.length = offset
        self._specs = [spec for _, ins, outs in self.members for spec in (*ins, *outs)]
        self._way = self._find_way()
        self._take_part = take_part
        # This goes straight to where the session takes part: an instruction goes through no method of this
        # class before.
        self.run: Run = partial(take_part, self)

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """As `run`, for an instruction that was dropped.

        Its results are poisoned, here and at the other members.
        """
        return self._take_part(self, slots, p, i, error)

    def perform(self, group: Group, values: list[object], sequence: int) -> tuple[Tensors, list[Unfinished]]:
        """Take part for all own members.

        `values` are the operands in the order of the words. Return the new values, and the calls of the data
        channel whose bytes may not have moved yet.
        """
        new: Tensors = []
        # This is the commonest, and small ones come by the thousand.
        if len(values) == 2 and self.options.inplace and len(self.members) == 1:
            rank, ins, outs = self.members[0]
            both = [_tensor(value, spec) for value, spec in zip(values, self._specs)]
            return new, group.run(rank, self._way, both[: len(ins)], both[len(ins) :], sequence)
        jobs: dict[int, tuple[Tensors, Tensors]] = {}
        words = iter(values)
        for rank, ins, outs in self.members:
            inputs = [_tensor(next(words), spec) for spec in ins]
            if self.options.inplace:
                outputs = [_tensor(next(words), spec) for spec in outs]
            else:
                outputs = [spec.empty() for spec in outs]
                for _ in outs:
                    next(words)
                new += outputs
            jobs[rank] = inputs, outputs
        return new, group.run_all(self._way, jobs, sequence)

    def _find_way(self) -> Act:
        """Return what each own member does. Sizes are equal, so all members of the group do the same."""
        if self.operation != "all_to_all" and not any(math.prod(spec.sizes) for spec in self._specs):
            return self._pass
        if self.options.op is None:
            return self._move
        reduce = self._reduce_scatter if self.operation == "reduce_scatter" else self._reduce
        return partial(reduce, self.options.op)

    def _move(
        self, channel: DataChannel, rank: int, inputs: Tensors, outputs: Tensors, sequence: int
    ) -> Unfinished | None:
        root, on = self.options.root, channel.capabilities.devices
        data = _flat(inputs, on) if inputs else None
        into = _Landing(outputs, on)
        call: Unfinished | None
        match self.operation:
            case "copy":
                if data is not None:
                    call = channel.send(data, 1 - rank, sequence)
                else:
                    call = channel.receive(into.data, 1 - rank, sequence)
            case "broadcast":
                if data is None or rank != root:
                    call = channel.broadcast(into.data, root)
                else:
                    call = channel.broadcast(data, root)
                    into.fill(data)
            case "all_gather":
                assert data is not None
                call = channel.all_gather(into.data, data)
            case "gather":
                assert data is not None
                call = channel.gather(into.data if outputs else None, data, root)
            case "scatter":
                call = channel.scatter(into.data, data if rank == root else None, root)
            case "all_to_all":
                assert data is not None
                # In the same memory, parts would arrive over what has yet to leave.
                if data.untyped_storage()._cdata == into.data.untyped_storage()._cdata:
                    data = data.clone()
                sent, received = self.options.splits
                call = channel.all_to_all(into.data, data, received[rank], sent[rank])
            case other:
                raise ProtocolError(f"there is no operation {other[:40]!r} of groups")
        into.land()
        return call

    def _pass(
        self, channel: DataChannel, rank: int, inputs: Tensors, outputs: Tensors, sequence: int
    ) -> Unfinished | None:
        """Wait for the other members where no bytes move.

        One that is poisoned tells them before it comes here.
        """
        if self.operation == "copy":
            here = (inputs or outputs)[0].device
            token = torch.zeros(
                1, dtype=torch.uint8, device=here if here.type in channel.capabilities.devices else "cpu"
            )
            if inputs:
                return channel.send(token, 1 - rank, sequence)
            return channel.receive(token, 1 - rank, sequence)
        if self.operation == "barrier" or "barrier" in channel.capabilities.operations:
            return channel.barrier()
        return None

    def _reduce_scatter(
        self, op: Reduction, channel: DataChannel, rank: int, inputs: Tensors, outputs: Tensors, sequence: int
    ) -> Unfinished | None:
        on = channel.capabilities.devices
        landing = _Landing(outputs, on, numbers=True)
        call = channel.reduce_scatter(landing.data, _flat(inputs, on, numbers=True), op)
        landing.land()
        return call

    def _reduce(
        self, op: Reduction, channel: DataChannel, rank: int, inputs: Tensors, outputs: Tensors, sequence: int
    ) -> Unfinished | None:
        on = channel.capabilities.devices
        # In place where it may be: the memory of an output that is the input, or where there is none, of a
        # copy.
        if outputs and outputs[0] is inputs[0]:
            tensor = outputs[0]
            plain = (
                tensor.is_contiguous()
                and tensor.device.type in on
                and not tensor.is_complex()
                and not tensor.is_neg()
            )
            if plain and self.operation == "all_reduce":
                return channel.all_reduce(tensor, op)
            landing = _Landing(outputs, on, numbers=True, keep=True)
        else:
            landing = _Landing(outputs if outputs else [torch.empty_like(inputs[0])], on, numbers=True)
            landing.fill(_flat(inputs, on, numbers=True))
        if self.operation == "all_reduce":
            call = channel.all_reduce(landing.data, op)
        else:
            call = channel.reduce(landing.data, self.options.root, op)
        landing.land()
        return call


class _Landing:
    """Where the bytes of some tensors arrive.

    Their own memory if that is flat and where the channel takes it, else a buffer.
    """

    def __init__(
        self, tensors: Tensors, on: frozenset[str], numbers: bool = False, keep: bool = False
    ) -> None:
        self._tensors = tensors
        self._direct = len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].device.type in on
        self._direct = self._direct and not tensors[0].is_conj() and not tensors[0].is_neg()
        if not tensors:
            self.data = torch.empty(0, dtype=torch.uint8)
        elif self._direct:
            self.data = _plain(tensors[0], numbers)
        elif keep:
            self.data = _flat(tensors, on, numbers).clone()
        else:
            count = sum(t.numel() for t in tensors)
            device = tensors[0].device if tensors[0].device.type in on else torch.device("cpu")
            self.data = _plain(torch.empty(count, dtype=tensors[0].dtype, device=device), numbers)

    def fill(self, data: torch.Tensor) -> None:
        if self._tensors:
            self.data.copy_(data)

    def land(self) -> None:
        """Copy out of the buffer, if there is one."""
        if self._direct or not self._tensors:
            return
        whole = self.data
        if whole.dtype != self._tensors[0].dtype:
            whole = whole.view(self._tensors[0].dtype)
        for tensor, part in zip(self._tensors, whole.split([t.numel() for t in self._tensors])):
            tensor.copy_(part.view(tensor.shape))


def _plain(tensor: torch.Tensor, numbers: bool) -> torch.Tensor:
    """Return a contiguous tensor's memory as one dimension: of bytes, or of the real numbers in it."""
    # `view(-1)` would not do: a dimension of size 1 keeps whatever stride it had.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(_REAL.get(flat.dtype, flat.dtype) if numbers else torch.uint8)


def _flat(tensors: Tensors, on: frozenset[str], numbers: bool = False) -> torch.Tensor:
    """Return the tensors' bytes, or numbers, one after the other, where the channel takes them.

    Copies only what it must.
    """
    whole = [t.resolve_conj().resolve_neg().contiguous() for t in tensors]
    flat = _plain(whole[0], numbers) if len(whole) == 1 else torch.cat([_plain(t, numbers) for t in whole])
    return flat if flat.device.type in on else flat.cpu()


def _integers(word: Plain) -> list[int]:
    return [int_word(n) for n in list_word(word)]


def _rows(word: Plain) -> list[list[int]]:
    return [_integers(row) for row in list_word(word)]


def _specs(word: Plain, device: torch.device) -> list[OperandSpec]:
    specs: list[OperandSpec] = []
    for fields in list_word(word):
        dtype, sizes, strides = list_word(fields)
        dense = None if strides is None else _integers(strides)
        specs.append(OperandSpec(dtype_named(text_word(dtype)), _integers(sizes), dense, device))
    return specs


def _tensor(value: object, spec: OperandSpec) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else spec.zeros()
