"""Kinds of state: modules of torch, and what is patched of torch."""

from __future__ import annotations

import types

import torch
import torch.utils.checkpoint

from state_kinds import Here, State, even, kind

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
