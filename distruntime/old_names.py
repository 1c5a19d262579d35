"""Where the names are that once stood right below the package. The old spellings work, and warn.

No name is added here: a new one begins in its part. `GONE` has names that are no more.
"""

from __future__ import annotations

_MOVED = {
    "data": "DataLoader data_loader",
    "distributed": (
        "Capabilities DataChannel Membership ProcessGroup ReduceOp Reduction Work all_gather "
        "all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier broadcast "
        "destroy_process_group gather irecv isend new_group premul_sum recv reduce reduce_scatter "
        "reduce_scatter_tensor register_data_channel scatter send"
    ),
    "errors": (
        "CheckpointError ConfigurationError ConnectionFailed InternalError NodeFailed "
        "NotSupportedError PlacementError ProtocolError RemoteError SessionClosed StreamCancelled "
        "UntrustedError UsageError WaitTimeout"
    ),
    "factories": (
        "BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor "
        "LongTensor ShortTensor"
    ),
    "mesh": "DeviceMesh Partition",
    "parallel": "DataParallel Experts Pipeline pipeline split",
    "profiler": (
        "CompiledGraph Stall Trace WhySlow compiled_graphs "
        "get_sync_debug_mode set_sync_debug_mode stacks stalls"
    ),
    "types": (
        "Fetched Memory NodeInfo Place Program Publication Publications RemoteFunction RemoteObject "
        "Session Settings SpmdFunction"
    ),
    "workers": "LaunchSpec Launcher WorkerProcess add_worker ship",
}

PARTS = {name: part for part, names in _MOVED.items() for name in names.split()}

# These features have gone, and this is what does it now.
GONE = {
    "NonFiniteError": "docs/looking.md has a mode of ten lines that finds the first NaN",
    "detect_nan": "docs/looking.md has a mode of ten lines that finds the first NaN",
    "ModelProfile": "docs/looking.md has a function of ten lines that times each layer",
    "ModuleProfile": "docs/looking.md has a function of ten lines that times each layer",
    "profile_model": "docs/looking.md has a function of ten lines that times each layer",
    "memory_snapshot": "docs/looking.md has it by torch's own functions, which run on the worker",
    "record_memory_history": "docs/looking.md has it by torch's own functions, which run on the worker",
    "Layout": "docs/meshes.md has a mesh's groups by modes: several dimensions are one group",
    "ShardedOptimizer": "docs/meshes.md has the state in shares, by DTensor or by fully_shard",
    "ShardedEMA": "docs/meshes.md has the moving average in shares, in five lines",
    "replace_modules": "docs/looking.md has it in three lines, by torch's set_submodule",
    "from_pretrained": "docs/data.md has it by transformers' own, which reads the folder at the worker",
    "push": "docs/data.md has it in two functions of a line each",
    "pull": "docs/data.md has it in two functions of a line each",
    "NodeChange": "docs/launching.md says how a program sees that a worker is lost or has come",
    "on_nodes": "docs/launching.md says how a program sees that a worker is lost or has come",
    "Comparison": "docs/shipping.md has a function of three lines that says what is installed there",
    "compare": "docs/shipping.md has a function of three lines that says what is installed there",
}
GONE |= dict.fromkeys(
    "arange empty eye full linspace logspace ones rand randint randn randperm tensor zeros".split(),
    'torch\'s own makes it there, as torch.zeros(3, device="remote") does (docs/places.md)',
)
