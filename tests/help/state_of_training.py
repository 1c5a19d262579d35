"""Kinds of state: hooks, functions of autograd, and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

from state_kinds import Here, Holder, State, even, kind
from state_of_layers import Scaled

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

    # torch warns where no input of the module wants a gradient.
    return (lambda x: _gradient(model, x.clone().requires_grad_())), change


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
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # torch warns if no step came before the first one of the schedule.
    optimizer.step()
    return (lambda: schedule.get_last_lr()[0]), (lambda k: schedule.step())


@kind()
def second_group_of_an_optimizer(here: Here) -> State:
    optimizer = torch.optim.SGD(Scaled(here.device).parameters(), lr=1.0)
    return (lambda: len(optimizer.param_groups)), (
        lambda k: optimizer.add_param_group({"params": Scaled(here.device).parameters()})
    )
