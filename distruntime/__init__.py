"""Remote PyTorch tensors: one process drives many workers that own the real ones. See README.md.

Importing changes nothing; `init_master_worker` opens a session.
"""

from __future__ import annotations

import importlib
import sys
import typing

from .backend.random import manual_seed
from .checkpoint.load import load
from .checkpoint.save import save
from .checkpoint.training import run_with_restarts
from .cluster.connect import detach, init_master_worker, is_initialized, shutdown
from .cluster.memory import Memory, memory
from .cluster.nodes import NodeInfo, nodes
from .cluster.restart import restart
from .cluster.settings import Settings, config
from .collectives import functional, primitives
from .collectives.group import ProcessGroup, new_group
from .collectives.in_place import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    destroy_process_group,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from .collectives.partition import Partition
from .collectives.point_to_point import irecv, isend, recv, send
from .collectives.reductions import ReduceOp, premul_sum
from .collectives.work import Work
from .errors import (
    CheckpointError,
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
    UntrustedError,
    UsageError,
    WaitTimeout,
)
from .log.handle import Place
from .mesh.layout import Layout
from .session.launcher import Launcher, LaunchSpec, WorkerProcess
from .session.placing import device, node, on, place, set_place
from .session.session import Session
from .session.stalls import Stall, get_sync_debug_mode, set_sync_debug_mode, stalls
from .streams.stream import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_implicit_waits,
    stream,
    synchronize,
)
from .tensors.factories import (
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
from .tensors.fetch import Fetched, fetch, fetch_async
from .tensors.tensor import DistributedTensor
from .wire.data_channel import Capabilities, DataChannel, Membership, Reduction, register_data_channel

if typing.TYPE_CHECKING:
    from .mesh import lines
    from .mesh.mesh import DeviceMesh, init_device_mesh
    from .mesh.shards import from_shards, shards
    from .publishing.listing import Publication, Publications
    from .publishing.publish import lookup, names, publish, unpublish

__version__ = "0.1.0"

# Meshes need torch.distributed.tensor, and its import takes 0.7 s of a processor, in every worker's start
# too. So only programs that make a mesh pay for it. Signatures need PyNaCl, which no worker does.
_LATER = {
    **dict.fromkeys(("DeviceMesh", "init_device_mesh"), ".mesh.mesh"),
    **dict.fromkeys(("from_shards", "shards"), ".mesh.shards"),
    **dict.fromkeys(("Publication", "Publications"), ".publishing.listing"),
    **dict.fromkeys(("lookup", "names", "publish", "unpublish"), ".publishing.publish"),
}
# `import distruntime.functional` is for users, as `torch.nn.functional` is. The folders are rooms of the
# house, and for nobody else.
sys.modules[f"{__name__}.functional"], sys.modules[f"{__name__}.primitives"] = functional, primitives


def __getattr__(name: str) -> object:
    if name == "lines":
        sys.modules[f"{__name__}.lines"] = module = importlib.import_module(".mesh.lines", __name__)
        return module
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name], __name__)
    globals().update(
        (found, getattr(module, found)) for found, where in _LATER.items() if where == _LATER[name]
    )
    return globals()[name]


def __dir__() -> list[str]:
    # Completion at a prompt offers these.
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])


__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "Capabilities",
    "CharTensor",
    "CheckpointError",
    "ConfigurationError",
    "ConnectionFailed",
    "DataChannel",
    "DeviceMesh",
    "DistributedTensor",
    "DistruntimeError",
    "DoubleTensor",
    "Event",
    "Fetched",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "InternalError",
    "LaunchSpec",
    "Launcher",
    "Layout",
    "LongTensor",
    "Membership",
    "Memory",
    "NodeFailed",
    "NodeInfo",
    "NotSupportedError",
    "Partition",
    "Place",
    "PlacementError",
    "ProcessGroup",
    "ProtocolError",
    "Publication",
    "Publications",
    "ReduceOp",
    "Reduction",
    "RemoteError",
    "Session",
    "SessionClosed",
    "Settings",
    "ShortTensor",
    "Stall",
    "Stream",
    "StreamCancelled",
    "UntrustedError",
    "UsageError",
    "WaitTimeout",
    "Work",
    "WorkerProcess",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "arange",
    "barrier",
    "broadcast",
    "config",
    "current_stream",
    "default_stream",
    "destroy_process_group",
    "detach",
    "device",
    "empty",
    "eye",
    "fetch",
    "fetch_async",
    "from_shards",
    "full",
    "functional",
    "gather",
    "get_sync_debug_mode",
    "init_device_mesh",
    "init_master_worker",
    "irecv",
    "is_initialized",
    "isend",
    "lines",
    "linspace",
    "load",
    "logspace",
    "lookup",
    "manual_seed",
    "memory",
    "names",
    "new_group",
    "node",
    "nodes",
    "on",
    "ones",
    "place",
    "premul_sum",
    "primitives",
    "publish",
    "rand",
    "randint",
    "randn",
    "randperm",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_data_channel",
    "restart",
    "run_with_restarts",
    "save",
    "scatter",
    "send",
    "set_implicit_waits",
    "set_place",
    "set_sync_debug_mode",
    "shards",
    "shutdown",
    "stalls",
    "stream",
    "synchronize",
    "tensor",
    "unpublish",
    "zeros",
]
