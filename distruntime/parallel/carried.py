"""Values that a traced part of a model does not use itself, but hands on to a later part.

torch's trace says for each part which values it takes, wherever they were made. In a pipeline a part takes
what the part before it has returned, all of it and in its order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

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
