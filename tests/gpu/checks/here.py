"""A process without a session, in which code runs on this machine's own device, to compare a worker with.

A session gives torch a second kind of accelerator, and then torch computes no gradients on local CUDA tensors
in that process: its engine fails with "opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED" (issue
161129 of PyTorch). So whatever wants local gradients runs in another process, which never opens a session.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

# What torch says when it is wrong itself. It is no result that a worker could be compared with.
_TORCH_IS_WRONG = "INTERNAL ASSERT FAILED"
_ENDING = 10.0


class NoReference(AssertionError):
    """What a worker is to be compared with cannot be had."""


class Request(NamedTuple):
    """A call that the process was asked for."""

    number: int
    process: BaseProcess
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Here:
    """The process. It starts with the first call, and another one takes its place if it ends."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._asked = 0

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module there; return its result, with all tensors on the CPU.

        What it raises is raised here. An internal assert of torch, a lost GPU and the end of the process
        raise `NoReference`.
        """
        return self.answer(self.ask(function, *arguments))

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Request:
        """Have a function called there. Return at once; `answer` gives the result.

        Answers come in the order of the requests. One that nobody took is dropped.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._process is not None and self._pipe is not None
        self._asked += 1
        call = pickle.dumps((function, arguments))
        self._pipe.send_bytes(pickle.dumps((self._asked, call)))
        return Request(self._asked, self._process, function, arguments)

    def answer(self, request: Request) -> Any:
        """Block for the result of a request."""
        if request.process is not self._process:
            # That process was ended before it came to this.
            request = self.ask(request.function, *request.arguments)
        assert self._pipe is not None
        number = 0
        while number != request.number:
            try:
                number, worked, result, lost = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                code = self.end()
                raise NoReference(f"the process without a session has ended with code {code}") from None
        if lost:
            # Nothing can be computed there any more.
            self.end()
            raise NoReference(f"the process without a session has lost its GPU: {lost}")
        answer = _loaded(result)
        if worked:
            return answer
        if _TORCH_IS_WRONG in str(answer):
            raise NoReference(f"without a session it fails: {answer}")
        raise answer

    def end(self) -> int | None:
        """End the process; return its exit code."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is None:
            return None
        # One that ends by itself has a moment to do so, as its code tells why.
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join(_ENDING)
        return process.exitcode

    def _start(self) -> None:
        self.end()
        # A forked process cannot use CUDA where its parent has, and would have the session of its parent.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="here", daemon=True)
        self._process.start()
        theirs.close()


def torch_is_wrong(text: str) -> bool:
    """Whether an error's text is that of an internal assert of torch."""
    return _TORCH_IS_WRONG in text


def _serve(pipe: Connection) -> None:
    """Answer requests until the other process is gone."""
    # The other process tells what there is to tell.
    warnings.simplefilter("ignore")
    while True:
        try:
            number, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        worked, lost = True, ""
        try:
            function, arguments = pickle.loads(call)
            # CUDA tensors stay in this process.
            result = _saved(tree_map_only(torch.Tensor, _brought, function(*arguments)))
        except Exception as error:
            worked, result = False, _sent(error)
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError as error:
            lost = str(error)
        pipe.send_bytes(pickle.dumps((number, worked, result, lost)))


def _brought(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _sent(error: Exception) -> bytes:
    """Return the error as bytes; its kind and text where it cannot be sent itself."""
    try:
        sent = _saved(error.with_traceback(None))
        _loaded(sent)
        return sent
    except Exception:
        return _saved(RuntimeError(f"{type(error).__name__}: {error}"))


def _saved(value: Any) -> bytes:
    # A plain pickle cannot hold tensors of all dtypes, and those of multiprocessing need shared memory.
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(saved: bytes) -> Any:
    with warnings.catch_warnings():
        # Sparse tensors tell that they are new.
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(saved), weights_only=False)
