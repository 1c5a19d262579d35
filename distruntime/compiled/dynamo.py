"""What Dynamo, AOTAutograd and their fakes have to know of proxies. None of what is changed here is public.

Each function says what breaks without it, and `tests/compiled` notices.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

from ..backend.no_dynamo import is_own
from ..backend.on_import import when_imported
from ..log.handle import BARE, REMOTE_TYPES, Place
from ..operators.proxies import AUTOCAST_KEY
from ..session.session import active_session
from ..tensors.tensor import DistributedTensor
from .draws import install_draws
from .places import constant_of, install_places

_LAZY = re.compile(r"\blazy:(\d+)")
_installed: list[bool] = []
# By these a value may decide what else a graph issues.
DECIDING: set[HigherOrderOperator] = set()


def install_dynamo() -> None:
    """Let Dynamo trace functions of proxies for the backend "distruntime", once Dynamo is imported.

    Its import takes a second. Does its work once.
    """
    if _installed:
        return
    _installed.append(True)
    when_imported("torch._subclasses.fake_tensor", _claim_lazy)
    when_imported("torch._subclasses.fake_tensor", _stay_on_meshes)
    when_imported("torch._subclasses.functional_tensor", _show_metadata)
    when_imported("torch._dynamo.convert_frame", _cast_while_tracing)
    when_imported("torch._dynamo.trace_rules", _stay_out)
    when_imported("torch._dynamo.variables.builder", _take_proxies)
    when_imported("torch._functorch._aot_autograd.runtime_wrappers", _analyze)
    when_imported("torch._higher_order_ops.effects", _run_with_effects)
    when_imported("torch._higher_order_ops.auto_functionalize", _run_functionalized)
    for name in ("cond", "while_loop", "scan", "associative_scan", "map"):
        when_imported(f"torch._higher_order_ops.{name}", _decide_here)
    when_imported("torch._dynamo.variables.optimizer", _count_on_workers)
    when_imported("torch._dynamo.compiled_autograd", _refuse_slots)
    when_imported("torch.utils.checkpoint", _name_module)
    when_imported("torch._inductor.compile_fx", _take_compile_fx)
    install_draws()
    install_places()
    _take_inductor(torch._TorchCompileInductorWrapper)
    _take_named(torch._TorchCompileWrapper)


def _claim_lazy(module: ModuleType) -> None:
    """Have fakes of "remote:1" claim "lazy:1", as proxies do.

    Autograd has no thread for fakes of "remote": to trace the backward pass would fail by an assertion.
    Errors name the place as the user does.
    """
    fake = module.FakeTensor
    common = fake._find_common_device

    def _find_common_device(*args: Any) -> Any:
        try:
            return common(*args)
        except RuntimeError as error:
            if not _LAZY.search(str(error)):
                raise
            raise RuntimeError(_LAZY.sub(r"remote:\1", str(error))) from None

    fake._find_common_device = staticmethod(_find_common_device)
    if hasattr(fake, "_normalize_fake_device"):
        normalize = fake._normalize_fake_device
        fake._normalize_fake_device = staticmethod(lambda device: _claimed(device) or normalize(device))
        return
    # Before torch 2.13 each fake sees to it itself, and a fake of a view is told its device once more.
    new = fake.__new__

    def __new__(cls: type, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return new(cls, mode, elem, _claimed(torch.device(device)) or device, *args, **kwargs)

    def claim(self: Any, device: torch.device) -> None:
        vars(self)["fake_device"] = _claimed(device) or device

    fake.__new__ = staticmethod(__new__)
    fake.fake_device = property(lambda self: vars(self)["fake_device"], claim)


def _stay_on_meshes(module: ModuleType) -> None:
    """Have a bare "remote" be the current place of a fake, and its mesh where it is copied from one.

    DTensors copy what they get to the kind of device of their mesh, which is "remote": see
    collectives/copies.py.
    """

    mode = module.FakeTensorMode
    dispatch = mode.dispatch

    def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = kwargs.get("device") if kwargs else None
        if (
            target is not None
            and target.type in REMOTE_TYPES
            and (target.index is None or target.type == BARE)
        ):
            # It is the current place, and torch remembers by its words what an operator made.
            here = _mesh_of(args[0]) if func is torch.ops.aten._to_copy.default else None
            kwargs = {**kwargs, "device": here or active_session().places.meant(target).lazy}
        return dispatch(self, func, types, args, kwargs)

    mode.dispatch = _dispatch


def _mesh_of(source: torch.Tensor) -> torch.device | None:
    """Return the device of a fake that is on a mesh."""
    here = source.device
    known = here.type in REMOTE_TYPES and active_session().places.meant(here).node.members
    return here if known else None


def _show_metadata(module: ModuleType) -> None:
    """Have AOTAutograd's tensors shown by their metadata.

    torch copies what claims "lazy" to the CPU to show it, and these have no values. It shows the arguments of
    a call that does not fit the first overload of an operator, such as `aten.scatter(x, 0, index, y)`.
    """
    shown = module.FunctionalTensor.__repr__

    def __repr__(self: Any, *args: Any, **kwargs: Any) -> str:
        if self.device.type != "lazy":
            return str(shown(self, *args, **kwargs))
        place = _LAZY.sub(r"remote:\1", str(self.device))
        return f"FunctionalTensor(..., size={tuple(self.size())}, dtype={self.dtype}, device='{place}')"

    module.FunctionalTensor.__repr__ = __repr__


def _cast_while_tracing(module: ModuleType) -> None:
    """Have autocast's kernels see the operators of a trace, under `torch.autocast("remote")`.

    A proxy brings the key of autocast along, and a fake has none. It would lose the casts in silence.
    """
    own = module._compile

    @functools.wraps(own)
    def _compile(*args: Any, **kwargs: Any) -> Any:
        with torch._C._IncludeDispatchKeyGuard(AUTOCAST_KEY):
            return own(*args, **kwargs)

    module._compile = _compile  # type: ignore[attr-defined]


def _claimed(device: torch.device) -> torch.device | None:
    """Return the device that a fake of a proxy claims, or None for other fakes."""
    return active_session().places.meant(device).lazy if device.type in ("remote", BARE) else None


def _stay_out(module: ModuleType) -> None:
    """Have Dynamo break the graph at functions of this package, those too that are imported later.

    It would trace what a call of a `dr.remote` function looks at, and so take it for a constant.
    """
    module.add(__name__.partition(".")[0])


def _take_proxies(module: ModuleType) -> None:
    """Have Dynamo take a proxy as it takes a tensor. It would break the graph at one.

    A graph of another backend is no program of a worker, so it breaks there as before.
    """
    builder, specialized = module.VariableBuilder, module.get_specialized_props
    wrap, infer = builder._wrap, module.infer_subclass_type

    def _wrap(self: Any, value: object) -> Any:
        if type(value) is Place:
            # Places of two sessions may be equal, and have other numbers.
            number = module.AttrSource(self.source, "number")
            self.install_guards(module.GuardBuilder.TYPE_MATCH)
            module.install_guard(number.make_guard(module.GuardBuilder.EQUALS_MATCH))
            return constant_of(module.ConstantVariable, value)
        if type(value) is DistributedTensor and is_own(self.tx.output.compiler_fn):
            stands = self.source.guard_source
            # Before torch 2.12 it is a method.
            if not (stands() if callable(stands) else stands).is_unspecialized_nn_module():
                # A parameter is of the same class, so the guard on that does not tell them apart.
                self.install_guards(partial(module.GuardBuilder.HASATTR, attr="_is_param"))
            return self.wrap_tensor(value)
        return wrap(self, value)

    def infer_subclass_type(value: object) -> type | None:
        # It would wrap what comes out of a graph anew in the proxy's own class.
        return None if type(value) is DistributedTensor else infer(value)

    def get_specialized_props(*args: Any) -> dict[str, Any]:
        # `isinstance(x, dr.DistributedTensor)` would be False in a traced function.
        found: dict[str, Any] = specialized(*args)
        if found["device"].type in REMOTE_TYPES and found["class_type"] is torch.Tensor:
            found["class_type"] = DistributedTensor
        return found

    builder._wrap = _wrap
    module.infer_subclass_type = infer_subclass_type  # type: ignore[attr-defined]
    module.get_specialized_props = get_specialized_props  # type: ignore[attr-defined]
    # FX writes the type of an argument by its full name into the code that it generates.
    torch.DistributedTensor = DistributedTensor  # type: ignore[attr-defined]
    # AOTAutograd asks it of the gradients that a backward graph gets.
    DistributedTensor.__coerce_same_metadata_as_tangent__ = _as_it_is  # type: ignore[attr-defined]


def _analyze(module: ModuleType) -> None:
    """Have AOTAutograd's first call of a graph take proxies. It has torch's list by name."""
    if hasattr(module, "HANDLED_TYPES") and DistributedTensor not in module.HANDLED_TYPES:
        module.HANDLED_TYPES = (*module.HANDLED_TYPES, DistributedTensor)  # type: ignore[attr-defined]


def _run_with_effects(module: ModuleType) -> None:
    """Have a graph's operators with effects run on proxies, such as the check in `torch.linalg.inv`."""
    module.with_effects.py_impl(DistributedTensor)(module.with_effects_dense)


