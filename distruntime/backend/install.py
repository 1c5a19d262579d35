"""What a session changes in torch: the device type "remote", and what takes tensors and modules to it.

It happens once per process, and never at import.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading

import torch
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import rename_privateuse1_backend

from ..collectives.copies import COPIES
from ..errors import ConfigurationError, drop_frames, without_our_frames
from ..log.handle import BARE
from ..operators.alias_info import Operator
from ..operators.defined import install_defined
from ..operators.dispatch import create, dispatch
from ..operators.proxies import restride
from ..operators.special import SPECIAL
from ..operators.transfer import upload_small
from ..session.session import active, active_session
from ..tensors.copying import install_copying
from ..tensors.parameters import install_parameters
from ..tensors.sparse import install_sparse
from ..tensors.sparse_operators import SPARSE
from ..tensors.subclasses import install_subclasses, plain_operands
from ..tensors.tensor import DistributedTensor
from .attention import install_flex_attention
from .autocast import install_autocast
from .device_module import RemoteModule, install_accelerator
from .files.torch_load import install_load
from .files.torch_save import save
from .formulas import Kernel
from .fused import KERNELS, QUICK
from .generators import install_generators
from .lazy_modules import install_materialize
from .libraries import install_libraries
from .modules import install_modules
from .no_dynamo import hide, install_op_by_op
from .no_memory import install_no_memory, install_storages
from .on_import import rare_collections
from .random import fork_rng
from .torch_settings import install_default_dtype, install_determinism

_aten = torch.ops.aten
_library: list[torch.library.Library] = []
_guards: list[_Guard] = []
# The thread that imports ahead, once there is one.
_ahead: list[threading.Thread] = []


class _Guard(torch._C._acc.DeviceGuard):
    """Tells C++ which device a "remote" without an index is, which `.to("remote")` asks.

    C++ takes this type and always the index 0. "remote:0" is one of the places, and "remote" is the current
    one. So the type is another one, of which this process has no device.

    Tensors never claim this device type, as proxies claim lazy, so autograd never enters the guard. Its calls
    into Python from backward would end the process if anything raised there (tried: see docs/design.md).
    """

    # The stub of torch names another type than its C++ takes.
    def type_(self) -> torch._C._autograd.DeviceType:  # type: ignore[override]
        # The stub of torch lists not all that there are.
        return torch._C._autograd.DeviceType.VE  # type: ignore[attr-defined, no-any-return]


def _replace_lists() -> None:
    """Put remote tensors into the lists by which torch's Python decides."""
    # With this, make_fx records proxies.
    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, DistributedTensor)  # type: ignore[assignment]
    _foreach_utils._get_foreach_kernels_supported_devices = _foreach_devices
    # The optimizers have imported it by name.
    for module in (_foreach_utils, sys.modules["torch.optim.optimizer"]):
        module._get_fused_kernels_supported_devices = _fused_devices  # type: ignore[attr-defined]
    _optimizer._foreach_supported_types.append(DistributedTensor)
    # Clipping asks another list of this name. Without it, each gradient is a norm and a product of its own.
    _foreach_utils._foreach_supported_types.append(DistributedTensor)  # type: ignore[arg-type]


