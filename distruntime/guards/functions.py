"""What is known of functions that are no Python: which ones give what their arguments alone decide."""

from __future__ import annotations

import collections
import functools
import os
import types
import weakref
from _ctypes import CFuncPtr

import torch

# Functions of these modules and methods of their types are functions of their arguments, but those that draw
# random numbers.
_MODULES = frozenset(
    "builtins math cmath operator itertools functools collections _struct struct bisect heapq statistics "
    "unicodedata zlib binascii json _json pickle copyreg abc _abc typing re _sre _string string torch numpy "
    "decimal datetime weakref contextvars array types enum ast copy hashlib _hashlib _sha2 _md5 _imp "
    "_operator _functools _collections _bisect _heapq _statistics _pickle _datetime _weakref _contextvars "
    "_typing fractions mmap ctypes _ctypes sys".split()
)
# These of them are not.
_NOT = frozenset(
    "input open now today utcnow default_rng seed initial_seed urandom read readline readlines recv".split()
)
_METHODS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType),
)
# Nothing that these of Python's own modules do decides what a function computes.
_LIBRARY = os.path.dirname(os.__file__)
_UNREAD = tuple(os.path.join(_LIBRARY, name) for name in ("importlib", "traceback", "linecache", "tokenize"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Where torch finds out what to call for an operator, and where it numbers its hooks.
_UNREAD += tuple(os.path.join(_TORCH, name) for name in ("_library", "_ops.py", "utils/hooks.py"))
# What these call by themselves (a clock, a lock) decides nothing. What they read may.
_TRUSTED = tuple(os.path.join(_LIBRARY, name) for name in ("logging", "warnings", "threading", "weakref"))


def is_c(function: object) -> bool:
    """Whether a callable is a function or a method that is no Python."""
    return isinstance(function, _METHODS)


def is_foreign(function: object) -> bool:
    """Whether a function is one of a library that `ctypes` has loaded."""
    return isinstance(function, CFuncPtr)


def name_of(function: object) -> str:
    """Return what a user calls a function: "time.time"."""
    module = _module(function)
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__)
    return f"{module}.{name}" if module not in ("", "builtins") else str(name)


def _module(function: object) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    named = getattr(function, "__module__", None)
    if isinstance(named, str):
        return named
    # A method is one of the class that has it, which may be a base of the object's own.
    name = getattr(function, "__name__", "")
    kind = owner if isinstance(owner, type) else getattr(function, "__objclass__", type(owner))
    return next(
        (base.__module__ for base in kind.__mro__ if isinstance(vars(base).get(name), _METHODS)), "builtins"
    )


def of_arguments(function: object) -> bool:
    """Whether a function gives what its arguments decide, and nothing else."""
    name = getattr(function, "__name__", "")
    if is_foreign(function):
        return False
    return (_module(function).split(".")[0] in _MODULES and name not in _NOT) or name == "allocate_lock"


def of_torch(function: object) -> bool:
    """Whether a function is torch's: a number that it takes is a word of an instruction, if it matters."""
    return _module(function).startswith("torch")


def adds(function: object) -> bool:
    """Whether a function of torch adds something to its first argument."""
    return of_torch(function) and getattr(function, "__name__", "") in ("add_", "__iadd__", "_foreach_add_")


def class_of_method(function: object) -> type:
    """Return the class whose method a C function is. Python calls some with their object as an argument."""
    found: type = getattr(function, "__objclass__", type(getattr(function, "__self__", None)))
    return found


def leaves_values(function: object) -> bool:
    """Whether a function looks at no value of the tensors that it gets, but where that is followed."""
    name = getattr(function, "__name__", "")
    if of_torch(function):
        return name in _LEAVING
    return issubclass(class_of_method(function), _CONTAINERS) and name not in _COMPARING


_CONTAINERS = (list, dict, set, collections.deque)
_COMPARING = frozenset(
    "sort index count remove __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__".split()
)
_LEAVING = frozenset(
    "item _group_tensors_by_device_and_dtype dim numel nelement size stride "
    "is_floating_point is_complex is_contiguous element_size data_ptr get_device storage_offset is_inference "
    "is_same_size ndimension __hash__ requires_grad_".split()
)


def gives_again(function: object, arguments: tuple[object, ...]) -> bool:
    """Whether a function may be asked again at each call what it gives now."""
    name = getattr(function, "__name__", "")
    if isinstance(function, weakref.ReferenceType):
        return True
    if arguments and isinstance(arguments[0], torch._C.Generator):
        return len(arguments) == 1 and name == "initial_seed"
    if not all(isinstance(one, _PLAIN) for one in arguments):
        return False
    module = _module(function)
    asks = name.lstrip("_").startswith(("get_", "is_", "has_", "initial_seed"))
    # One that was put there for the recording is no other time's.
    asks = asks and "<locals>" not in getattr(function, "__qualname__", "")
    setting = asks and module.startswith(("torch", __name__.partition(".")[0]))
    here = module in ("posix", "nt", "_thread") and name in ("getpid", "getcwd", "get_ident")
    return setting or here or (module == "sys" and name.startswith("get") and not arguments)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def starts_thread(function: object) -> bool:
    """Whether a function lets Python run where nobody looks at what it reads."""
    return _module(function) == "_thread" and getattr(function, "__name__", "").startswith("start_")


def draws(function: object) -> bool:
    """Whether a function belongs to a generator of random numbers of this process."""
    module = _module(function)
    return module in ("random", "_random") or module.startswith("numpy.random")


@functools.lru_cache(maxsize=16384)
def is_traced(file: str) -> bool:
    """Whether what code of a file reads is looked at: all but what this package reads."""
    return not file.startswith(_UNREAD) and (file.startswith(_TORCH) or not file.startswith(_OWN))


@functools.lru_cache(maxsize=16384)
def is_trusted(file: str) -> bool:
    """Whether what code of a file calls depends on what it reads: torch's does."""
    return file.startswith((_TORCH, *_TRUSTED))


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
