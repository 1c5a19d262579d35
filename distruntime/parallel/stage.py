"""A stage of a pipeline: a module at its place or on its mesh, driven by torch's schedules from this process.

torch's stages send what they hand on from rank to rank. Here all stages are in this process, and only their
modules and values are elsewhere. So a stage hands a value on, and the next one copies it to where it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import NotSupportedError, PlacementError, UsageError
from ..log.handle import Residence
from ..streams.stream import Stream
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor

_Base: Any = _PipelineStageBase
_node_of: Any = _backward._get_grad_fn_or_grad_acc
Values = tuple[Any, ...]
# Before torch 2.13, its split backward pass refuses an input that has no part in the outputs.
_TAKES_UNUSED = hasattr(_backward, "_autograd_grad_for_inputs")

# torch says so of any error in a backward pass.
_WRAPPED = "Failed to run stage backward"
# torch says so of a write to a leaf, and of one to a view of a leaf.
_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"


def home_of(module: torch.nn.Module, k: int) -> Residence | None:
    """Return where stage k is, None where it has no tensors; raise `PlacementError` for several places."""
    found: dict[Residence, str] = {}
    for name, t in chain(module.named_parameters(), module.named_buffers()):
        local = t._local_tensor if isinstance(t, DTensor) else t
        if isinstance(local, UnevenTensor) and local._residence is not None:
            found.setdefault(local._residence, name)
            continue
        if not isinstance(local, DistributedTensor):
            raise PlacementError(
                f"stage {k} is in this process: {name} is a local tensor. Send the stage to a worker, "
                'stage.to(dr.place(1, "cpu")), or to a mesh, stage.to(mesh.device)'
            )
        found.setdefault(local._handle.place, name)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise PlacementError(
            f"stage {k} is in several places: {first} is on {one.place}, {second} on {other.place}. "
            "A stage is on one place or one mesh: make two stages of it, or move it, stage.to(place)"
        )
    return next(iter(found), None)


class Stage(_Base):  # type: ignore[misc]
    """What torch's schedules drive as one of their stages.

    Of torch's class it uses what runs a module under DDP and FSDP2, and what splits a backward pass.
    """

    def __init__(self, module: torch.nn.Module, index: int, count: int, home: Residence, ways: Ways) -> None:
        # torch's own constructor asks for a process group, and this process needs none to be all ranks.
        self.submod, self.stage_index, self.num_stages = module, index, count
        self.home, self.device, self._ways = home, home.device, ways
        self.group, self.group_rank, self.group_size = None, 0, 1
        self.stage_index_to_group_rank = dict.fromkeys(range(count), 0)
        self.log_prefix = f"[Stage {index}]"
        self.dw_builder = self._gradient_reduction_handle = None
        self.has_backward = False
        # The step has so many micro-batches, and so many of them have come back.
        self.microbatches = self._passes_back = 0
        self.output_chunks: list[Any] = []
        self._names = _names_of(module)
        # By micro-batch: what the stage before has handed on, what the stage after has handed back, and what
        # a forward or backward pass leaves for a later one.
        self._given: dict[int, Values] = {}
        self._gradients: dict[int, Values] = {}
        self._passed: dict[int, tuple[Values, Values]] = {}
        self._for_weights: dict[int, dict[str, Any]] = {}
        self._of_inputs: dict[int, Values] = {}

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        self.output_chunks, self._passes_back = [], 0
        for kept in (self._given, self._gradients, self._passed, self._for_weights, self._of_inputs):
            kept.clear()

    def takes(self, name: str) -> bool:
        """Whether the module's forward has an argument of this name."""
        return self._names is None or name in self._names

    def bring(self, value: Any, what: str) -> Any:
        """Return a value with its tensors where this stage is. Return at once."""
        return tree_map_only(torch.Tensor, lambda t: self._bring(t, what), value)

    def _bring(self, t: torch.Tensor, what: str) -> torch.Tensor:
        if isinstance(t, DTensor):
            if t.device == self.device:
                return t
            raise NotSupportedError(
                f"{what} is a DTensor of another mesh than that of stage {self.stage_index}, "
                f"{self.home.place}: give its shards, t.to_local(), or the whole, t.full_tensor()"
            )
        if isinstance(t, UnevenTensor) and t._residence is self.home:
            return t
        if isinstance(t, DistributedTensor) and t._handle.place is self.home:
            return t
        return t.to(self.device)

    def _arriving(self, t: torch.Tensor, what: str, kind: str) -> torch.Tensor:
        """Return a neighbour's value where this stage is."""
        if not isinstance(t, DistributedTensor):
            return self._bring(t, what)
        with self._ways.between(t._handle.place, self.home, kind):
            return self._bring(t, what)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Values,
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module on one micro-batch and return what it returns. Return at once."""
        k = self.stage_index
        given = self.bring(args, f"an input of stage {k}") if self.is_first else self._given.pop(fwd_chunk_id)
        if self.has_backward and isinstance(self.submod, FSDPModule):
            # From torch 2.15 on, FSDP2 wants to know that somebody else says when a step's last pass is done.
            getattr(self.submod, "set_manual_backward_finalization", bool)(True)
        named = {name: value for name, value in (kwargs or {}).items() if self.takes(name)}
        try:
            output = self.forward_maybe_with_nosync(*given, **self.bring(named, f"an input of stage {k}"))
        except RuntimeError as error:
            if self.is_first or _IN_PLACE not in str(error):
                raise
            raise UsageError(
                f"stage {k} writes in place to what stage {k - 1} has handed on, which begins a graph of its "
                f"own there: end stage {k - 1} with this layer, or let it make a new tensor, "
                f"nn.ReLU(inplace=False) (torch says: {error})"
            ) from None
        handed = (
            output if isinstance(output, tuple) else tuple(output) if isinstance(output, list) else (output,)
        )
        if self.is_last and save_forward_output:
            self.output_chunks.append(tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if self.has_backward:
            self._passed[fwd_chunk_id] = handed, given
        return output

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the stage before has returned. Each tensor begins a graph of its own."""
        before = self.stage_index - 1
        values = (
            prev_stage_outputs if isinstance(prev_stage_outputs, (tuple, list)) else (prev_stage_outputs,)
        )
        taken = []
        for value in values:
            if not isinstance(value, torch.Tensor):
                if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                    raise UsageError(
                        f"stage {before} returns a {type(value).__name__} that has tensors in it. What it "
                        "returns becomes the arguments of the next stage: return a tensor, or a tuple of "
                        "tensors, as in output.last_hidden_state"
                    )
                taken.append(value)
                continue
            here = self._arriving(value.detach(), f"what stage {before} returns", "forward")
            taken.append(here.requires_grad_() if self.has_backward and value.requires_grad else here)
        self._given[mb_index] = tuple(taken)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch back. Without `full_backward`, the gradients of the weights come later."""
        outputs, given = self._passed.pop(bwd_chunk_id)
        if isinstance(self.submod, DistributedDataParallel):
            # It reduces what autograd adds to the weights. The half for the weights alone adds by itself.
            full_backward = True
            self._passes_back += 1
            last_backward = self._passes_back == self.microbatches
        if self.is_last:
            work: dict[str, Any] = {"stage_output": (loss,), "output_grads": None}
        else:
            pairs = [
                (t, gradient)
                for t, gradient in zip(outputs, self._gradients.pop(bwd_chunk_id))
                if isinstance(t, torch.Tensor) and t.requires_grad and gradient is not None
            ]
            work = {"stage_output": tuple(t for t, _ in pairs), "output_grads": tuple(g for _, g in pairs)}
        leaves = (
            [] if self.is_first else [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        )
        if not full_backward and not _TAKES_UNUSED:
            leaves = _used(leaves, work["stage_output"])
        work["input_values"] = leaves
        found: Iterable[Any] = ()
        if not work["stage_output"]:
            # Nobody has used what this stage returns, or it has nothing to train.
            self._for_weights[bwd_chunk_id] = {}
            found = [None] * len(leaves)
        elif full_backward:
            self._for_weights[bwd_chunk_id] = {}
            found, _ = self._back("full", _whole(work), last_backward)
        elif not leaves:
            # There is nothing to hand back, so the whole backward pass is for the weights.
            self._for_weights[bwd_chunk_id] = work
        else:
            # The function that is called next detaches the outputs.
            edges = [get_gradient_edge(t) for t in work["stage_output"]]
            found, groups = self._back("input", work, last_backward)
            self._for_weights[bwd_chunk_id] = {
                "stage_output": work["stage_output"],
                "param_groups": groups,
                "apart": (edges, work["output_grads"], self._weights_apart(groups)),
            }
        gradients = iter(found)
        self._of_inputs[bwd_chunk_id] = tuple(
            next(gradients, None) if any(t is leaf for leaf in leaves) else None for t in given
        )

    def _back(self, half: str, work: dict[str, Any], last_backward: bool) -> Any:
        """Run torch's backward pass. Raise what has failed in it, as `backward()` does."""
        try:
            return self.backward_maybe_with_nosync(half, work, last_backward=last_backward)
        except RuntimeError as error:
            # torch puts a list of all shapes in the place of a lost worker's error.
            if error.__cause__ is None or _WRAPPED not in str(error):
                raise
            # Two errors that name each other would keep all tensors of their frames until a collection.
            causes = [error.__cause__]
            error.__cause__ = error.__context__ = None
            raise causes.pop() from None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights that a backward pass has left."""
        work = self._for_weights.pop(bwd_chunk_id)
        if "param_groups" in work:
            _add_gradients(*work.pop("apart"))
            self._back("weight", work, last_backward)
        elif work:
            self._back("full", _whole(work), last_backward)

    def _weights_apart(self, groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Return the weights that no input of the stage before has met, such as those of a second tower.

        torch looks for weights on the ways from the stage's outputs to its inputs alone.
        """
        met = set().union(*(group["params"] for group in groups))
        return [p for p in self.submod.parameters() if p.requires_grad and _node_of(p) not in met]

    def get_local_bwd_output(self, mb_index: int) -> Values:
        """Return the gradients of what the stage before has handed on, None where there are none."""
        return self._of_inputs.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Values, mb_index: int) -> None:
        """Take the gradients of what this stage has returned."""
        what = f"a gradient of stage {self.stage_index + 1}"
        self._gradients[mb_index] = tuple(
            None if gradient is None else self._arriving(gradient, what, "back")
            for gradient in next_stage_bwd_outputs
        )

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        # torch's classes for ranks prepare buffers with these, and the schedule here does not ask for them.
        raise NotImplementedError

    _prepare_forward_infra = _prepare_backward_infra = _create_grad_recv_info = _unused


