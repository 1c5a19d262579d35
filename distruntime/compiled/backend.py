"""The backend "distruntime" of `torch.compile`: a forward graph is one instruction, so is a backward one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch.fx import GraphModule, Node

from ..errors import ConfigurationError
from ..log.handle import BARE, REMOTE_TYPES
from ..session.session import active_session
from .constants import Constants, lift_constants
from .draws import is_state
from .dynamo import DECIDING, has_remote
from .graph import Graph
from .here import Parted, part
from .saved import as_proxies, bundle_of, open_slots
from .shared import SharesMemory, attributes_of, overlap, share_memory

# Dynamo and AOTAutograd hand over functions of whatever tensors a graph has.
Compiled = Callable[..., Any]
_numbers = count(1)
_SHARED = "its arguments share memory, and it writes to some"
_COMPILE = (None, "inductor", "cudagraphs")


def distruntime(
    graph: GraphModule,
    inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: dict[str, object] | None = None,
) -> Compiled:
    """Compile a graph that Dynamo has traced, for the worker that has its tensors. Never waits.

    `options={"compile": "inductor"}`, or "cudagraphs", has the worker compile it, as `dr.program` does. A
    graph with tensors of this process runs operator by operator, with a warning.
    """
    compile = (options or {}).get("compile")
    if mode == "reduce-overhead" and not options:
        compile, mode = "cudagraphs", None
    if compile not in _COMPILE or not set(options or ()) <= {"compile"} or mode not in (None, "default"):
        raise ConfigurationError(
            f'torch.compile(backend="distruntime", mode={mode!r}, options={options!r}): there is '
            'options={"compile": "inductor"} or {"compile": "cudagraphs"}, and mode="reduce-overhead" for '
            "the latter"
        )
    return _compiled(graph, inputs, compile) if has_remote(graph, inputs) else graph.forward


def for_inductor(graph: GraphModule, inputs: Sequence[object], config: dict[str, object]) -> Compiled:
    """Compile a graph for which the user named Inductor, or no backend: its worker's Inductor does.

    A mode with CUDA graphs gets these, of the operators as they are. Warns of settings that do not reach the
    worker.
    """
    graphs = bool(config.get("triton.cudagraphs"))
    lost = sorted(name for name, value in config.items() if value and name != "triton.cudagraphs")
    if lost:
        warnings.warn(
            f"the worker's compiler has settings of its own. These of torch.compile do not reach it: "
            f"{', '.join(lost)}",
            stacklevel=2,
        )
    return _compiled(graph, inputs, "cudagraphs" if graphs else "inductor")


def _compiled(graph: GraphModule, inputs: Sequence[object], compile: object) -> Compiled:
    number, given = next(_numbers), [*inputs, *attributes_of(graph)]
    meet = overlap(given)
    own: Compiled = aot_autograd(
        fw_compiler=_compiler(f"forward {number}", compile, not meet),
        bw_compiler=_compiler(f"backward {number}", compile, False),
        # A graph writes to arguments itself: each buffer of a batch norm would be a copy outside of it.
        keep_inference_input_mutations=True,
    )
    # An eager backward pass is called outside of autocast, and its operators take the dtypes that they meet.
    own = config.patch(backward_pass_autocast="off")(own)
    try:
        traced: Compiled = own(graph, inputs)
    except (RuntimeError, TypeError) as error:
        if not share_memory(given):
            raise
        # AOTAutograd makes one tensor of those that share memory, for which it takes their storage apart.
        _runs_plainly(f"its arguments share memory ({type(error).__name__})")
        return graph.forward
    if meet and _writes_arguments():
        _runs_plainly(_SHARED)
        return graph.forward
    return _unless_shared(traced, graph)


def _unless_shared(traced: Compiled, graph: GraphModule) -> Compiled:
    """Return a function that runs the graph as it is where its arguments share memory and it writes to some.

    Nothing of torch's guards that for a graph that was traced without: a write would not reach the others.
    """
    if not _writes_arguments():
        return traced
    told = False

    def call(*args: object) -> object:
        nonlocal told
        try:
            return traced(*args)
        except SharesMemory:
            if not told:
                told = True
                _runs_plainly(f"in this call {_SHARED}. It is told once")
            return graph.forward(*args)

    return call


def _writes_arguments() -> bool:
    """Whether the graph that was just traced writes to its arguments."""
    context = torch._guards.TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    return found is None or any(one.mutates_data or one.mutates_metadata for one in found.input_info)


def _saves() -> slice | None:
    """Return which results of the forward graph that is compiled now it saves for its backward graph.

    Autograd minds writes to these, and not to those that stand behind them. It is None where AOTAutograd
    takes some results apart first: tensors of subclasses, and the tokens of operators with effects.
    """
    context = torch._guards.TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    if found is None or found.tokens or found.num_symints_saved_for_bw is None:
        return None
    if any(not isinstance(one, PlainTensorMeta) for one in found.subclass_fw_graph_out_meta):
        return None
    # Before torch 2.13 all are minded.
    name = "tensors_saved_for_backwards_with_vc_check_slice"
    minded: slice = getattr(found, name, None) or found.tensors_saved_for_backwards_slice
    return minded


def _copy_what_it_returns_twice(graph: GraphModule) -> None:
    """Give each place at which a backward graph returns one gradient a tensor of its own.

    Autograd copies a gradient that stands at two places, but not one that AOTAutograd has wrapped for each as
    a DTensor. A write to one `grad` would change the other, as it does with `aot_eager` (torch 2.13).
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results: list[object] = []
    for one in output.args[0]:
        if isinstance(one, Node) and one in results and isinstance(one.meta.get("val"), torch.Tensor):
            with graph.graph.inserting_before(output):
                copied = graph.graph.call_function(torch.ops.aten.clone.default, (one,))
            copied.meta["val"] = one.meta["val"]
            results.append(copied)
        else:
            results.append(one)
    output.args = (tuple(results),)
    graph.recompile()