def install() -> None:
    """Make "remote" a device of torch. Does its work once; nothing changes for local tensors.

    Raise `ConfigurationError` where a device from outside of torch has taken the one key that there is.
    """
    if _library:
        return
    key = torch._C._get_privateuse1_backend_name()
    if key not in ("privateuseone", "remote"):
        raise ConfigurationError(
            f"the device {key!r} is loaded in this process, and holds the one dispatch key (PrivateUse1) "
            "that torch has for devices from outside, which remote tensors need. Start this process with "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in its environment, and import no package of that device: "
            f"workers load it all the same, and offer {key!r}"
        )
    if key == "privateuseone":
        rename_privateuse1_backend("remote")
        device_module = RemoteModule()
        torch._register_device_module("remote", device_module)
        install_accelerator(device_module)
        # At its first backward pass, autograd counts the devices and starts threads for them, and then no
        # forked child could run one. The guard below would count as a device, so the first pass runs before
        # it.
        torch.ones(1, requires_grad=True).sum().backward()
        _guards.append(_Guard())
        torch._C._acc.register_python_privateuseone_device_guard(_guards[0])
    _library.append(torch.library.Library("aten", "IMPL"))
    _install_kernels()
    if key == "privateuseone":
        _library.append(torch.library.Library("_", "IMPL"))
        install_autocast(_library[0], _library[-1])
    _replace_lists()
    install_modules()
    install_load()
    torch.save = save
    torch.random.fork_rng = fork_rng  # type: ignore[assignment]
    install_materialize()
    install_storages()
    install_generators()
    install_copying()
    install_subclasses()
    install_sparse()
    install_defined()
    install_parameters()
    install_no_memory(_library[0])
    install_libraries()
    install_default_dtype()
    install_determinism()
    install_op_by_op()
    install_flex_attention()
    SPECIAL.update(COPIES)
    SPECIAL.update(SPARSE)
    _ahead.append(threading.Thread(target=_import_ahead, name="distruntime-imports", daemon=True))
    _ahead[0].start()
    torch.Tensor.dist_send = dist_send  # type: ignore[attr-defined]
    hide(__name__.partition(".")[0])
    os.register_at_fork(after_in_child=_forked)


def _install_kernels() -> None:
    """Give torch's dispatcher the kernels of remote tensors."""
    for backend in ("Lazy", "PrivateUse1", BARE.upper()):
        for op in _FACTORIES:
            _implement(op, _factory(op), backend)
    for backend in ("Lazy", "PrivateUse1"):
        _implement(_aten.copy_.default, _copy, backend)
        _implement(_aten._copy_from.default, _copy_from, backend)
        _implement(_aten._local_scalar_dense.default, _read, backend)
        _implement(_aten.as_strided_.default, _restrided, backend)
        for op in _WHOLE:
            _implement(op, functools.partial(_fallback, op), backend)
    for op, kernel in KERNELS.items():
        _implement(op, without_our_frames(_on_plain(kernel)), "AutogradLazy")
    for op, kernel in QUICK.items():
        _implement(op, kernel, "AutogradLazy")
    for backend in ("Lazy", "PrivateUse1"):
        _library.append(torch.library.Library("_", "IMPL"))
        _library[-1].fallback(_fallback, backend)


def await_imports() -> None:
    """Block until what is imported ahead is there.

    A script may import `torch._inductor` next, as `torch.compile` does. That and `torch._dynamo` import each
    other, so that two threads which begin with either end in a `_DeadlockError` or with half a module.
    """
    for thread in _ahead:
        thread.join()


def _import_ahead() -> None:
    """Import what the first operator would import anyway: a second that the start of the workers hides.

    torch's C++ imports `torch.distributed.tensor` at the first call of any subclass, its meta kernels import
    `torch._dynamo`.
    """
    with rare_collections():
        for name in ("torch.distributed.tensor", "torch._dynamo"):
            try:
                importlib.import_module(name)
            except Exception:
                # An import fails where the process ends meanwhile. Any other failure comes again at the
                # user's line, whose operator imports.
                return


# Each of these is one instruction. torch would make the second group in two, by an empty tensor that is then
# filled. It would make the third by their `out=` forms, which resize an empty tensor: how large that is then,
# the worker alone would know, so each call would wait for it.
_FACTORIES = (
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten._efficientzerotensor.default),
    *(_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.scalar_tensor.default),
    *(_aten.rand.default, _aten.randn.default, _aten.randint.default, _aten.randint.low),
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.eye.default, _aten.eye.m),
    *(_aten.randperm.default, _aten.randperm.generator, _aten.linspace.default, _aten.logspace.default),
)

