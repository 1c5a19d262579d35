"""Cutting a model into stages: by its parameters, or where names say."""

from __future__ import annotations

import copy
import operator
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch.distributed import pipelining
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from ..errors import UsageError, without_our_frames
from ..tensors.tensor import DistributedTensor
from .stage import require_apart

Values = Sequence[Node]


def carry(whole: Graph, parts: Sequence[GraphModule]) -> None:
    """Change parts so that each takes what the one before returns, and the last returns the model's results.

    `whole` is torch's graph of the parts, in which each is one call. A part that fits already is left alone.
    """
    calls = [node for node in whole.nodes if node.op == "call_module"]
    takes = [[value for value in call.args if isinstance(value, Node)] for call in calls]
    gives = [_results(call) for call in calls]
    results = [value for value in tree_leaves(whole.output_node().args) if isinstance(value, Node)]
    arriving: list[Node] = [node for node in whole.nodes if node.op == "placeholder"]
    for k, part in enumerate(parts):
        later = {value for others in takes[k + 1 :] for value in others} | set(results)
        # What was made last comes first, as torch's parts have it.
        known = [*gives[k], *(value for value in arriving if value not in gives[k])]
        leaving = results if k == len(parts) - 1 else [value for value in known if value in later]
        if k + 1 < len(parts) and set(leaving) == set(takes[k + 1]):
            leaving = takes[k + 1]
        inputs = k > 0 and any(value.op == "placeholder" for value in arriving)
        if inputs or arriving != takes[k] or leaving != gives[k]:
            _change(part, k, takes[k], gives[k], arriving, leaving)
        arriving = leaving


def _results(call: Node) -> list[Node]:
    """Return the values that a part returns, in its order."""
    items = [user for user in call.users if user.target is operator.getitem]
    return sorted(items, key=lambda item: item.args[1]) if items else [call]  # type: ignore[arg-type, return-value]


def _change(
    part: GraphModule, k: int, takes: Values, gives: Values, arriving: Values, leaving: Values
) -> None:
    graph = part.graph
    there = dict(zip(takes, (node for node in graph.nodes if node.op == "placeholder")))
    end = graph.output_node()
    returned: Any = end.args[0]
    made = dict(zip(gives, returned if isinstance(returned, (tuple, list)) else (returned,)))
    for value in reversed(arriving):
        # The part may have another value under that name. And a step may name an input of the model, which a
        # later part gets from the part before all the same.
        name = f"carried_{value.name}" if k else value.name
        first = next(iter(graph.nodes))
        if value not in there:
            with graph.inserting_before(first):
                there[value] = graph.placeholder(name)
        elif there[value] is not first:
            first.prepend(there[value])
        if value.op == "placeholder":
            there[value].target = name
    handed = [made[value] if value in made else there[value] for value in leaving]
    end.args = (handed[0] if len(handed) == 1 else tuple(handed),)
    # The first part's code takes the model's arguments apart, of which it may have more now.
    graph.set_codegen(CodeGen())
    graph.lint()
    part.recompile()


_pipelining: Any = pipelining


