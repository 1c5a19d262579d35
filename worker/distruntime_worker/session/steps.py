"""What a session's templates are compiled to: steps, for its own log and for its meshes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.messages import PROGRAM, Plain, Warned

from ..checkpoint import files as checkpoint
from ..collectives.operation import PREFIX, Collective
from ..collectives.taking_part import Joint, along
from ..log.chain import Chain
from ..log.state import State
from ..programs.definition import Row
from ..programs.program import Program
from ..python.calls import note_writes
from ..values import functions
from ..values.draws import may_draw
from ..values.mesh_lanes import Lanes, MeshState
from ..values.step import Operator, Step, Words
from ..values.template import Template, operator

_FUNCTIONS = {**functions.FUNCTIONS, **checkpoint.FUNCTIONS}


class Steps:
    """The steps of one session. The reader calls `learn`. `calls` are what its master's functions run by."""

    def __init__(self, state: State, chain: Chain, joint: Joint, calls: Mapping[str, Operator]) -> None:
        self._state, self._chain, self._joint = state, chain, joint
        self._functions = {**_FUNCTIONS, **calls, "distruntime::compiled": self._compiled}

    def learn(self, templates: list[Plain], mesh: MeshState | None = None) -> None:
        """Compile new templates, of a mesh or of this worker's own log (the reader)."""
        for fields in templates:
            try:
                match fields:
                    case [int(number), str(name), list(args), dict(kwargs), results]:
                        if mesh is None:
                            self._add(number, name, args, kwargs, results)
                        else:
                            self._add_to(mesh, number, name, args, kwargs, results)
                    case _:
                        raise ProtocolError(f"a template makes no sense: {fields!r:.80}")
            except ProtocolError:
                raise
            # Whatever the error is, the master sent nonsense.
            except Exception as error:
                raise ProtocolError(f"a template makes no sense: {type(error).__name__}: {error}") from error

    def _add(
        self, number: int, name: str, args: list[Plain], kwargs: dict[str, Plain], results: Plain
    ) -> None:
        state, real = self._state, self._state.devices.real
        if number != state.next_template:
            raise ProtocolError(f"template {number} came where {state.next_template} was expected")
        state.next_template += 1
        if name.startswith(PREFIX):
            step: Step = Collective(name, args, real, self._joint.take_part)
        elif name == PROGRAM:
            step = Program(args, kwargs, state, self._own_template, self._warn)
        else:
            step = self._own_template(Row(name, args, kwargs, results))
        self._chain.add(state, number, step)

    def _own_template(self, row: Row) -> Template:
        state, call = self._state, self._called(row.name)
        found = Template(row.name, call, row.args, row.kwargs, row.results, state.devices.real, state.fail)
        _note_writes(found, row.args)
        return found

    def _warn(self, p: Words, i: int, text: str) -> None:
        """Warn at the master, of the instruction at `i` (its stream's thread)."""
        segment = self._state.work(p).segment
        self._state.send(Warned(segment.seq, segment.start + i, "UserWarning", text), None)

    def _compiled(self, number: int, mesh: int) -> str:
        """Return what became of the compiling of a program: a template of a mesh's, or of our own."""
        log = self._state if mesh == -1 else self._state.meshes.get(mesh)
        step = None if log is None else log.info.get(number)
        return step.compiled if isinstance(step, Program) else ""

    def _called(self, name: str) -> Operator:
        """Return what a template calls. After a space its name has what the user calls it."""
        return self._functions.get(name.partition(" ")[0]) or operator(name)

    def _add_to(
        self,
        mesh: MeshState,
        number: int,
        name: str,
        args: list[Plain],
        kwargs: dict[str, Plain],
        results: Plain,
    ) -> None:
        if number != mesh.next_template:
            raise ProtocolError(
                f"template {number} of mesh {mesh.number} came where {mesh.next_template} was expected"
            )
        mesh.next_template += 1
        state, real = self._state, self._state.devices.real
        if name.startswith(PREFIX):
            self._chain.add(mesh, number, along(mesh, name, args, real, self._joint.take_part, state.spread))
            return
        if name == PROGRAM:
            own = partial(self._member_template, mesh)
            step: Step = Program(args, kwargs, state, own, self._warn)
        else:
            step = self._member_template(mesh, Row(name, args, kwargs, results))
        self._chain.add(mesh, number, step)

    def _member_template(self, mesh: MeshState, row: Row) -> Step:
        """Return what runs an instruction of a mesh for its members here."""
        state, real = self._state, self._state.devices.real
        call, lanes = self._called(row.name), []
        for k in range(len(mesh.devices)):
            own = [mesh.member_device(pattern, k) for pattern in row.args]
            named = {key: mesh.member_device(value, k) for key, value in row.kwargs.items()}
            lanes.append(Template(row.name, call, own, named, row.results, real, state.fail))
            _note_writes(lanes[-1], own)
        if len(lanes) == 1:
            return lanes[0]
        # On a CPU (or where it simulates GPUs) the members share one generator; real GPUs have one each.
        on = [real(torch.device(d)) for d in mesh.devices]
        shared = all(device.type == "cpu" for device in on) and may_draw(lanes[0])
        return Lanes(lanes, on, state.spread, mesh.generators if shared else None)


def _note_writes(template: Template, args: list[Plain]) -> None:
    """Say of a function, which has no schema, what it writes or poisons."""
    note_writes(template, args)
    first = functions.POISONING.get(template.name)
    if first is not None:
        template.mutates = template.reads[first:]
