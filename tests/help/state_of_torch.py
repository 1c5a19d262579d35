"""Kinds of state: torch's switches, and what its operators are given."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from state_kinds import Here, Holder, State, even, kind
from state_of_layers import Scaled

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
    def change(k: int) -> None:
        # torch's own tests forbid to set it outside of such a block, for the rest of the process.
        here.enter_context(
            torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, benchmark=even(k))
        )

    change(1)
    return (lambda: 2.0 if torch.backends.cudnn.benchmark else 1.0), change


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


@kind(acts=True, wide=True)
def dtype_that_autocast_casts_to(here: Here) -> State:
    place = torch.device(here.device).type
    here.callback(torch.set_autocast_dtype, place, torch.get_autocast_dtype(place))
    here.enter_context(torch.autocast(place, dtype=torch.bfloat16))
    return (lambda x: (x.float().outer(x.float()) * 1.01).mm(x.float().outer(x.float()))), (
        lambda k: torch.set_autocast_dtype(place, torch.float16 if even(k) else torch.bfloat16)
    )


class _Times(TorchFunctionMode):
    """Multiplies what `sin` gives."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * self.by if func is torch.Tensor.sin else found


@kind(acts=True, wide=True)
def mode_of_torch_functions(here: Here) -> State:
    entered = here.enter_context(ExitStack())

    def change(k: int) -> None:
        entered.close()
        entered.enter_context(_Times(float(k)))

    return (lambda x: x.sin() + 1), change


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@kind(acts=True, wide=True)
def hooks_on_what_autograd_saves(here: Here) -> State:
    entered = here.enter_context(ExitStack())

    def act(x: torch.Tensor) -> torch.Tensor:
        leaf = (x + 1).detach().requires_grad_()
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def change(k: int) -> None:
        entered.close()
        entered.enter_context(saved_tensors_hooks(lambda x: x * k, _as_it_is))

    return act, change


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
