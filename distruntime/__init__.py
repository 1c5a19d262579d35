"""Remote PyTorch tensors: one process drives many workers that own the real ones. See README.md.

Importing changes nothing but what is printed behind some errors, and offers `torch.compile` one more backend.
`init_master_worker` opens a session.
"""

from __future__ import annotations

import importlib
import typing

from . import first_use as _first_use
from . import hints as _hints
from .compiled import name as _name
from .version import __version__ as __version__

# A public name is imported when it is first used. The import of torch takes two seconds, and so
# `python -m distruntime --help` can do without it. A worker needs the wire and the errors alone, and imports
# nothing else of this package. `first_use.sources` reads the names off this block.
if typing.TYPE_CHECKING:
    from .backend.random import manual_seed
    from .checkpoint.load import load
    from .checkpoint.save import save
    from .checkpoint.training import run_with_restarts
    from .cluster.as_cuda import takeover
    from .cluster.connect import detach, init_master_worker, is_initialized, shutdown
    from .cluster.memory import Memory, memory
    from .cluster.nodes import NodeInfo, nodes
    from .cluster.settings import Settings, config
    from .cluster.stacks import stacks
    from .cluster.user_session import Session
    from .cluster.workers import add_worker, restart
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
    from .compiled.compiled_graphs import CompiledGraph, compiled_graphs
    from .errors import (
        CheckpointError,
        ConfigurationError,
        ConnectionFailed,
        DistruntimeError,
        InternalError,
        NodeFailed,
        NonFiniteError,
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
    from .launching.changes import NodeChange, on_nodes
    from .layers import nn
    from .log.handle import Place
    from .magics import load_ipython_extension
    from .mesh import lines
    from .mesh.layout import Layout
    from .mesh.mesh import DeviceMesh, init_device_mesh
    from .mesh.shards import from_shards, shards
    from .parallel.data_parallel import DataParallel
    from .parallel.experts import Experts
    from .parallel.pipeline import Pipeline, pipeline
    from .parallel.sharded_ema import ShardedEMA
    from .parallel.sharded_optimizer import ShardedOptimizer
    from .parallel.split import split
    from .programs.program import Program, program
    from .publishing.listing import Publication, Publications
    from .publishing.publish import lookup, names, publish, unpublish
    from .python.files import pull, push
    from .python.loader import DataLoader, data_loader
    from .python.objects import RemoteObject
    from .python.pretrained import from_pretrained
    from .python.remote import RemoteFunction, remote
    from .python.remote_module import RemoteModule
    from .python.shipping import Comparison, compare, ship
    from .python.spmd import SpmdFunction, spmd
    from .session.launcher import Launcher, LaunchSpec, WorkerProcess
    from .session.placing import device, node, on, place, set_place
    from .session.stalls import Stall, get_sync_debug_mode, set_sync_debug_mode, stalls
    from .streams import nvtx
    from .streams.cancel import cancel
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
    from .tensors.replace_modules import replace_modules
    from .tensors.tensor import DistributedTensor
    from .timeline.detect_nan import detect_nan
    from .timeline.memory_snapshot import memory_snapshot, record_memory_history
    from .timeline.profile_model import ModelProfile, ModuleProfile, profile_model
    from .timeline.trace import Trace, trace
    from .timeline.why_slow import WhySlow, why_slow
    from .wire.data_channel import Capabilities, DataChannel, Membership, Reduction, register_data_channel


_SOURCES = _first_use.sources(__file__)
# `import distruntime.functional` is for users, as `torch.nn.functional` is. The folders are rooms of the
# house, and for nobody else.
_MODULES = {
    "functional": "collectives.functional",
    "lines": "mesh.lines",
    "nn": "layers.nn",
    "nvtx": "streams.nvtx",
    "primitives": "collectives.primitives",
}
_first_use.publish(__name__, _MODULES)
_hints.install()
_name.install_name()


def __getattr__(name: str) -> object:
    # `testing` is a folder that is public, so its name needs no other place.
    if name in _MODULES or name == "testing":
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _SOURCES:
        try:
            raise AttributeError(_first_use.missing(__name__, name, __all__), name=name, obj=None)
        except AttributeError as error:
            # A bare `raise` then adds no frame of this file.
            importlib.import_module(".errors", __name__).forget_traceback(error)
            raise
    where, called = _SOURCES[name]
    # The imports below take long.
    with importlib.import_module(".backend.on_import", __name__).rare_collections():
        globals()[name] = found = getattr(importlib.import_module(where, __name__), called)
    return found


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
    "Comparison",
    "CompiledGraph",
    "ConfigurationError",
    "ConnectionFailed",
    "DataChannel",
    "DataLoader",
    "DataParallel",
    "DeviceMesh",
    "DistributedTensor",
    "DistruntimeError",
    "DoubleTensor",
    "Event",
    "Experts",
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
    "ModelProfile",
    "ModuleProfile",
    "NodeChange",
    "NodeFailed",
    "NodeInfo",
    "NonFiniteError",
    "NotSupportedError",
    "Partition",
    "Pipeline",
    "Place",
    "PlacementError",
    "ProcessGroup",
    "Program",
    "ProtocolError",
    "Publication",
    "Publications",
    "ReduceOp",
    "Reduction",
    "RemoteError",
    "RemoteFunction",
    "RemoteModule",
    "RemoteObject",
    "Session",
    "SessionClosed",
    "Settings",
    "ShardedEMA",
    "ShardedOptimizer",
    "ShortTensor",
    "SpmdFunction",
    "Stall",
    "Stream",
    "StreamCancelled",
    "Trace",
    "UntrustedError",
    "UsageError",
    "WaitTimeout",
    "WhySlow",
    "Work",
    "WorkerProcess",
    "add_worker",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "arange",
    "barrier",
    "broadcast",
    "cancel",
    "compare",
    "compiled_graphs",
    "config",
    "current_stream",
    "data_loader",
    "default_stream",
    "destroy_process_group",
    "detach",
    "detect_nan",
    "device",
    "empty",
    "eye",
    "fetch",
    "fetch_async",
    "from_pretrained",
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
    "load_ipython_extension",
    "logspace",
    "lookup",
    "manual_seed",
    "memory",
    "memory_snapshot",
    "names",
    "new_group",
    "nn",
    "node",
    "nodes",
    "nvtx",
    "on",
    "on_nodes",
    "ones",
    "pipeline",
    "place",
    "premul_sum",
    "primitives",
    "profile_model",
    "program",
    "publish",
    "pull",
    "push",
    "rand",
    "randint",
    "randn",
    "randperm",
    "record_memory_history",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_data_channel",
    "remote",
    "replace_modules",
    "restart",
    "run_with_restarts",
    "save",
    "scatter",
    "send",
    "set_implicit_waits",
    "set_place",
    "set_sync_debug_mode",
    "shards",
    "ship",
    "shutdown",
    "split",
    "spmd",
    "stacks",
    "stalls",
    "stream",
    "synchronize",
    "takeover",
    "tensor",
    "testing",
    "trace",
    "unpublish",
    "why_slow",
    "zeros",
]