@without_our_frames
def split(
    model: torch.nn.Module, n: int, by: str | Sequence[str] = "parameters", *, example: Any = None
) -> list[torch.nn.Module]:
    """Return a model as `n` modules that follow each other, the stages of a pipeline.

    An `nn.Sequential` is cut between its children, unless its class has a forward of its own. The parts are
    `nn.Sequential`s that have these children under their names, so that `state_dict` keys stay. Any other
    model is traced by torch's `torch.distributed.pipelining.pipeline`, with `example` as its arguments; the
    parts are copies. Values that skip a part are handed on by it.

    Args:
        n: how many parts.
        by: "parameters" gives the parts as equal numbers of parameters as can be. A list of `n` - 1 names has
            each part from the second on begin with the child of that name ("layers.4").
        example: arguments of the model, one or a tuple. A traced model takes a micro-batch of them.

    Raises `UsageError` for a model that cannot be cut into so many parts, or parts that share a parameter.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"dr.parallel.split cuts a module, got {type(model).__name__}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        advice = (
            f": names go into by=, dr.parallel.split(model, {len(n) + 1}, by={n!r})" if _are_names(n) else ""
        )
        raise UsageError(f"the number of parts is a whole number from 1 on, got {n!r}{advice}")
    names = None if isinstance(by, str) else list(by)
    if isinstance(by, str) and by != "parameters":
        raise UsageError(f'by is "parameters" or a list of names, got {by!r}')
    if names is not None and len(names) != n - 1:
        raise UsageError(f"{n} parts begin at {n - 1} names, the first one at the model's begin; got {names}")
    given = () if example is None else example if isinstance(example, tuple) else (example,)
    if _is_sequence(model):
        parts = _of_sequential(model, n, names)
        require_apart(parts, "part")
        return parts
    return _of_traced(model, n, names, given)


def _are_names(given: object) -> TypeGuard[list[str]]:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)


def _is_sequence(model: torch.nn.Module) -> TypeGuard[torch.nn.Sequential]:
    """Whether a model runs its children one after the other. A subclass may have a forward of its own."""
    return isinstance(model, torch.nn.Sequential) and (
        getattr(model.forward, "__func__", None) is torch.nn.Sequential.forward
    )


def _of_sequential(model: torch.nn.Sequential, n: int, names: list[str] | None) -> list[torch.nn.Module]:
    # `named_children` leaves out what stands there a second time, such as one ReLU after each layer.
    children = list(model._modules.items())
    if len(children) < n:
        raise UsageError(f"a Sequential of {len(children)} children cannot be cut into {n} parts")
    if names is not None:
        starts = [_index([name for name, _ in children], name) for name in names]
        if starts != sorted(set(starts)) or 0 in starts:
            raise UsageError(f"names of parts stand in the model's order, after its first child; got {names}")
    else:
        starts = balanced([sum(p.numel() for p in child.parameters()) for _, child in children], n)
    bounds = [0, *starts, len(children)]
    return [torch.nn.Sequential(OrderedDict(children[a:b])) for a, b in pairwise(bounds)]


def _index(known: Sequence[str], name: str) -> int:
    if name not in known:
        raise UsageError(f"the model has no child {name!r} to begin a part with; it has {', '.join(known)}")
    return known.index(name)


def balanced(weights: Sequence[float], n: int) -> list[int]:
    """Return where parts two to `n` begin, so that the heaviest part is as light as it can be.

    No part is empty. What has no weight stays with what comes before it, unless a part has nothing else: an
    activation may work in place, which it cannot do on what another stage hands on.
    """
    count = len(weights)
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    # Each has how heavy the heaviest of the first parts is where they hold the first children, and where the
    # last of them begins.
    best: list[list[tuple[float, int]]] = [[(before[k], 0) for k in range(count + 1)]]
    for part in range(1, n):
        row: list[tuple[float, int]] = []
        for end in range(count + 1):
            choices = [
                (max(best[part - 1][begin][0], before[end] - before[begin]), begin)
                for begin in range(part, end)
            ]
            row.append(min(choices, default=(float("inf"), 0)))
        best.append(row)
    starts: list[int] = []
    end = count
    for part in range(n - 1, 0, -1):
        end = best[part][end][1]
        starts.insert(0, end)
    bounds = [*starts, count]
    for k in range(len(starts)):
        weighty = (begin for begin in range(bounds[k], bounds[k + 1]) if weights[begin])
        bounds[k] = next(weighty, bounds[k])
    return bounds[:-1]


def _of_traced(
    model: torch.nn.Module, n: int, names: list[str] | None, given: tuple[Any, ...]
) -> list[torch.nn.Module]:
    if not given:
        raise UsageError(
            f"a {type(model).__name__} is no plain nn.Sequential, so torch traces its forward to cut it: "
            "give example= its arguments for one micro-batch, or write the stages as modules of your own"
        )
    if any(isinstance(p, DistributedTensor) for p in model.parameters()):
        raise UsageError("torch traces models of this process: cut the model, then send the parts to workers")
    if names is None:
        names = _blocks(model, n)
    else:
        known = [name for name, _ in model.named_modules() if name]
        for name in names:
            _index(known, name)
    spec = {name: _pipelining.SplitPoint.BEGINNING for name in names}
    with warnings.catch_warnings():
        # torch warns of the classes in its own graphs, which it copies.
        warnings.simplefilter("ignore", FutureWarning)
        # torch leaves its marks in the model that it cuts.
        own = copy.deepcopy(model)
        try:
            pipe = _pipelining.pipeline(own, mb_args=given, split_spec=spec)
        except RuntimeError as error:
            raise UsageError(
                f"torch cannot trace this {type(model).__name__}; write its stages as modules of your own: "
                f"{error}"
            ) from None
        return _traced(pipe, n, names)


def _traced(pipe: Any, n: int, names: list[str]) -> list[torch.nn.Module]:
    """Return the parts of a model that torch has traced."""
    if pipe.num_stages != n:
        raise UsageError(
            f"cut at {names}, torch's trace has {pipe.num_stages} parts, where {n} were asked for"
        )
    parts = [pipe.get_stage_module(k) for k in range(n)]
    require_apart(parts, "part")
    carry(pipe.split_gm.graph, parts)
    # What torch's trace has made is held by weak references, and so cannot be sent to a worker.
    return [copy.deepcopy(part) for part in parts]


def _blocks(model: torch.nn.Module, n: int) -> list[str]:
    """Return the names of blocks at which parts of about as many parameters begin.

    Blocks are the children of the longest `ModuleList` or `Sequential` of the model.
    """
    lists = [
        (name, one)
        for name, one in model.named_modules()
        if name and isinstance(one, (torch.nn.ModuleList, torch.nn.Sequential))
    ]
    name, found = max(lists, key=lambda pair: len(pair[1]), default=("", torch.nn.ModuleList()))
    if len(found) < n:
        raise UsageError(
            f"{type(model).__name__} has no list of at least {n} blocks to cut between; name where its parts "
            'begin: by=["layer2", "layer3"]'
        )
    weights: list[float] = [sum(p.numel() for p in block.parameters()) for block in found]
    inside = {id(p) for p in found.parameters()}
    # What comes before the blocks goes with the first one, and what comes after them with the last one.
    seen = False
    for p in model.parameters():
        if id(p) in inside:
            seen = True
        else:
            weights[-1 if seen else 0] += p.numel()
    return [f"{name}.{start}" for start in balanced(weights, n)]
