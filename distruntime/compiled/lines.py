"""A traced graph, operator by operator, each called from the lines of the user's that asked for it.

Lines of instructions are looked up in Python's frames, and so are the lines of a traceback. A graph's own
code has one frame, in a file that does not exist. So each operator is called through a function for each of
the frames that Dynamo has noted, and these functions say that they stand at the noted lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType

from torch._ops import OperatorBase
from torch.fx import GraphModule, Interpreter, Node

from ..log.line import inside

Call = Callable[..., object]
# An entry of a node's own stack trace, as Dynamo writes it.
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<number>\d+), in (?P<name>.+)$', re.MULTILINE)
# So many frames of one operator are noted: the innermost ones.
_MOST_FRAMES = 16


class Lined:
    """A graph that runs from the user's lines, as often as one likes and in several threads."""

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._calls = {
            node: _called_from(node.target, str(node.meta.get("stack_trace") or ""))
            for node in graph.graph.nodes
            if node.op == "call_function" and isinstance(node.target, OperatorBase)
        }

    def run(self, args: list[object]) -> object:
        """Return what the graph returns. Empties `args`, and lets go of each value behind its last use."""
        return _Run(self._graph, self._calls).boxed_run(args)


class _Run(Interpreter):
    def __init__(self, graph: GraphModule, calls: Mapping[Node, Call]) -> None:
        super().__init__(graph)
        self._calls = calls
        # What an operator raises would get another text.
        self.extra_traceback = False

    def run_node(self, n: Node) -> object:
        call = self._calls.get(n)
        if call is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return call(*args, **kwargs)


def _called_from(call: Call, trace: str) -> Call:
    frames = [(found["file"], int(found["number"]), found["name"]) for found in _FRAME.finditer(trace)]
    for file, number, name in reversed(frames[-_MOST_FRAMES:]):
        code = _TEMPLATE.replace(co_filename=file, co_firstlineno=number, co_name=name)
        if not inside(code):
            call = _standing_at(code, call)
    return call


def _standing_at(code: CodeType, call: Call) -> Call:
    return FunctionType(code, {"call": call}, code.co_name)


# It stands in one line, which is then the line that it was given.
_TEMPLATE = (lambda *args, **kwargs: call(*args, **kwargs)).__code__  # type: ignore[name-defined]  # noqa: F821
