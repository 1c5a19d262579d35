"""What a graph computes of tensors of this process: that is computed here at each call, and then travels.

Dynamo makes a tensor of a float that has changed between two calls, and a learning rate may be one from the
start: a tensor of a CPU without dimensions, which operators of any device take. A batch may come from here,
too, and the graph sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..log.handle import REMOTE_TYPES
from .constants import copy_needed, is_constant, is_here

_COPY = torch.ops.aten._to_copy.default
# These take what has dimensions from another device, too.
_COPIES = (_COPY, torch.ops.aten.copy.default)


class Parted(NamedTuple):
    """A graph that gets what was sent behind its own arguments, and the graph that computes and sends that.

    `given` are the arguments of this process. `returned` are the results of the whole that are computed
    here. In what is left, None stands at their places.
    """

    left: GraphModule
    here: GraphModule
    given: Sequence[int]
    returned: Sequence[int]

    def take(self, args: list[object]) -> Sequence[torch.Tensor]:
        """Replace what is this process's among `args` by what was sent; return the results of here."""
        own = [args[k] for k in self.given]
        for k in reversed(self.given):
            del args[k]
        with torch.no_grad(), torch._C._DisableAutocast():
            sent, returned = self.here.forward(*own)
        args += sent
        return returned  # type: ignore[no-any-return]

    def give(self, results: Sequence[object], found: Sequence[torch.Tensor]) -> Sequence[object]:
        """Put what was computed here among the results."""
        if not self.returned:
            return results
        given = [*results]
        for k, value in zip(self.returned, found):
            given[k] = value
        return given


def part(module: GraphModule) -> Parted | None:
    """Take out of a graph what it computes here; return None if that is nothing, or if it cannot."""
    own: dict[Node, None] = {}
    constant: set[Node] = set()
    for node in module.graph.nodes:
        if is_constant(node, constant):
            constant.add(node)
        elif is_here(node) and (node.op == "placeholder" or _is_computed(node, own, constant)):
            own[node] = None
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    given = [k for k, node in enumerate(placeholders) if node in own]
    output = next(node for node in module.graph.nodes if node.op == "output")
    results = list(output.args[0])
    # Whoever calls the graph may write to a constant that it returns, so each call computes it.
    apart = {*own, *(one for one in constant if one.op == "call_function" and is_here(one))}
    returned = [k for k, one in enumerate(results) if one in apart]
    if not own and not returned:
        return None
    users = {node: [user for user in node.users if user not in own and user.op != "output"] for node in own}
    edge = [node for node in own if users[node]]
    # A fake for each, as it is once it is sent.
    sent = [found for node in edge if (found := _sent(node, users[node])) is not None]
    if len(sent) < len(edge):
        return None
    here, left = Graph(), Graph()
    made: dict[Node, Node] = {}
    travels: dict[Node, Node] = {}
    # Not "lazy", to which torch copies what lies transposed as a contiguous tensor.
    devices = dict(zip(edge, (torch.device("remote", found.device.index) for found in sent)))
    for node in [*own, *(results[k] for k in returned)]:
        copy_needed(node, made, here)
        # It travels at once: a graph writes to its arguments last.
        if node in devices and node not in travels:
            travels[node] = here.call_method("to", (made[node], devices[node]))
    here.output((tuple(travels[node] for node in edge), tuple(made[results[k]] for k in returned)))
    _convert_quickly(here)

    kept: dict[Node, Node] = {}
    for node in placeholders:
        if node not in own:
            kept[node] = left.node_copy(node)
    for node, found in zip(edge, sent):
        kept[node] = left.placeholder(f"sent_{node.name}")
        kept[node].meta["val"] = found
    for node in module.graph.nodes:
        # A constant comes with what reads it.
        if node is not output and node not in own and node not in constant:
            copy_needed(node, kept, left)
    for k, one in enumerate(results):
        if k in returned:
            results[k] = None
        elif isinstance(one, Node):
            copy_needed(one, kept, left)
            results[k] = kept[one]
    last = left.output(tuple(results))
    last.meta = {**output.meta}
    return Parted(GraphModule(module, left), GraphModule(module, here), given, returned)


def _convert_quickly(graph: Graph) -> None:
    """Replace conversions that torch writes in Python: each took 50 us, and its operator takes 2."""
    for node in graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            value, dtype = node.args
            node.target, node.args, node.kwargs = _COPY, (value,), {"dtype": dtype}


def _is_computed(node: Node, own: dict[Node, None], constant: set[Node]) -> bool:
    """Whether an operator reads this process's tensors and constants only, or nothing."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(one in own or one in constant for one in node.all_input_nodes)


def _sent(node: Node, users: Sequence[Node]) -> torch.Tensor | None:
    """Return what a value is where others use it, as a fake; None if it cannot be sent before.

    Remote tensors meet numbers only. What has dimensions is copied by an operator of the graph's own.
    """
    found = [_remote_value(user) for user in users]
    places = {None if one is None else one.device for one in found}
    if node.meta["val"].dim() and any(user.target not in _COPIES for user in users):
        return None
    if None in places or (len(places) > 1 and any(user.target is not _COPY for user in users)):
        return None
    return found[0]


def _remote_value(node: Node) -> torch.Tensor | None:
    """Return a remote tensor that an operator gives, as a fake."""
    value = node.meta.get("val")
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, torch.Tensor) and one.device.type in REMOTE_TYPES:
            return one
    return None
