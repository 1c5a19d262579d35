"""Remote PyTorch tensors: one process drives many workers that own the real ones. See README.md.

Importing changes nothing; `init_master_worker` opens a session.
"""

from __future__ import annotations

from .config import Settings, config
from .connect import init_master_worker, is_initialized, shutdown
from .errors import (
    ConfigurationError,
    ConnectionFailed,
    DistruntimeError,
    InternalError,
    NodeFailed,
    NotSupportedError,
    PlacementError,
    ProtocolError,
    RemoteError,
    SessionClosed,
    StreamCancelled,
    UsageError,
    WaitTimeout,
)
from .event import Event
from .factories import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)
from .fetch import Fetched, fetch, fetch_async
from .handle import Place
from .memory import Memory, memory
from .placing import device, node, on, place, set_place
from .random import manual_seed
from .session import Session
from .stall import Stall, get_sync_debug_mode, set_sync_debug_mode, stalls
from .stream import Stream, current_stream, default_stream, set_implicit_waits, stream, synchronize
from .table import NodeInfo, nodes
from .tensor import DistributedTensor

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])  # what completion at a prompt offers


__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "ConfigurationError",
    "ConnectionFailed",
    "DistributedTensor",
    "DistruntimeError",
    "DoubleTensor",
    "Event",
    "Fetched",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "InternalError",
    "LongTensor",
    "Memory",
    "NodeFailed",
    "NodeInfo",
    "NotSupportedError",
    "Place",
    "PlacementError",
    "ProtocolError",
    "RemoteError",
    "Session",
    "SessionClosed",
    "Settings",
    "ShortTensor",
    "Stall",
    "Stream",
    "StreamCancelled",
    "UsageError",
    "WaitTimeout",
    "arange",
    "config",
    "current_stream",
    "default_stream",
    "device",
    "empty",
    "eye",
    "fetch",
    "fetch_async",
    "full",
    "get_sync_debug_mode",
    "init_master_worker",
    "is_initialized",
    "linspace",
    "logspace",
    "manual_seed",
    "memory",
    "node",
    "nodes",
    "on",
    "ones",
    "place",
    "rand",
    "randint",
    "randn",
    "randperm",
    "set_implicit_waits",
    "set_place",
    "set_sync_debug_mode",
    "shutdown",
    "stalls",
    "stream",
    "synchronize",
    "tensor",
    "zeros",
]
