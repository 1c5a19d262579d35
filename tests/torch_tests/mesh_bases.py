"""PyTorch's multi-rank tests of DTensor and FSDP2, with one controller instead of a process for each rank.

The bases of these tests run each test once, in this process. "remote" is a mesh of as many members as the
test has ranks, and the test's rank is the number that differs from member to member. Where a test leaves
out the mesh, which torch then takes from the default group, it gets this one, as docs/meshes.md asks for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import unittest
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
from torch.distributed import distributed_c10d
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal import common_distributed, common_fsdp, common_utils
from torch.testing._internal.distributed._tensor import common_dtensor

import distruntime as dr
from distruntime.mesh.varying import varies, varying

# Most tests take four ranks, or as many as there are up to eight. Those that name eight get eight.
RANKS, MEMBERS = 4, 8
REMOTE = "remote"
_meshes: dict[tuple[int, ...], dr.mesh.DeviceMesh] = {}
_tested: list[dr.mesh.DeviceMesh] = []
_manual_seed = torch.manual_seed
_get_default_group = distributed_c10d._get_default_group


def open_session() -> None:
    _meshes.clear()
    _tested.clear()
    dr.init_master_worker(world_size=1, simulate_cuda=MEMBERS, timeout=120)
    dr.config(num_threads=1)
    # The tests take `min(8, device_count())` ranks. More than four cost time and find nothing.
    torch.remote.device_count = lambda: RANKS
    mesh_of(range(RANKS))


def mesh_of(ranks: Sequence[int]) -> dr.mesh.DeviceMesh:
    """Return the mesh of some members in one dimension, and keep it."""
    key = tuple(ranks)
    if key not in _meshes:
        _meshes[key] = dr.init_device_mesh(_places(key), (len(key),))
    return _meshes[key]


def _places(ranks: Sequence[int]) -> list[Any]:
    return [dr.place(0, f"cuda:{k}") for k in ranks]


def _default_group_of_a_test() -> Any:
    """Return the group of the test's mesh to a test, and torch's default group to everybody else."""
    asks = sys._getframe(1).f_globals["__name__"]
    if _tested and ("test_" in asks or asks.startswith("torch.testing.")):
        return _tested[-1].get_group()
    return _get_default_group()


def _to_its_device(value: Any, *args: Any, **named: Any) -> Any:
    """Answer for `.cuda(self.rank)`, which sends a rank's tensors to the rank's own GPU."""
    return value.to(_tested[-1].device if _tested else REMOTE)


def _of_the_tested(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of a process group take that of the test's mesh, unless it is told another."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        given = signature.bind_partial(*args, **named).arguments
        if _tested and given.get("group") is None:
            named["group"] = _tested[-1].get_group()
        return function(*args, **named)

    return call


@contextlib.contextmanager
def around() -> Generator[None]:
    """Give every test the same seed, and make of a process for each rank what one controller has.

    No test begins or destroys the default group: the session has made it. It has a rank for each device of
    the session, so what leaves out the group takes that of the test's mesh.
    """
    _manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mesh_of(range(RANKS)))
        for owner, name, value in (
            (dist, "init_process_group", lambda *args, **named: None),
            (dist, "destroy_process_group", lambda *args, **named: None),
            (distributed_c10d, "_get_default_group", _default_group_of_a_test),
            (torch.distributed.fsdp, "fully_shard", fully_shard_on_the_mesh),
            (torch.distributed._composable.fsdp, "fully_shard", fully_shard_on_the_mesh),
            (torch.cuda, "device_count", lambda: RANKS),
            (torch.nn.Module, "cuda", _to_its_device),
            (torch.Tensor, "cuda", _to_its_device),
            (dr.DistributedTensor, "cuda", _to_its_device),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for name in ("get_world_size", "all_reduce", "broadcast", "all_gather", "all_gather_object"):
            stack.enter_context(mock.patch.object(dist, name, _of_the_tested(getattr(dist, name))))
        yield


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Any = None, **others: Any
) -> dr.mesh.DeviceMesh:
    places = _places(range(math.prod(mesh_shape)))
    return dr.init_device_mesh(places, tuple(mesh_shape), mesh_dim_names=mesh_dim_names)


class _AnyMesh(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, TorchMesh)

    def __call__(cls, device_type: str, mesh: Any, *, mesh_dim_names: Any = None, **others: Any) -> Any:
        ranks = torch.as_tensor(mesh, device="cpu")
        return dr.init_device_mesh(
            _places(ranks.flatten().tolist()), tuple(ranks.shape), mesh_dim_names=mesh_dim_names
        )


class DeviceMesh(metaclass=_AnyMesh):
    from_group = staticmethod(TorchMesh.from_group)


@functools.wraps(fully_shard)
def fully_shard_on_the_mesh(module: Any, *args: Any, **named: Any) -> Any:
    """Shard a module that is on the mesh, and say which mesh."""
    if not args and named.get("mesh") is None:
        named["mesh"] = _tested[-1]
    for one in module if isinstance(module, list | tuple) else [module]:
        if any(p.device.type == "cpu" for p in (*one.parameters(), *one.buffers())):
            one.to(named["mesh"].device)
    return fully_shard(module, *args, **named)


@functools.wraps(replicate)
def replicate_on_the_mesh(module: Any, *args: Any, **named: Any) -> Any:
    named.setdefault("process_group", _tested[-1].get_group())
    named.pop("device_ids", None)
    return replicate(module, *args, **named)


def manual_seed(seed: Any) -> Any:
    if not varies(seed):
        return _manual_seed(seed)
    mesh = _tested[-1]
    mesh._seed(0, tuple(seed.node._local_ints[k] for k in range(len(mesh.places))))
    return None


class OneController(common_dtensor.DTensorTestMixin, common_fsdp.FSDPTestMixin, common_utils.TestCase):
    """Takes the place of every base of torch's that starts a process, or a thread, for each rank."""

    device_type = REMOTE
    backend = "distruntime"
    is_local_tensor_enabled = False
    file_name = init_method = ""

    @property
    def world_size(self) -> int:
        return RANKS

    @property
    def rank(self) -> Any:
        return varying(list(range(self.world_size)))

    @property
    def process_group(self) -> Any:
        return _tested[-1].get_group()

    def build_device_mesh(self) -> dr.mesh.DeviceMesh:
        return init_device_mesh(REMOTE, (self.world_size,))

    def init_manual_seed_for_rank(self) -> None:
        manual_seed(self.rank)

    def init_pg(self, *args: Any, **named: Any) -> None:
        """Do nothing: the first mesh has made the group."""

    destroy_pg = perThreadSetUp = perThreadTearDown = _spawn_processes = _spawn_threads = init_pg

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        self.assertNotEqual(x, y, msg)

    def setUp(self) -> None:
        super().setUp()
        self.perThreadSetUp()
        mesh = mesh_of(range(self.world_size))
        _tested.append(mesh)
        mesh.__enter__()

    def tearDown(self) -> None:
        _tested.pop().__exit__(None, None, None)
        self.perThreadTearDown()
        super().tearDown()


