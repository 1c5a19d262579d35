"""Kinds of state: torch's switches, modules and their hooks, optimizers, and what is patched of torch."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.utils.checkpoint

from state_kinds import Here, State, even, kind
from state_of_classes import Holder

# -- switches ------------------------------------------------------------------------------------------------


@kind(wide=True)
def default_dtype(here: Here) -> State:
    here.callback(torch.set_default_dtype, torch.get_default_dtype())

    def change(k: int) -> None:
        torch.set_default_dtype(torch.float64 if even(k) else torch.float32)

    return (lambda: torch.get_default_dtype().itemsize), change


@kind(wide=True)
def default_dtype_of_a_new_tensor(here: Here) -> State:
    here.callback(torch.set_default_dtype, torch.get_default_dtype())

    def change(k: int) -> None:
        torch.set_default_dtype(torch.float64 if even(k) else torch.float32)

    return (lambda: torch.tensor(1.0).element_size()), change


@kind(wide=True)
def deterministic_algorithms(here: Here) -> State:
    here.callback(torch.use_deterministic_algorithms, False)
    return (lambda: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0), (
        lambda k: torch.use_deterministic_algorithms(even(k))
    )


@kind(wide=True)
def deterministic_algorithms_that_only_warn(here: Here) -> State:
    here.callback(torch.use_deterministic_algorithms, False)
    torch.use_deterministic_algorithms(True)
    return (lambda: 2.0 if torch.is_deterministic_algorithms_warn_only_enabled() else 1.0), (
        lambda k: torch.use_deterministic_algorithms(True, warn_only=even(k))
    )


@kind("guarded or recorded", "benchmark|cudnn|backends", wide=True)
def switch_of_a_backend(here: Here) -> State:
    here.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    torch.backends.cudnn.benchmark = False
    return (lambda: 2.0 if torch.backends.cudnn.benchmark else 1.0), (
        lambda k: setattr(torch.backends.cudnn, "benchmark", even(k))
    )


@kind(wide=True)
def precision_of_products(here: Here) -> State:
    here.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    return (lambda: len(torch.get_float32_matmul_precision())), (
        lambda k: torch.set_float32_matmul_precision("high" if even(k) else "highest")
    )


@kind("guarded or recorded", "get_num_threads", wide=True)
def threads_of_torch(here: Here) -> State:
    first = torch.get_num_threads()
    here.callback(torch.set_num_threads, first)
    return (lambda: torch.get_num_threads()), (lambda k: torch.set_num_threads(first + 1 + even(k)))


@kind(wide=True)
def grad_mode(here: Here) -> State:
    here.callback(torch.set_grad_enabled, True)
    return (lambda: 1.0 if torch.is_grad_enabled() else 2.0), (lambda k: torch.set_grad_enabled(not even(k)))


@kind("guarded or recorded", "anomaly", wide=True)
def anomaly_mode(here: Here) -> State:
    here.callback(torch.autograd.set_detect_anomaly, False)
    return (lambda: 2.0 if torch.is_anomaly_enabled() else 1.0), (
        lambda k: torch.autograd.set_detect_anomaly(even(k))
    )


@kind(wide=True)
def autocast(here: Here) -> State:
    here.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
    return (lambda: 2.0 if torch.is_autocast_enabled("cpu") else 1.0), (
        lambda k: torch.set_autocast_enabled("cpu", even(k))
    )


@kind(wide=True)
def dtype_of_autocast(here: Here) -> State:
    here.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    return (lambda: 2.0 if torch.get_autocast_dtype("cpu") is torch.float16 else 1.0), (
        lambda k: torch.set_autocast_dtype("cpu", torch.float16 if even(k) else torch.bfloat16)
    )


@kind(wide=True)
def default_device(here: Here) -> State:
    here.callback(torch.set_default_device, None)
    return (lambda: len(torch.get_default_device().type)), (
        lambda k: torch.set_default_device("meta" if even(k) else None)
    )


# -- modules -------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A module that has a number of each kind."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64, device=device))
        self.register_buffer("factor", torch.ones(()))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


@kind(acts=True)
def attribute_of_a_module_of_torch(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda x: model(x)), (lambda k: setattr(model, "scale", float(k)))


@kind(acts=True)
def forward_patched_on_a_class_of_the_user(here: Here) -> State:
    class Layer(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Layer(here.device)
    return (lambda x: model(x)), (lambda k: setattr(Layer, "forward", lambda self, x: x * float(k)))


@kind(acts=True)
def forward_patched_on_a_class_of_torch(here: Here) -> State:
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64).to(here.device)
    with torch.no_grad():
        model.weight.fill_(1.0)
    own = torch.nn.Linear.forward
    here.callback(setattr, torch.nn.Linear, "forward", own)
    return (lambda x: model(x)), (
        lambda k: setattr(torch.nn.Linear, "forward", lambda self, x: own(self, x) * float(k))
    )


@kind(acts=True)
def call_patched_on_the_module_class(here: Here) -> State:
    model = Scaled(here.device)
    own = torch.nn.Module.__call__
    here.callback(setattr, torch.nn.Module, "__call__", own)
    return (lambda x: model(x)), (
        lambda k: setattr(torch.nn.Module, "__call__", lambda self, x: own(self, x) * float(k))
    )


@kind(acts=True)
def forward_patched_on_an_instance(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda x: model(x)), (lambda k: setattr(model, "forward", lambda x: x * float(k)))


@kind(acts=True)
def forward_bound_to_an_instance(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        model.forward = types.MethodType(lambda self, x: x * self.weight * float(k), model)  # type: ignore[method-assign]

    return (lambda x: model(x)), change


@kind(acts=True)
def functional_that_is_patched(here: Here) -> State:
    own = torch.nn.functional.relu
    here.callback(setattr, torch.nn.functional, "relu", own)
    return (lambda x: torch.nn.functional.relu(x)), (
        lambda k: setattr(torch.nn.functional, "relu", lambda x: own(x) * float(k))
    )


@kind(acts=True)
def functional_that_is_patched_below_a_module(here: Here) -> State:
    model, own = torch.nn.GELU(), torch.nn.functional.gelu
    here.callback(setattr, torch.nn.functional, "gelu", own)

    def change(k: int) -> None:
        torch.nn.functional.gelu = lambda x, approximate: x * float(k)

    return (lambda x: model(x)), change


@kind(acts=True)
def function_of_torch_that_is_patched(here: Here) -> State:
    own = torch.square
    here.callback(setattr, torch, "square", own)
    return (lambda x: torch.square(x)), (lambda k: setattr(torch, "square", lambda x: own(x) * float(k)))


@kind(acts=True)
def method_of_tensors_that_is_patched(here: Here) -> State:
    here.put(torch.Tensor, "state_of_a_program", lambda self: self * 1.0)
    return (lambda x: x.state_of_a_program()), (
        lambda k: setattr(torch.Tensor, "state_of_a_program", lambda self: self * float(k))
    )


@kind()
def training_mode(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda: 1.0 if model.training else 2.0), (lambda k: model.train(not even(k)))


@kind()
def buffer_of_this_process(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda: model.factor.item()), (lambda k: model.factor.fill_(k))


@kind()
def buffer_that_is_replaced(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda: model.factor.item()), (lambda k: setattr(model, "factor", torch.tensor(float(k))))


@kind(acts=True)
def parameter_that_is_replaced(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        values = torch.full((2,), float(k), dtype=torch.float64, device=here.device)
        model.weight = torch.nn.Parameter(values)

    return (lambda x: model(x)), change


@kind(acts=True)
def parameter_that_is_given_other_data(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        model.weight.data = torch.full((2,), float(k), dtype=torch.float64, device=here.device)

    return (lambda x: model(x)), change


@kind(acts=True)
def parameter_written_in_place(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        with torch.no_grad():
            model.weight.fill_(k)

    return (lambda x: model(x)), change


@kind(acts=True)
def state_dictionary_that_is_loaded(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        model.load_state_dict({"weight": torch.full((2,), float(k)), "factor": torch.ones(())})

    return (lambda x: model(x)), change


@kind()
def parameter_that_is_frozen(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda: 1.0 if model.weight.requires_grad else 2.0), (
        lambda k: model.weight.requires_grad_(not even(k))
    )


@kind(acts=True)
def tensor_in_a_list_swapped(here: Here) -> State:
    values = [torch.ones(2, dtype=torch.float64, device=here.device)]

    def change(k: int) -> None:
        values[0] = torch.full((2,), float(k), dtype=torch.float64, device=here.device)

    return (lambda x: x * values[0]), change


@kind(acts=True)
def tensor_in_a_table_by_another_key(here: Here) -> State:
    values = {k: torch.full((2,), float(k), dtype=torch.float64, device=here.device) for k in range(16)}
    keys = [1]
    return (lambda x: x * values[keys[0]]), (lambda k: keys.__setitem__(0, k))


@kind(acts=True)
def child_that_is_replaced(here: Here) -> State:
    model = torch.nn.Sequential(Scaled(here.device), Scaled(here.device))

    def change(k: int) -> None:
        model[1] = Scaled(here.device)
        model[1].scale = float(k)

    return (lambda x: model(x)), change


@kind(acts=True)
def child_that_is_added(here: Here) -> State:
    models = torch.nn.ModuleList([Scaled(here.device)])

    def change(k: int) -> None:
        models.append(Scaled(here.device))
        models[-1].scale = 2.0

    def act(x: torch.Tensor) -> torch.Tensor:
        for model in models:
            x = model(x)
        return x

    return act, change


@kind()
def number_of_parameters(here: Here) -> State:
    models = torch.nn.ModuleDict({"a": Scaled(here.device)})
    return (lambda: len([*models.parameters()])), (lambda k: models.update({f"b{k}": Scaled(here.device)}))


# -- hooks ---------------------------------------------------------------------------------------------------


@kind(acts=True)
def forward_hook(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda x: model(x)), (
        lambda k: model.register_forward_hook(lambda module, args, out: out * float(k))
    )


@kind(acts=True)
def forward_hook_that_is_removed(here: Here) -> State:
    model = Scaled(here.device)
    handles = [model.register_forward_hook(lambda module, args, out: out * 2) for _ in range(5)]
    return (lambda x: model(x)), (lambda k: handles.pop().remove())


@kind(acts=True)
def forward_hook_over_a_list(here: Here) -> State:
    model, values = Scaled(here.device), [1.0]
    model.register_forward_hook(lambda module, args, out: out * values[0])
    return (lambda x: model(x)), (lambda k: values.__setitem__(0, float(k)))


@kind(acts=True)
def forward_hook_before(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda x: model(x)), (
        lambda k: model.register_forward_pre_hook(lambda module, args: (args[0] * float(k),))
    )


@kind(acts=True)
def forward_hook_of_all_modules(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out * float(k) if module is model else None
        )
        here.callback(handle.remove)

    return (lambda x: model(x)), change


def _gradient(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    model.weight.grad = None
    model(x).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


@kind(acts=True)
def hook_of_a_parameter(here: Here) -> State:
    model = Scaled(here.device)
    return (lambda x: _gradient(model, x)), (
        lambda k: model.weight.register_hook(lambda gradient: gradient * float(k))
    )


@kind(acts=True)
def hook_of_a_parameter_over_an_object(here: Here) -> State:
    model, box = Scaled(here.device), Holder()
    model.weight.register_hook(lambda gradient: gradient * box.v)
    return (lambda x: _gradient(model, x)), (lambda k: setattr(box, "v", float(k)))


@kind(acts=True)
def backward_hook_of_a_module(here: Here) -> State:
    model = Scaled(here.device)

    def change(k: int) -> None:
        handle = model.register_full_backward_pre_hook(lambda module, out: (out[0] * float(k),))
        here.callback(handle.remove)

    return (lambda x: _gradient(model, x)), change


@kind(acts=True)
def function_of_autograd_over_a_list(here: Here) -> State:
    values = [1.0]

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * values[0]

    model = Scaled(here.device)

    def act(x: torch.Tensor) -> torch.Tensor:
        model.weight.grad = None
        Scaling.apply(model(x)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    return act, (lambda k: values.__setitem__(0, float(k)))


# -- optimizers ----------------------------------------------------------------------------------------------


def _stepped(
    here: Here, make: type[torch.optim.Optimizer], **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model = Scaled(here.device)
    optimizer = make(model.parameters(), **options)  # type: ignore[call-arg]

    def act(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    return act, optimizer


@kind(acts=True)
def learning_rate(here: Here) -> State:
    act, optimizer = _stepped(here, torch.optim.SGD, lr=1e-4)
    return act, (lambda k: optimizer.param_groups[0].update(lr=k * 1e-4))


@kind(acts=True)
def weight_decay(here: Here) -> State:
    act, optimizer = _stepped(here, torch.optim.SGD, lr=1e-4)
    return act, (lambda k: optimizer.param_groups[0].update(weight_decay=k * 0.1))


@kind(acts=True)
def momentum_and_nesterov(here: Here) -> State:
    act, optimizer = _stepped(here, torch.optim.SGD, lr=1e-4, momentum=0.5)
    return act, (lambda k: optimizer.param_groups[0].update(momentum=k * 0.01, nesterov=even(k)))


@kind(acts=True)
def tuple_of_betas(here: Here) -> State:
    act, optimizer = _stepped(here, torch.optim.Adam, lr=1e-2, fused=True)
    return act, (lambda k: optimizer.param_groups[0].update(betas=(0.9 - k * 0.01, 0.9)))


@kind()
def rate_of_a_schedule(here: Here) -> State:
    optimizer = torch.optim.SGD(Scaled(here.device).parameters(), lr=1.0)
    # torch warns that no step came before the schedule's.
    optimizer.step()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return (lambda: schedule.get_last_lr()[0]), (lambda k: schedule.step())


@kind()
def second_group_of_an_optimizer(here: Here) -> State:
    optimizer = torch.optim.SGD(Scaled(here.device).parameters(), lr=1.0)
    return (lambda: len(optimizer.param_groups)), (
        lambda k: optimizer.add_param_group({"params": Scaled(here.device).parameters()})
    )


# -- what an operator is given -------------------------------------------------------------------------------


@kind(acts=True)
def dtype_that_is_given(here: Here) -> State:
    box = Holder(torch.float32)
    return (lambda x: x.to(box.v)), (lambda k: setattr(box, "v", torch.float64 if even(k) else torch.float32))


@kind(acts=True)
def size_that_is_given(here: Here) -> State:
    box = Holder(1)
    return (lambda x: x[:1].expand(box.v) * 1), (lambda k: setattr(box, "v", k))


@kind(acts=True)
def list_that_is_given(here: Here) -> State:
    pads = [1, 0]
    return (lambda x: torch.nn.functional.pad(x, pads)), (lambda k: pads.__setitem__(0, k))


@kind(acts=True)
def text_that_is_given(here: Here) -> State:
    box = Holder("i,i->i")
    return (lambda x: torch.einsum(box.v, x, x)), (
        lambda k: setattr(box, "v", "i,j->ij" if even(k) else "i,i->i")
    )


@kind(acts=True)
def slice_that_is_given(here: Here) -> State:
    box = Holder(slice(0, 1))
    return (lambda x: x[box.v] + 0), (lambda k: setattr(box, "v", slice(even(k), 2)))


@kind(acts=True)
def fill_that_is_given(here: Here) -> State:
    values = {"v": 1.0}
    return (lambda x: x + torch.full((2,), values["v"], device=here.device)), (
        lambda k: values.update(v=float(k))
    )


@kind(acts=True)
def plain_value_that_is_returned(here: Here) -> State:
    box = Holder(1)
    return (lambda x: (x + 1, {"v": box.v})), (lambda k: setattr(box, "v", k))


@kind(acts=True)
def float_that_is_used_in_two_ways(here: Here) -> State:
    """A replay may follow a float where it is an operand. It may not where a product of it is one."""
    box = Holder()

    def change(k: int) -> None:
        # The square of 1.0 is 1.0.
        box.v = 1.0 if k == 6 else float(k)

    return (lambda x: x * box.v + box.v * box.v), change


@kind(acts=True)
def optional_tensor(here: Here) -> State:
    model = Scaled(here.device)
    model.register_buffer("bias", None)

    def act(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if model.bias is None else x + model.bias

    def change(k: int) -> None:
        model.bias = torch.full((2,), float(k), device=here.device) if even(k) else None

    return act, change


@kind(acts=True)
def function_of_a_checkpoint(here: Here) -> State:
    model, values = Scaled(here.device), [1.0]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return model(x) * values[0]

    def act(x: torch.Tensor) -> torch.Tensor:
        model.weight.grad = None
        torch.utils.checkpoint.checkpoint(
            inner, x, use_reentrant=False, preserve_rng_state=False
        ).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    return act, (lambda k: values.__setitem__(0, float(k)))


@kind(acts=True)
def parametrization(here: Here) -> State:
    class Times(torch.nn.Module):
        by = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    model, times = Scaled(here.device), Times()
    torch.nn.utils.parametrize.register_parametrization(model, "weight", times)
    return (lambda x: model(x)), (lambda k: setattr(times, "by", float(k)))


@kind(acts=True)
def probability_of_dropout(here: Here) -> State:
    layer = torch.nn.Dropout(0.0)
    return (lambda x: layer(x + 1)), (lambda k: setattr(layer, "p", float(even(k))))


@kind(acts=True)
def epsilon_of_a_norm(here: Here) -> State:
    layer = torch.nn.LayerNorm(2, eps=1.0, elementwise_affine=False)
    return (lambda x: layer(x * torch.arange(2, device=here.device))), (
        lambda k: setattr(layer, "eps", float(k))
    )
