"""Every error of distruntime. The class says whose fault it is; the text says got, expected, what to do.

DistruntimeError
├── UsageError              the calling code asked for something that cannot be
│   ├── PlacementError      operands live on different places, or a place does not exist
│   ├── SessionClosed       a proxy or a call needs a session that has ended, or another process's
│   ├── NotSupportedError   a remote tensor cannot do this; the text names what can
│   ├── UntrustedError      what was published has no signature that this process trusts, or a wrong one
│   └── ConfigurationError  a setting, key or address is unusable
├── RemoteError             an operation failed on a worker; the class is also the original, IndexError
├── StreamCancelled         stream.cancel() dropped the work before it ran
├── WaitTimeout             a wait outlived the time that it was given; a TimeoutError, too
├── CheckpointError         a checkpoint is not there, is half, damaged, or of another version
├── NodeFailed              a worker died or cannot be reached
├── ConnectionFailed        no session came about: no answer, wrong key, wrong version, not in time
├── ProtocolError           the other side sent what the protocol does not allow
└── InternalError           a defect of distruntime: please report it
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DistruntimeError(Exception):
    """Base of every error that distruntime defines."""


class UsageError(DistruntimeError, RuntimeError):
    """The calling code asked for something that cannot be."""


class PlacementError(UsageError):
    """Operands live on different places, or a place does not exist."""


class SessionClosed(UsageError):
    """The session that this needs has ended, or belongs to another process."""


class NotSupportedError(UsageError, NotImplementedError):
    """A remote tensor cannot do this; the text names what can."""


class UntrustedError(UsageError):
    """What was published has no signature that this process trusts, or a wrong one.

    Nothing of it was opened.
    """


class ConfigurationError(UsageError, ValueError):
    """A setting, key or address is unusable."""


class RemoteError(DistruntimeError):
    """An operation failed on a worker.

    What is raised is also of the original exception's class. Its cause is the worker's traceback, if that
    shows code of yours.
    """


class StreamCancelled(DistruntimeError, RuntimeError):
    """The work was dropped by `dr.cancel` or `stream.cancel` before it ran, or its function interrupted."""


class WaitTimeout(DistruntimeError, TimeoutError):
    """A wait outlived the time that it was given; what it waited for may still happen."""


class CheckpointError(DistruntimeError, RuntimeError):
    """A checkpoint is not there, is half, damaged, or of another version."""


class NodeFailed(DistruntimeError, RuntimeError):
    """A worker died or cannot be reached; what lived there is lost."""


class ConnectionFailed(DistruntimeError, ConnectionError):
    """No session came about: nothing answers, the key or the version is wrong, or time ran out."""


class ProtocolError(DistruntimeError):
    """The other side sent what the protocol does not allow."""


class InternalError(DistruntimeError):
    """A defect of distruntime: please report it."""


def of_caller(error: Exception) -> Exception:
    """Return a torch error that the caller's arguments caused, marked as such and without its traceback."""
    error._of_caller = True  # type: ignore[attr-defined]
    return error.with_traceback(None)


# What has gone wrong with these is told by their text.
_OF_CALLER = (
    UsageError,
    RemoteError,
    NodeFailed,
    ConnectionFailed,
    CheckpointError,
    WaitTimeout,
    KeyboardInterrupt,
)


def is_of_caller(error: BaseException) -> bool:
    """Whether frames of this package in the traceback would only hide the line that matters."""
    return isinstance(error, _OF_CALLER) or hasattr(error, "_of_caller")


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal's handler has raised it, wherever it has come: it is the user's then, and no answer.

    Python calls a handler with the frame that it has interrupted, which nobody else is called with.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        seen = frame.f_locals
        given = [leaf for one in seen.values() for leaf in (one if type(one) is tuple else (one,))]
        found = frame.f_back is not None and any(one is frame.f_back for one in given)
        # Up to Python 3.12 a function's frame keeps this copy of its variables, the error among them: a cycle
        # that holds what the operator has used until the collector comes.
        if type(seen) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            seen.clear()
        if found:
            return True
        trace = trace.tb_next
    return False


def drop_frames(error: BaseException) -> None:
    """Take this package's frames from what the caller has done wrong; a bare `raise` then adds none.

    Only the outermost function of this package can do so: each one that an error passes on its way out adds
    its own frame.
    """
    if is_of_caller(error):
        forget_traceback(error)


def forget_traceback(error: BaseException) -> None:
    """Take the traceback from the error that is being handled."""
    error.__traceback__ = None
    # A bare `raise` of Python 3.10 takes the traceback that the interpreter has put aside, and Python code
    # cannot change that one.
    if sys.version_info < (3, 11) and sys.exc_info()[1] is error:
        # The call takes over one reference to each argument.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(type(error)))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
        ctypes.pythonapi.PyErr_SetExcInfo(ctypes.py_object(type(error)), ctypes.py_object(error), None)


def without_our_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which drops the frames of what the caller has done wrong.

    It stands around what users call and what torch calls. A misspelt argument is
    told which is meant, and a missing one which there are. On hot paths the functions do so themselves.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            drop_frames(error)
            # The call itself has failed: there is an argument too many, too few, or with another name.
            if type(error) is TypeError and error.__traceback__ and error.__traceback__.tb_next is None:
                forget_traceback(error)
                _suggest(error, function, args, kwargs)
            raise

    return call


def _suggest(
    error: TypeError, function: Callable[P, R], positional: Sequence[object], given: Iterable[str]
) -> None:
    """Have an error about arguments say which there are, or the one that is most alike an unknown one."""
    text = str(error)
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    owner = f"{function.__qualname__}()"
    if function.__name__ == "__init__" and positional:
        # The class that the caller has named may inherit its constructor from one with a name of ours.
        text = text.replace(owner, f"{type(positional[0]).__name__}()", 1)
    if "required positional argument" in text or "required keyword-only argument" in text:
        error.args = (f"{text}. It takes {', '.join(known)}",)
    # Newer Pythons name one themselves.
    if "unexpected keyword argument" in text and "Did you mean" not in text:
        unknown = next(name for name in given if name not in known)
        alike = difflib.get_close_matches(unknown, known, n=1)
        advice = f"Did you mean {alike[0]!r}?" if alike else f"It has {', '.join(known) or 'no arguments'}"
        error.args = (f"{text}. {advice}",)


__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "ConnectionFailed",
    "DistruntimeError",
    "InternalError",
    "NodeFailed",
    "NotSupportedError",
    "PlacementError",
    "ProtocolError",
    "RemoteError",
    "SessionClosed",
    "StreamCancelled",
    "UntrustedError",
    "UsageError",
    "WaitTimeout",
]
# Completion at a prompt offers these.
__dir__ = functools.partial(sorted, __all__)