def _skip_if_fewer(x: int, **others: Any) -> Callable[[Any], Any]:
    """Answer for `skip_if_lt_x_gpu`, which asks for GPUs of this process."""
    return unittest.skipIf(x > MEMBERS, f"a mesh has {MEMBERS} members here")


for _module in (common_distributed, common_dtensor, common_fsdp):
    _module.skip_if_lt_x_gpu = _skip_if_fewer
for _module, _names in {
    common_dtensor: ("DTensorTestBase", "DTensorContinuousTestBase", "DTensorOpTestBase"),
    common_fsdp: ("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous"),
    common_distributed: ("MultiThreadedTestCase", "MultiProcessTestCase"),
}.items():
    for _name in _names:
        setattr(_module, _name, OneController)
common_dtensor.NUM_DEVICES = RANKS
common_dtensor.skip_unless_torch_gpu = lambda test: test
common_fsdp.DEVICE_TYPE = REMOTE
common_fsdp.get_devtype = lambda: torch.device(REMOTE)
torch.manual_seed = manual_seed


def speak_of_meshes(module: ModuleType) -> None:
    """Let a test file make distruntime's meshes."""
    for name, value in {
        "DeviceMesh": DeviceMesh,
        "init_device_mesh": init_device_mesh,
        "fully_shard": fully_shard_on_the_mesh,
        "replicate": replicate_on_the_mesh,
    }.items():
        if callable(getattr(module, name, None)):
            setattr(module, name, value)
    if hasattr(module, "device_module"):
        module.device_module = torch.remote
    if hasattr(module, "device_type") and not callable(module.device_type):
        module.device_type = torch.device(REMOTE)
