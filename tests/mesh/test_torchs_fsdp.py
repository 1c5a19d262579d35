"""The models and cases of torch's own tests of FSDP2, `torch.testing._internal.common_fsdp` and what PyTorch
tests with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

import distruntime as dr
from fewer import fewer
from meshes import copied, make, same, same_gradients, same_parameters, two_workers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_fsdp as of_torch
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

__all__ = ["two_workers"]


def drawn(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed)))


def given(parts: Sequence[torch.Tensor], mesh: dr.mesh.DeviceMesh) -> torch.Tensor:
    """Return a tensor of which each member has its own part, or that of its row of members."""
    whole = len(parts) == mesh.size()
    return dr.from_shards([parts[k if whole else at[0]] for k, at in enumerate(mesh.coordinates())], mesh)


def trains(
    model: nn.Module, serial: nn.Module, mesh: dr.mesh.DeviceMesh, batches: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Train both, and compare losses, gradients and parameters: `serial` with the mean of the gradients of
    all parts of a batch.
    """
    both = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (model, serial)]
    for parts in batches:
        loss = model(given(parts, mesh)).sum()
        loss.backward()
        wanted = []
        for part in parts:
            wanted.append(serial(part).sum())
            (wanted[-1] / len(parts)).backward()
        same(
            given([w.detach() for w in wanted], mesh) - loss.detach(),
            torch.zeros((), dtype=loss.dtype),
            atol=1e-4,
        )
        same_gradients(model, serial)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, serial)


def stacked(
    mesh: dr.mesh.DeviceMesh, count: int = 3, shard: bool = True, **options: Any
) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    serial = nn.Sequential(*(of_torch.MLP(16, with_buffer=k == 1) for k in range(count)))
    model: Any = copied(serial, mesh)
    for part in (*model, model) if shard else ():
        fully_shard(part, mesh=mesh, **options)
    return model, serial


_ADVICE = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module:UserWarning"
)  # about views, of what RowwiseParallel returns


@_ADVICE
@pytest.mark.parametrize("checkpointed", fewer([True, False], 2, "other options, 2 s"))
def test_mlps_of_torchs_tests_with_tensor_parallelism(two_workers: None, checkpointed: bool) -> None:
    mesh = make("2x2")
    torch.manual_seed(0)
    serial = of_torch.MLPStack(16)
    model: Any = copied(serial, mesh)
    model.parallelize(mesh["tp"], mesh["dp"], checkpointed, reshard_after_forward=checkpointed)
    trains(model, serial, mesh, [drawn(2, 2, 4, 16, seed=k) for k in range(2)])


@_ADVICE
def test_mlps_of_torchs_tests_over_a_sequence(two_workers: None) -> None:
    mesh = make("2x2")
    torch.manual_seed(0)
    serial = of_torch.MLPStack(16, with_seq_parallel=True)
    model: Any = copied(serial, mesh)
    model.parallelize(mesh["tp"], mesh["dp"], False)
    parts = drawn(2, 2, 4, 16)
    # Each member has some positions of its row's part.
    out = model(given(parts, mesh)).to_local()
    for found, at in zip(dr.shards(out.detach()), mesh.coordinates()):
        torch.testing.assert_close(found, serial(parts[at[0]]).chunk(2, 1)[at[1]].detach())
    (out.sum() / 8).backward()
    for part in parts:
        (serial(part).sum() / 16).backward()
    same_gradients(model, serial)


@pytest.mark.parametrize(("shape", "checkpointed", "tied"), [("2", True, True), ("2x2", False, False)])
def test_transformer_of_torchs_tests(two_workers: None, shape: str, checkpointed: bool, tied: bool) -> None:
    mesh = make(shape)
    torch.manual_seed(0)
    serial = Transformer(
        ModelArgs(n_layers=1, dropout_p=0.0, weight_tying=tied, checkpoint_activations=checkpointed)
    )
    model: Any = copied(serial, mesh)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [list(torch.randint(8, (mesh.size(), 2, 8))) for _ in range(2)])


@_ADVICE
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.slow(reason="starts members that import FSDP2, 3 s")
def test_parameters_with_uneven_rows_are_cut_by_columns(two_workers: None) -> None:
    """torch's transformer with 23 words. Its embedding is its output's weight; a bias of 23 is left alone."""
    mesh = make("2")
    mode = of_torch.DEVICEInitMode.DEVICE_NEVER
    serial = of_torch.TransformerWithSharedParams(mesh.get_group(), mode, False, True)  # type: ignore[no-untyped-call]
    serial.output_proj.bias.requires_grad_(False)
    model: Any = copied(serial, mesh)
    by_columns: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        fully_shard(layer, **by_columns)
    fully_shard(model, ignored_params={model.output_proj.bias}, **by_columns)
    source, target = serial.get_input("cpu")
    out, wanted = model(source.to(mesh.device), target.to(mesh.device)), serial(source, target)
    same(out, wanted)
    model.get_loss((None, target.to(mesh.device)), out).backward()
    serial.get_loss((None, target), wanted).backward()
    same_gradients(model, serial)
    assert (
        tuple(model.embed_tokens.weight.to_local().shape) == (23, 8)
        and model.embed_tokens.weight is model.output_proj.weight
    )


@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_outputs_and_modules_that_are_not_used(two_workers: None, used: list[int]) -> None:
    """What was gathered ahead for a backward that never came is waited for at the end of the one that did."""
    mesh = make("2")
    torch.manual_seed(0)
    serial = of_torch.DoubleLinear(16)
    model: Any = copied(serial, mesh)
    for part in (model.lin1, model.lin2, model):
        fully_shard(part, mesh=mesh)
    parts = drawn(2, 3, 16)
    for _ in range(2):
        outs = model(given(parts, mesh))
        sum(outs[k].sum() for k in used).backward()
        for part in parts:
            outs = serial(part)
            (sum(outs[k].sum() for k in used) / 2).backward()
    for p, q in zip(model.parameters(), serial.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            same(p.grad, q.grad)


def test_some_parameters_frozen(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh, shard=False)
    for m in (model, serial):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("bias" in name and not name.startswith("1."))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [drawn(2, 3, 16, seed=k) for k in range(2)])