def _compiler(name: str, compile: object, apart: bool) -> Compiled:
    """Return what AOTAutograd calls with each of the two graphs that it makes of one.

    `apart` says that no two of its arguments overlap, and that a call may be another one.
    """

    def compiled(graph: GraphModule, inputs: Sequence[object]) -> Compiled:
        alone = apart and _writes_arguments()
        parted = part(graph)
        lifted = lift_constants(graph if parted is None else parted.left)
        decides = next((node for node in lifted.graph.graph.nodes if _decides(node)), None)
        if decides is not None:
            _runs_plainly(f"a value decides what it does: {decides.name}{_line_of(decides)}")
            return _boxed(graph.forward, alone)
        local = next((node for node in lifted.graph.graph.nodes if _is_local(node)), None)
        if local is not None:
            _runs_plainly(f"it has a tensor of this process: {local.name}{_line_of(local)}")
            return _boxed(graph.forward, alone)
        if name.startswith("backward"):
            _copy_what_it_returns_twice(lifted.graph)
        saves = _saves() if name.startswith("forward") else None
        made = Graph(lifted.graph, name, compile, saves, alone)  # type: ignore[arg-type]
        return _with(lifted.constants, parted, made, graph)

    return compiled


def _with(constants: Constants | None, parted: Parted | None, graph: Graph, whole: GraphModule) -> Compiled:
    """Return a function of a graph's own arguments.

    The constants travel at the first call, and this process's numbers at each. They go where the trace has
    met them. If the graph makes something at the current place, that must be the place of the trace.
    """
    plain, fixed = _boxed(whole.forward, graph.apart), None
    if (constants is not None or parted is not None) and any(map(_is_placed, whole.graph.nodes)):
        fixed = active_session().places.current().lazy

    def run(args: list[object]) -> object:
        if fixed is not None and active_session().places.current().lazy != fixed:
            return plain(args)
        if parted is not None and graph.apart and overlap(args[k] for k in parted.given):
            raise SharesMemory
        found = () if parted is None else parted.take(args)
        if constants is not None:
            args += constants.of(active_session())
        results = graph(args)
        return results if parted is None else parted.give(results, found)

    return _takes_a_list(run)


def _takes_a_list(run: Compiled) -> Compiled:
    """Say that AOTAutograd calls this with a list of arguments, which it empties.

    What only the list holds is freed early.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _boxed(run: Compiled, apart: bool) -> Compiled:
    def call(args: list[object]) -> object:
        if apart and overlap(args):
            raise SharesMemory
        # Its forward graph may have been recorded.
        held = bundle_of(args)
        if held is not None:
            open_slots(args, held)
        # It was traced with its casts, and a backward pass may be under an autocast of its own.
        with torch._C._DisableAutocast():
            return run(*as_proxies(args))

    return _takes_a_list(call)


def _runs_plainly(why: str) -> None:
    warnings.warn(
        f"a graph that torch.compile has traced runs operator by operator, as without it: {why}", stacklevel=2
    )


def _is_local(node: Node) -> bool:
    """Whether a value of a graph is this process's. A replay would not compute it."""
    if is_state(node):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, torch.Tensor) and one.device.type not in REMOTE_TYPES for one in values)


def _decides(node: Node) -> bool:
    """Whether a value decides what a graph does next: by a branch, as a number that is read, or by a size."""
    return node.target in DECIDING or bool(node.meta.get("unbacked_bindings"))


def _is_placed(node: Node) -> bool:
    """Whether an operator makes its result at the current place, as `device="remote"` says."""
    device = node.kwargs.get("device")
    if not isinstance(device, torch.device) or device.type not in REMOTE_TYPES:
        return False
    return device.index is None or device.type == BARE


def _line_of(node: Node) -> str:
    """Return the last line of a node's own stack trace, as Dynamo keeps it."""
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    return "".join(f"\n{line}" for line in lines[-2:])