# CPUs and GPUs have kernels for these, and other devices a formula. A kernel here keeps C++ from taking them
# apart above Python's key. The windows' formula begins with `arange` in its `out=` form.
_WHOLE = (
    *(_aten.silu_backward.default, _aten.mish_backward.default, _aten.native_channel_shuffle.default),
    *(_aten.kaiser_window.default, _aten.kaiser_window.periodic, _aten.kaiser_window.beta),
    *(_aten.hann_window.default, _aten.hann_window.periodic, _aten.bartlett_window.default),
    *(_aten.bartlett_window.periodic, _aten.blackman_window.default, _aten.blackman_window.periodic),
    *(_aten.hamming_window.default, _aten.hamming_window.periodic, _aten.hamming_window.periodic_alpha),
    _aten.hamming_window.periodic_alpha_beta,
)


def _implement(op: Operator, function: Kernel, backend: str) -> None:
    name = op._schema.name.removeprefix("aten::") + (
        "" if op._overloadname == "default" else "." + op._overloadname
    )
    _library[0].impl(name, function, backend)


def _on_plain(kernel: Kernel) -> Kernel:
    def run(*args: object, **kwargs: object) -> object:
        return kernel(*plain_operands(args), **kwargs)

    return run


def _factory(op: Operator) -> Kernel:
    # The special key of a ZeroTensor is lost below dispatch, so it travels as zeros.
    target = _aten.zeros.default if op is _aten._efficientzerotensor.default else op

    def make(*args: object, **kwargs: object) -> object:
        try:
            return create(DistributedTensor, target, args, kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    return make


def _fallback(op: Operator, *args: object, **kwargs: object) -> object:
    """Issue an operator that reached a backend key.

    It is a factory without tensors, or C++ code calls it with Python dispatch off.
    """
    try:
        if any(isinstance(t, DistributedTensor) for t in tree_leaves((args, kwargs))):
            return dispatch(DistributedTensor, op, (), args, kwargs)
        return create(DistributedTensor, op, args, kwargs)
    except BaseException as error:
        drop_frames(error)
        raise


_foreach_devices_here = _foreach_utils._get_foreach_kernels_supported_devices


def _foreach_devices() -> list[str]:
    # C++ groups tensors by the wrappers' own device.
    return [*_foreach_devices_here(), "lazy"]


_fused_devices_here = _foreach_utils._get_fused_kernels_supported_devices


def _fused_devices() -> list[str]:
    # A DTensor of proxies says that its device is lazy.
    return [*_fused_devices_here(), "lazy"]


@without_our_frames
def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> object:
    return dispatch(DistributedTensor, _aten.copy_.default, (), (target, source, non_blocking), {})


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> object:
    try:
        # `torch.tensor` comes by here, from C++.
        if type(target) is DistributedTensor and upload_small(target, source):
            return target
        return dispatch(DistributedTensor, _aten.copy_.default, (), (target, source, non_blocking), {})
    except BaseException as error:
        drop_frames(error)
        raise


@without_our_frames
def _restrided(self: torch.Tensor, *args: object, **kwargs: object) -> object:
    if type(self) is DistributedTensor:
        return dispatch(DistributedTensor, _aten.as_strided_.default, (), (self, *args), kwargs)
    # AOTAutograd gives its wrappers the metadata of each view in place. C++ finds no fallback while a mode is
    # on, and torch has no formula for devices that it calls functional.
    return restride(self, *args, **kwargs)


@without_our_frames
def _read(proxy: torch.Tensor) -> object:
    return dispatch(DistributedTensor, _aten._local_scalar_dense.default, (), (proxy,), {})


@without_our_frames
def dist_send(self: torch.Tensor) -> DistributedTensor:
    """Send a copy of a local tensor to the current node's CPU, or to the current device.

    Return when its memory may be written again. The gradient comes back, as that of `.to("remote")` does.
    """
    place = active_session().places.current(like_torch=False)
    return self.to(place.device)  # type: ignore[return-value]


def _forked() -> None:
    """In a forked child the session is the parent's: proxies refuse, local work goes on."""
    for session in active:
        session.abandon()