def test_prefetching_and_gathering_by_hand(two_workers: None) -> None:
    mesh = make("2")
    model: Any
    model, serial = stacked(mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model[0].in_proj.weight, DTensor)
    same(model[0].in_proj.weight, serial[0].in_proj.weight)  # and it is given back, although it was looked at
    model[0].reshard()
    assert isinstance(model[0].in_proj.weight, DTensor)
    trains(model, serial, mesh, [drawn(2, 3, 16, seed=k) for k in range(2)])


@pytest.mark.parametrize("reshard", [True, False, 2, None])
def test_what_parameters_are_after_a_forward(two_workers: None, reshard: bool | int | None) -> None:
    mesh = make("4")
    model, serial = stacked(mesh, 2, reshard_after_forward=reshard)
    model(torch.ones(2, 16, device=mesh.device))
    weight: Any = model[0].in_proj.weight
    assert isinstance(weight, DTensor) == (reshard is not False)
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    assert held.shape[0] == 64 // (1 if reshard is False else 2 if reshard == 2 else 4)
    same_parameters(model, serial)
    for part in (*model, model):
        part.reshard()  # type: ignore[operator]
    assert all(
        isinstance(p, DTensor) and p.to_local().shape[0] == p.shape[0] // 4 for p in model.parameters()
    )
    same_parameters(model, serial)


def test_changes_before_the_first_forward(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    for m in (model, serial):
        m.to(torch.float64)
    trains(model, serial, mesh, [[part.double() for part in drawn(2, 3, 16)]])
    assert all(p.dtype == torch.float64 and p.to_local().dtype == torch.float64 for p in model.parameters())  # type: ignore[attr-defined]


def test_several_forwards_and_a_part_alone(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    one, other = drawn(2, 3, 16)
    for m, x, y in ((model, one.to(mesh.device), other.to(mesh.device)), (serial, one, other)):
        (m(x).sum() + m(y).sum()).backward()
        m[0](y).sum().backward()  # type: ignore[index]
    same_gradients(model, serial)


def test_a_method_beside_forward(two_workers: None) -> None:
    mesh = make("2")

    class Embeds(of_torch.MLP):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.forward(x)
            return found * 2

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Embeds(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.inner.embed(x))
            return found

    torch.manual_seed(0)
    serial = Uses()
    model: Any = copied(serial, mesh)
    for part in (model.inner, model):
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model.inner, "embed")
    trains(model, serial, mesh, [drawn(2, 3, 16)])


def test_steps_within_backward(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh)
    own = {p: torch.optim.Adam([p], 1e-2, foreach=True) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        own[p].step()  # type: ignore[index]
        own[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    whole = torch.optim.Adam(serial.parameters(), 1e-2)
    for k in range(2):
        parts = drawn(2, 3, 16, seed=k)
        model(given(parts, mesh)).sum().backward()
        for part in parts:
            (serial(part).sum() / 2).backward()
        whole.step()
        whole.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    same_parameters(model, serial)


def test_inputs_of_this_process_go_to_the_members(two_workers: None) -> None:
    mesh = make("2")

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(
            self, x: torch.Tensor, more: tuple[torch.Tensor, dict[str, torch.Tensor]]
        ) -> torch.Tensor:
            return x @ self.weight + more[0] + more[1]["b"]

    model: Any = Sum().to(mesh.device)
    fully_shard(model, mesh=mesh)
    same(model(torch.ones(4, 4), (torch.ones(4, 4), {"b": torch.ones(4, 4)})), torch.full((4, 4), 3.0))


def test_replicas_summed_at_the_last_of_several_batches(two_workers: None) -> None:
    mesh = make("2x2")
    model: Any
    model, serial = stacked(mesh, 2)
    for k in range(3):
        model.set_requires_all_reduce(k == 2)
        parts = drawn(4, 3, 16, seed=k)
        model(given(parts, mesh)).sum().backward()
        for part in parts:
            (serial(part).sum() / 4).backward()
    same_gradients(model, serial)


def test_a_divisor_of_ones_own(two_workers: None) -> None:
    mesh = make("2")
    model: Any
    model, serial = stacked(mesh, 2)
    model.set_gradient_divide_factor(1.0)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing in its sums
    parts = drawn(2, 3, 16)
    model(given(parts, mesh)).sum().backward()
    for one in parts:
        serial(one).sum().backward()
    same_gradients(model, serial)


def test_a_mesh_of_one_member(two_workers: None) -> None:
    mesh = dr.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    serial = of_torch.MLP(7)
    model: Any = copied(serial, mesh)
    for part in (model.in_proj, model):
        fully_shard(part, mesh=mesh)
    trains(model, serial, mesh, [drawn(1, 3, 7)])


def test_a_scaler_skips_the_step_of_all_members_for_one_ones_overflow(two_workers: None) -> None:
    mesh = make("2")
    model, serial = stacked(mesh, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("remote", init_scale=4.0)
    fine = drawn(2, 3, 16)
    scaler.scale(model(given([fine[0], torch.full((3, 16), float("inf"))], mesh)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    same_parameters(model, serial)
    optimizer.zero_grad()
    scaler.scale(model(given(fine, mesh)).sum()).backward()
    scaler.unscale_(optimizer)
    for part in fine:
        (serial(part).sum() / 2).backward()
    same_gradients(model, serial)
