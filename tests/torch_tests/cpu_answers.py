"""What a CPU answers where a test of ranks asks for GPUs.

Most of PyTorch's tests of DDP, FSDP and checkpoints name GPUs, and mean any device of a rank. Here a rank's
device is its CPU: "cuda" and the number of a rank's GPU are the CPU, and NCCL is gloo. What tests have of
streams, of CUDA's memory and of its kernels is not answered.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.distributed._shard import sharded_tensor
from torch.testing._internal.distributed._tensor import common_dtensor

# A test of FSDP has a rank for each GPU, and on a CPU so many.
FSDP_RANKS = 2
# A test is asked what one for GPUs is asked, up to so many of them.
GPUS = 4
_CPU = torch.device("cpu")


def before_import() -> None:
    """Let tests run that torch's runner leaves out for want of GPUs. A test file is imported after it."""
    if common_distributed.skip_if_lt_x_gpu is _skip_if_fewer:
        return
    for module in (common_distributed, common_fsdp, common_dtensor):
        module.skip_if_lt_x_gpu = _skip_if_fewer
    common_distributed.requires_accelerator_dist_backend = common_distributed.requires_nccl = _as_it_is
    no_gpu = common_distributed.skip_if_no_gpu
    # The tests of this file that need one GPU mean any device, and those of others are about CUDA.
    common_distributed.skip_if_no_gpu = lambda test: (
        test if test.__module__.endswith("test_zero_redundancy_optimizer") else no_gpu(test)
    )
    # torch's runner leaves these out with fewer than eight ranks. Three are enough.
    common_distributed.skip_if_small_worldsize = lambda test: test
    common_fsdp.DEVICE_COUNT = FSDP_RANKS
    common_fsdp.FSDPTestContinuous.world_size = FSDP_RANKS
    common_distributed.init_multigpu_helper = lambda world_size, backend: {k: [k] for k in range(world_size)}
    init_pg = common_dtensor.DTensorTestBase.init_pg
    common_dtensor.DTensorTestBase.init_pg = lambda self, eager_init, backend=None: init_pg(
        self, False, "gloo"
    )
    torch.cuda.device_count = torch.accelerator.device_count = torch.cpu.device_count = lambda: GPUS
    with_comms = sharded_tensor.with_comms
    sharded_tensor.with_comms = lambda func=None, init_rpc=True, backend="nccl": with_comms(
        func, init_rpc=init_rpc, backend="gloo"
    )


def _skip_if_fewer(x: int, **others: Any) -> Callable[[Any], Any]:
    return unittest.skipIf(x > GPUS, f"a test has {GPUS} ranks here")


def _as_it_is(backends: object = None) -> Callable[[Any], Any]:
    return lambda test: test


class _Cpu(TorchFunctionMode):
    """Takes the CPU where an operation names a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = args[0], _CPU, *args[2:]
        named = {key: _of(value) for key, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:
            named["device"] = _CPU
        return func(*map(_of, args), **named)


def _of(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def _backend(name: Any) -> Any:
    return "gloo" if isinstance(name, str) and "nccl" in name else name


def _without(function: Any, **instead: Any) -> Any:
    """Return a function that is told other things about devices."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        named.update({key: value(named[key]) for key, value in instead.items() if key in named})
        return function(*args, **named)

    return call


def _on_cpu(function: Any) -> Any:
    """Return a function that gets the CPU as its device, as FSDP1 wants to be told."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **{**named, "device_id": _CPU})

    return call


def _module_to(function: Any) -> Any:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **named: Any) -> Any:
        args = tuple(_CPU if type(value) is int else _of(value) for value in args)
        return function(self, *args, **{key: _of(value) for key, value in named.items()})

    return to


@contextlib.contextmanager
def in_force() -> Generator[None]:
    """Answer for GPUs as long as this lasts."""

    def nothing() -> Callable[..., None]:
        # Dynamo wants another function under each name.
        return lambda *args, **named: None

    def backend_first(function: Any) -> Any:
        @functools.wraps(function)
        def call(backend: Any = None, *args: Any, **named: Any) -> Any:
            return function(_backend(backend), *args, **named)

        return call

    begin = backend_first(dist.init_process_group)
    new_group = _without(dist.new_group, backend=_backend)
    to_cpu = {"device_ids": lambda value: None, "output_device": lambda value: None}
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "set_device", nothing()),
            (torch.cuda, "synchronize", nothing()),
            (torch.cuda, "empty_cache", nothing()),
            (torch.cuda, "current_device", lambda: 0),
            (torch.accelerator, "set_device_index", nothing()),
            (torch.accelerator, "synchronize", nothing()),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.nn.Module, "to", _module_to(torch.nn.Module.to)),
            (
                DistributedDataParallel,
                "__init__",
                _without(DistributedDataParallel.__init__, **to_cpu),
            ),
            (
                FullyShardedDataParallel,
                "__init__",
                _on_cpu(FullyShardedDataParallel.__init__),
            ),
            (dist, "init_process_group", begin),
            (c10d, "init_process_group", begin),
            (dist, "new_group", new_group),
            (c10d, "new_group", new_group),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Cpu())
        yield
