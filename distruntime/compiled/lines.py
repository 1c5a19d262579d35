"""The user's lines in a graph that Dynamo has traced: each operator is called from those that asked for it.

Lines of instructions are looked up in Python's frames, and so are the lines of a traceback. A graph's own
code has one frame, in a file that does not exist. So each operator is called through a function for each of
the frames that Dynamo noted, and these functions say that they stand at the noted lines.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import CodeType, FunctionType

from torch._ops import OperatorBase
from torch.fx import GraphModule

from ..log.line import inside

Call = Callable[..., object]
# An entry of a node's own stack trace, as Dynamo writes it.
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<number>\d+), in (?P<name>.+)$', re.MULTILINE)
# So many frames of one operator are noted: the innermost ones.
_MOST_FRAMES = 16


def with_lines(graph: GraphModule) -> Callable[..., object]:
    """Return the function of a copy of a graph whose operators are called from the user's lines."""
    lined = GraphModule(graph, copy.copy(graph.graph))
    for node in lined.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OperatorBase):
            node.target = _called_from(node.target, str(node.meta.get("stack_trace") or ""))
    lined.recompile()
    return lined.forward


def _called_from(call: Call, trace: str) -> Call:
    frames = [(found["file"], int(found["number"]), found["name"]) for found in _FRAME.finditer(trace)]
    for file, number, name in reversed(frames[-_MOST_FRAMES:]):
        code = _TEMPLATE.replace(co_filename=file, co_firstlineno=number, co_name=name)
        if not inside(code):
            call = _standing_at(code, call)
    return call


def _standing_at(code: CodeType, call: Call) -> Call:
    function = FunctionType(code, {"call": call}, "called_from_a_line")
    # What writes the graph's code looks for it.
    function.__module__ = __name__
    return function


# It stands in one line, which is then the line that it was given.
_TEMPLATE = (lambda *args, **kwargs: call(*args, **kwargs)).__code__  # type: ignore[name-defined]  # noqa: F821
