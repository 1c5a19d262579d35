"""Pipelines: stages on places or meshes, driven by torch's own schedules from this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import microbatch, schedules
from torch.utils._pytree import tree_leaves

from ..errors import ConfigurationError, PlacementError, UsageError, without_our_frames
from ..log.handle import Residence
from .norms import clip
from .orders import Orders, class_named, forward_orders, grid, merged, orders_of, ranks_of
from .stage import Stage, Ways, home_of, require_apart, require_loss

_torch: Any = schedules
_Runtime: Any = _torch._PipelineScheduleRuntime
_split: Any = microbatch.split_args_kwargs_into_chunks

Loss = Callable[[Any, Any], torch.Tensor]


class _Schedule(_Runtime):  # type: ignore[misc]
    """torch's runtime, which runs an order of actions. Its stages need no buffers, as they send nothing."""

    def __init__(
        self,
        stages: Sequence[Stage],
        order: Sequence[Any],
        microbatches: int,
        loss_fn: Loss | None,
        divisor: int,
    ) -> None:
        # torch divides gradients once all are there, also what was there before the step.
        super().__init__(list(stages), microbatches, loss_fn=loss_fn, scale_grads=False)
        self.pipeline_order_with_comms = {0: list(order)}
        self.losses: list[torch.Tensor] = []
        self._divisor = divisor

    def _compute_loss(self, output: Any, target: Any, *_: Any) -> torch.Tensor:
        try:
            loss = require_loss(self._loss_fn(output, target))
        except (AttributeError, TypeError) as error:
            if target is not None:
                raise
            raise UsageError(
                f"loss_fn(output, None) failed ({error}): pipe.step(x, target=y) gives it a target"
            ) from error
        self.losses.append(loss.detach())
        return loss if self._divisor == 1 else loss / self._divisor

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class _Whole(logging.Filter):
    """Keeps torch from logging the whole schedule, in steps of rank 0, above each error of a step here."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        failed: list[Any] | None = getattr(self.here, "failed", None)
        if failed is None or record.levelno != logging.ERROR:
            return True
        failed += [one for one in record.args or () if isinstance(one, _torch._Action)]
        return False


_whole = _Whole()
_torch.logger.addFilter(_whole)


@contextmanager
def _noted() -> Iterator[None]:
    """Note on an error which pass of which stage it comes from. Errors take notes from Python 3.11 on."""
    failed = _whole.here.failed = []
    try:
        yield
    except Exception as error:
        if failed and hasattr(error, "add_note"):
            action = failed[0]
            part = "" if action.microbatch_index is None else f", micro-batch {action.microbatch_index}"
            error.add_note(f"  in {action} of the pipeline: stage {action.stage_index}{part}")
        raise
    finally:
        _whole.here.failed = None


class Pipeline:
    """A pipeline that `dr.parallel.pipeline` has made.

    `stages` are its modules, `schedule` is the schedule's name, and `microbatches` says into how many parts
    a step cuts its batch. Printing it shows what each place does, in its order.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        homes: Sequence[Residence],
        orders: Orders,
        schedule: str,
        microbatches: int,
        loss_fn: Loss | None,
        options: dict[str, Any],
    ) -> None:
        self.stages, self.schedule, self.microbatches = tuple(stages), schedule, microbatches
        self._orders, self._loss_fn, self._options = orders, loss_fn, options
        ways = Ways()
        self._stages = [
            Stage(stage, k, len(stages), home, ways) for k, (stage, home) in enumerate(zip(stages, homes))
        ]
        last = len(stages) - 1
        self._training, self._evaluation = merged(orders, last), merged(forward_orders(orders), last)

    @without_our_frames
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and backward, and add up the gradients. Return at once, as the schedule's step.

        Args:
            args: what the first stage takes. Each tensor is cut along its first dimension into
                `microbatches` equal parts; other values go to each part as they are.
            target: what `loss_fn(output, target)` takes for each part, cut in the same way.
            losses: a list that gets the loss of each micro-batch, a number at the last stage's place.
            return_outputs: whether to return what the last stage returns, put together again.
            kwargs: further inputs, by name: each stage gets those that its forward names.

        Gradients are added to those that are there. The loss of each micro-batch counts for its part of the
        batch, unless `scale_grads` is False. So `loss_fn` is a mean, as in a step without a pipeline.

        Raises:
            UsageError: there is no `loss_fn`; a batch that `microbatches` does not divide; a name that no
            stage takes; `torch.no_grad()`. PlacementError: an input of another place than a stage's.
        """
        if self._loss_fn is None:
            raise UsageError(
                "a step trains, so it needs a loss: dr.parallel.pipeline(..., loss_fn=fn); pipe.eval(x) "
                "does not"
            )
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step computes gradients, which torch.no_grad() forbids; pipe.eval(x) needs none"
            )
        return self._run("step", args, kwargs, target, losses, return_outputs)

    @without_our_frames
    def eval(
        self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run a batch forward, without gradients. Return what the last stage returns, at once.

        It takes what `step` takes. A batch may be uneven, with at least one row for each micro-batch. The
        losses are computed where `losses` is given. As in torch, it leaves the modules in their mode:
        `stage.eval()` turns dropout off.
        """
        with torch.no_grad():
            return self._run("eval", args, kwargs, target, losses, True)

    def _run(
        self,
        what: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
    ) -> Any:
        training = what == "step"
        self._require(what, args, kwargs, target, even=training)
        parts, named = _split(
            args,
            kwargs,
            self.microbatches,
            self._options["args_chunk_spec"],
            self._options["kwargs_chunk_spec"],
        )
        last = self._stages[-1]
        targets = [None] * self.microbatches
        if target is not None:
            there = last.bring(target, "the target")
            targets = [one for (one,) in _split((there,), {}, self.microbatches)[0]]
        loss_fn = self._loss_fn if training or losses is not None else None
        # A step that fails leaves torch's runtime in the middle, so each has its own.
        run = _Schedule(
            self._stages,
            self._training if training else self._evaluation,
            self.microbatches,
            loss_fn,
            self.microbatches if training and self._options["scale_grads"] else 1,
        )
        for stage in self._stages:
            stage.has_backward, stage.microbatches = training, self.microbatches
            stage.clear_runtime_states()
        try:
            with _noted():
                run._step_microbatches(parts, named, targets, None, return_outputs)
            if losses is not None:
                losses += run.losses
            outputs = last.output_chunks
            return (
                microbatch.merge_chunks(outputs, self._options["output_merge_spec"])
                if return_outputs
                else None
            )
        except BaseException:
            # Ctrl-C comes here, too. FSDP2's parameters would stay gathered.
            for module in chain.from_iterable(stage.modules() for stage in self.stages):
                if isinstance(module, FSDPModule):
                    module.reshard()
            raise
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()

    def _require(
        self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, even: bool
    ) -> None:
        """Raise `UsageError` for what no stage takes, and for batches that cannot be cut."""
        for name in kwargs:
            if not any(stage.takes(name) for stage in self._stages):
                raise UsageError(
                    f"no stage takes {name!r}: name it in the forward of each stage that is to have it"
                )
        n = self.microbatches
        named = {"args": args, **kwargs, "target": target}
        if self._options["args_chunk_spec"] is not None or self._options["kwargs_chunk_spec"] is not None:
            named = {"target": target}
        for name, value in named.items():
            for t in tree_leaves(value):
                if not isinstance(t, torch.Tensor):
                    continue
                rows = t.shape[0] if t.dim() else 0
                if rows < n or (even and rows % n):
                    where = "the batch" if name == "args" else name
                    more = -(-max(rows, 1) // n) * n
                    raise UsageError(
                        f"pipe.{what} cuts {where} into {n} micro-batches along its first dimension, got "
                        f"shape {tuple(t.shape)}: give {more} rows, or make the pipeline with microbatches= "
                        + (f"a divisor of {rows}" if even else f"at most {rows}")
                    )

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of all stages, for an optimizer."""
        return chain.from_iterable(stage.parameters() for stage in self.stages)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all stages, or set them to zero. Return at once."""
        for stage in self.stages:
            stage.zero_grad(set_to_none)

    @without_our_frames
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all stages' gradients so that their common norm is at most `max_norm`. Return at once.

        Returns the norm before, a number where the first stage is. It takes plain tensors and DTensors of
        several meshes, where `torch.nn.utils.clip_grad_norm_` takes those of one.
        """
        return clip(self.stages, self._stages, max_norm, norm_type)

    def __repr__(self) -> str:
        places = list(dict.fromkeys(stage.home.place for stage in self._stages))
        lines = grid(self._orders)
        one_each = len(lines) == len(self._stages)
        names = [str(self._stages[k].home.place) if one_each else str(places[k]) for k in range(len(lines))]
        width = max(map(len, names))
        head = f"<{self.schedule}: {len(self.stages)} stages, {self.microbatches} micro-batches"
        return "\n".join([head, *(f"  {name:{width}}  {line}" for name, line in zip(names, lines))]) + ">"


@without_our_frames
def pipeline(
    stages: Sequence[torch.nn.Module],
    microbatches: int = 8,
    schedule: str = "1F1B",
    loss_fn: Loss | None = None,
    *,
    scale_grads: bool = True,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    output_merge_spec: Any = None,
) -> Pipeline:
    """Make a pipeline of stages that are on places or on meshes. Return at once.

    Args:
        stages: modules, each on its place (`stage.to(dr.place(1, "cpu"))`) or on its mesh, in any form that
            runs there: cut by tensor parallelism, under `fully_shard` or `DistributedDataParallel`. What one
            returns, a tensor or a tuple, is what the next one's forward takes. A stage without parameters
            is where the stage before it is.
        microbatches: into how many parts a step cuts its batch.
        schedule: one of torch's: "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV".
        loss_fn: called with what the last stage returns for a micro-batch, and with its part of the target.
        scale_grads: whether a step divides each loss by `microbatches`, before it computes gradients.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as in torch's schedules, along which dimension
            inputs are cut and outputs put together.

    Raises:
        ConfigurationError: a schedule that torch has not, or numbers or places that it does not take.
        UsageError: no modules, two that share a parameter, or DDP around a part of one. PlacementError: a
        stage that is in this process or in several places, or neighbours that cannot hand values on.
    """
    modules = list(stages)
    _require_modules(modules)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigurationError(f"microbatches is a whole number from 1 on, got {microbatches!r}")
    class_named(schedule)
    require_apart(modules, "stage")
    homes = _homes(modules)
    orders = orders_of(schedule, len(modules), ranks_of(schedule, homes), microbatches)
    return Pipeline(
        modules,
        homes,
        orders,
        schedule,
        microbatches,
        loss_fn,
        {
            "scale_grads": scale_grads,
            "args_chunk_spec": args_chunk_spec,
            "kwargs_chunk_spec": kwargs_chunk_spec,
            "output_merge_spec": output_merge_spec,
        },
    )


def _require_modules(modules: Sequence[torch.nn.Module]) -> None:
    """Raise `UsageError` for what is no stage."""
    for k, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                f"stages are modules, stage {k} is {type(module).__name__}: dr.parallel.split(model, n) "
                "makes them"
            )
        for name, inner in module.named_modules():
            if name and isinstance(inner, torch.nn.parallel.DistributedDataParallel):
                raise UsageError(
                    f"{name} of stage {k} is a DistributedDataParallel, which does not know a step's last "
                    "micro-batch: wrap the whole stage, DistributedDataParallel(stage, process_group=...)"
                )
    if not modules:
        raise UsageError(
            "a pipeline has at least one stage, got none: dr.parallel.split(model, n) makes stages of a model"
        )


def _homes(modules: Sequence[torch.nn.Module]) -> list[Residence]:
    """Return where each stage is; raise `PlacementError` where neighbours cannot hand values on."""
    found = [home_of(module, k) for k, module in enumerate(modules)]
    known = next((home for home in found if home is not None), None)
    if known is None:
        raise PlacementError(
            "no stage has a tensor that would say where it is: send one to a worker, stage.to(place)"
        )
    homes: list[Residence] = []
    for home in found:
        homes.append(home if home is not None else homes[-1] if homes else known)
    for k, (one, other) in enumerate(pairwise(homes)):
        if len(one.node.members) != len(other.node.members):
            raise PlacementError(
                f"stage {k} is on {one.place}, stage {k + 1} on {other.place}: neighbours are on single "
                "places, or on meshes of as many members. Put the one on a mesh of its place, "
                "or the other on as many members: mesh.select(pp=k)"
            )
    return homes
