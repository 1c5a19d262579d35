"""Magics of IPython and Jupyter: `%load_ext distruntime`, then `%%on 1`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Protocol

from .errors import DistruntimeError, UsageError, drop_frames
from .log.handle import Place
from .session.spelling import on


class _Compiler(Protocol):
    """What IPython compiles cells with."""

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Make a cell's lines known to tracebacks, and return the file name that stands for it."""


class Shell(Protocol):
    """A prompt of IPython, or a kernel of Jupyter."""

    user_ns: dict[str, object]
    execution_count: int
    compile: _Compiler

    def transform_cell(self, raw_cell: str) -> str:
        """Return a cell as Python."""

    def register_magic_function(self, func: object, magic_kind: str = ..., magic_name: str = ...) -> None:
        """Add a magic."""


def load_ipython_extension(ipython: Shell) -> None:
    """Add `%%on` to a prompt or a notebook: IPython calls it for `%load_ext distruntime`.

    `%%on 1`, `%%on 1 cuda:0` and `%%on NAME` run a cell whose new tensors go there. NAME is a place, a mesh
    or a stream of yours.
    """

    def run_on(line: str, cell: str) -> object:
        try:
            place = _context(line.split(), ipython)
        except DistruntimeError as error:
            # The cell has not begun, so no frame is the user's.
            drop_frames(error)
            raise
        with place:
            return _run(cell, ipython)

    run_on.__doc__ = "Run a cell whose new tensors go to a node: %%on 1, %%on 1 cuda:0, %%on NAME."
    ipython.register_magic_function(run_on, "cell", "on")


def _context(words: list[str], shell: Shell) -> AbstractContextManager[object]:
    match words:
        case [number] if number.isdigit():
            return on(int(number))
        case [number, device] if number.isdigit():
            return on(int(number), device)
        case [name] if name in shell.user_ns:
            found = shell.user_ns[name]
            if isinstance(found, Place):
                return on(found)
            if isinstance(found, AbstractContextManager):
                return found
    raise UsageError(
        f"got %%on {' '.join(words)}".rstrip() + ", expected a node's number, as %%on 1 or %%on 1 cuda:0, or "
        "the name of a place, a mesh or a stream of yours"
    )


_AWAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _outside_functions(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for one in nodes:
        yield one
        if not isinstance(one, _FUNCTIONS):
            yield from _outside_functions(ast.iter_child_nodes(one))


def _run(cell: str, shell: Shell) -> object:
    """Run a cell in the user's namespace; return the value of its last expression, which IPython shows."""
    # The cell's first line is the magic's own, and a traceback counts it.
    source = "\n" + shell.transform_cell(cell)
    # Some versions of IPython count a cell before it runs, and others after it: the list of inputs has it.
    typed = shell.user_ns.get("In")
    number = len(typed) - 1 if isinstance(typed, list) else shell.execution_count
    name = shell.compile.cache(source, number, raw_code=cell)
    body = ast.parse(source, name).body
    last = (
        body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    )
    found = _outside_functions([*body, *([last] if last else [])])
    if any(isinstance(one, _AWAITS) or getattr(one, "is_async", False) for one in found):
        raise UsageError(
            "got a cell with await, async for or async with, which %%on does not run: leave %%on out, and "
            "write `with dr.on(1):` around what is to be there"
        )
    statements: CodeType = compile(ast.Module(body, []), name, "exec")
    exec(statements, shell.user_ns)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value: object = eval(compile(ast.Expression(last.value), name, "eval"), shell.user_ns)
    return value