def _run_functionalized(module: ModuleType) -> None:
    """Have a graph's operators of users that write to arguments run on proxies."""
    module.auto_functionalized.py_impl(DistributedTensor)(module.auto_functionalized_dense)
    module.auto_functionalized_v2.py_impl(DistributedTensor)(module.auto_functionalized_v2_dense)


def _decide_here(module: ModuleType) -> None:
    """Have `torch.cond`, loops and scans run on proxies: this process reads what decides, as beside a GPU."""
    for operator in list(vars(module).values()):
        if isinstance(operator, HigherOrderOperator):
            plain = operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
            if plain is not None:
                operator.py_impl(DistributedTensor)(plain)
                DECIDING.add(operator)


def _refuse_slots(module: ModuleType) -> None:
    """Have compiled autograd refuse saved tensors without elements. It would fail at the first operator."""
    own = module.AutogradCompilerInstance.begin_capture

    def begin_capture(self: Any, inputs: Sequence[object], *args: Any) -> Any:
        importlib.import_module(".saved", __package__).require_seen(inputs)
        return own(self, inputs, *args)

    module.AutogradCompilerInstance.begin_capture = begin_capture


def _count_on_workers(module: ModuleType) -> None:
    """Have an optimizer whose step is traced count its steps where its parameters are, as on a GPU.

    Numbers of this process are no part of a graph.
    """
    own = module.OptimizerVariable._set_capturable

    def _set_capturable(self: Any, tx: object) -> None:
        for group in self.value.param_groups:
            remote = all(type(p.data) is DistributedTensor for p in group["params"])
            if "capturable" in group and remote and not group.get("fused"):
                group["capturable"] = True
        own(self, tx)

    module.OptimizerVariable._set_capturable = _set_capturable