def _used(leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs that have a part in some outputs."""
    # An output may be an input itself, which has no function that made it.
    left = [_node_of(t) for t in outputs]
    met = set()
    while left:
        node = left.pop()
        if node is not None and node not in met:
            met.add(node)
            left += [following for following, _ in node.next_functions]
    return [t for t in leaves if _node_of(t) in met]


def _add_gradients(edges: Sequence[Any], gradients: Any, weights: Sequence[torch.Tensor]) -> None:
    """Add the gradients of some weights of a stage. What else is computed of its graph comes later."""
    if not weights:
        return
    found = torch.autograd.grad(edges, weights, gradients, retain_graph=True, allow_unused=True)
    for p, gradient in zip(weights, found):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


def _whole(work: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a whole backward pass, where a loss stands alone."""
    if work["output_grads"] is None:
        return {**work, "stage_output": work["stage_output"][0]}
    return dict(work)


def _names_of(module: torch.nn.Module) -> frozenset[str] | None:
    """Return the names that a module's forward takes, None where it takes any."""
    forward: Callable[..., Any] = module.forward
    inner = getattr(module, "module", None)
    if isinstance(module, DistributedDataParallel) and isinstance(inner, torch.nn.Module):
        forward = inner.forward
    found = inspect.signature(forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in found):
        return None
    return frozenset(one.name for one in found if one.kind is not one.VAR_POSITIONAL)


def require_loss(loss: Any) -> torch.Tensor:
    """Return a loss; raise `UsageError` for what cannot be one."""
    if (
        isinstance(loss, torch.Tensor)
        and not loss.dim()
        and (loss.requires_grad or not torch.is_grad_enabled())
    ):
        return loss
    got = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        got = f"one of shape {tuple(loss.shape)}" if loss.dim() else "one that needs no gradient"
    raise UsageError(f"loss_fn(output, target) returns a tensor with one number and a gradient, got {got}")


def require_apart(modules: Sequence[torch.nn.Module], unit: str) -> None:
    """Raise `UsageError` where two modules share a parameter, which on two places would be two parameters."""
    owner: dict[int, tuple[int, str]] = {}
    for k, module in enumerate(modules):
        for name, p in module.named_parameters():
            other, its_name = owner.setdefault(id(p), (k, name))
            if other != k:
                raise UsageError(
                    f"{name} of {unit} {k} is also {its_name} of {unit} {other}, and each would be trained "
                    "for itself: keep both in one, or untie them before, "
                    "module.weight = nn.Parameter(module.weight.clone())"
                )


class Ways:
    """The streams of a pipeline's copies: for each place one that sends, and two that receive.

    One receives what goes forward, the other one gradients, as neither may wait for the other. A copy between
    nodes takes both of them: the one sends while the other one receives. In the stream that computes, a stage
    that has finished a pass would wait until its neighbour has, too.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[Residence, str], Stream] = {}

    def _stream(self, home: Residence, what: str) -> Stream:
        found = self._streams.get((home, what))
        if found is None:
            found = self._streams[home, what] = Stream(home.device)
        return found

    @contextmanager
    def between(self, source: Residence, target: Residence, kind: str) -> Iterator[None]:
        """Let copies from one place to another go these ways. `kind` is "forward" or "back".

        Copies between meshes are the members' own, and copies within a node wait for nobody.
        """
        if source.node is target.node or source.node.members or target.node.members:
            yield
            return
        with self._stream(source, "send"), self._stream(target, kind):
            yield