def _take_inductor(wrapper: type) -> None:
    """Have torch.compile's own backend hand graphs with remote tensors to ours.

    Inductor here would write kernels for this process. The worker's writes them for its device.
    """
    own = wrapper.__call__

    def __call__(self: Any, graph: GraphModule, inputs: Sequence[object], **kwargs: Any) -> Any:
        if not has_remote(graph, inputs):
            return own(self, graph, inputs, **kwargs)
        # It imports what only Dynamo needs, which takes a second.
        backend = importlib.import_module(".backend", __package__)
        return backend.for_inductor(graph, inputs, {**self.config, **(kwargs.get("config_patches") or {})})

    wrapper.__call__ = __call__  # type: ignore[method-assign]


def _take_compile_fx(module: ModuleType) -> None:
    """Have Inductor itself do so, where a backend calls it: `torch._dynamo.optimize("inductor")`.

    It would end in `KeyError: 'lazy'`.
    """
    own = module.compile_fx

    @functools.wraps(own)
    def compile_fx(graph: Any, inputs: Sequence[object], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(graph, GraphModule) or not has_remote(graph, inputs):
            return own(graph, inputs, *args, **kwargs)
        backend = importlib.import_module(".backend", __package__)
        return backend.for_inductor(graph, inputs, kwargs.get("config_patches") or {})

    module.compile_fx = compile_fx  # type: ignore[attr-defined]


def _take_named(wrapper: type) -> None:
    """Have "aot_eager" and "cudagraphs" hand graphs with remote tensors to ours, too."""
    own = wrapper.__call__

    def __call__(self: Any, graph: GraphModule, inputs: Sequence[object]) -> Any:
        if self.compiler_name not in ("aot_eager", "cudagraphs") or not has_remote(graph, inputs):
            return own(self, graph, inputs)
        backend = importlib.import_module(".backend", __package__)
        mode = "reduce-overhead" if self.compiler_name == "cudagraphs" else None
        return backend.distruntime(graph, inputs, mode=mode)

    wrapper.__call__ = __call__  # type: ignore[method-assign]


def has_remote(graph: GraphModule, inputs: Sequence[object]) -> bool:
    """Whether a graph that Dynamo has traced takes or makes a remote tensor."""
    found = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    return any(isinstance(one, torch.Tensor) and one.device.type in REMOTE_TYPES for one in found)


def _as_it_is(self: DistributedTensor, metadata: object, kind: object = None) -> DistributedTensor:
    return self


def _name_module(module: ModuleType) -> None:
    """Have activation checkpointing find the functions of "lazy", which fakes of proxies claim."""
    own = module._get_device_module

    def _get_device_module(device: str = "cuda") -> Any:
        return own("remote" if device in REMOTE_TYPES else device)

    module._get_device_module = _get_device_module  # type: ignore[attr-defined]
