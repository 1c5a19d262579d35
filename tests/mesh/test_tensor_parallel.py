"""torch's own tensor parallelism on a mesh: forward, gradients and steps as in serial."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

import distruntime as dr
from fewer import fewer
from meshes import MLP, copied, make, mesh, same, same_gradients, same_parameters, two_workers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed._tensor import common_dtensor
    from torch.testing._internal.distributed._tensor.common_dtensor import (
        MLPModule,
        MLPStacked,
        ModelArgs,
        RMSNormPython,
        Transformer,
    )

__all__ = ["mesh", "two_workers"]

X = torch.arange(128.0).reshape(8, 16) / 50 - 1
IDS = torch.tensor(
    [[0, 7, 8, 15, 16, 23, 24, 31], [31, 1, 2, 3, 30, 9, 17, 25]]
)  # the borders of the shards among them
Model = tuple[nn.Module, nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.a, self.b, self.drop = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Dropout(0.0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.b(F.gelu(self.a(self.norm(x)))))
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.e, self.o = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o(self.e(x))
        return out


def parallel(mesh: dr.mesh.DeviceMesh, make: Callable[[], nn.Module], plan: Any) -> Model:
    serial = make()
    model = copied(serial, mesh)
    parallelize_module(model, mesh["tp"], plan)
    return model, serial


def check(mesh: dr.mesh.DeviceMesh, models: Model, x: torch.Tensor) -> None:
    model, serial = models
    out, wanted = model(x.to(mesh.device)), serial(x)
    same(out, wanted)
    (out**2).mean().backward()
    (wanted**2).mean().backward()
    same_gradients(model, serial)


PLANS: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor]] = {
    "columns, rows": (MLP, {"0": ColwiseParallel(), "2": RowwiseParallel()}, X),
    "columns, gathered": (MLP, {"0": ColwiseParallel(output_layouts=Replicate())}, X),
    "rows, of what all have": (MLP, {"0": RowwiseParallel(input_layouts=Replicate())}, X),
    "vocabulary": (Words, {"e": RowwiseParallel(input_layouts=Replicate())}, IDS),
    "vocabulary, sharded on": (
        Words,
        {
            "e": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "o": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        IDS,
    ),
    "embedding's columns": (Words, {"e": ColwiseParallel(output_layouts=Replicate())}, IDS),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    build, plan, x = PLANS[name]
    check(mesh, parallel(mesh, build, plan), x)


@pytest.mark.parametrize("name", ["columns, rows", "columns, gathered"])
def test_the_gradient_of_the_input(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    """A column-parallel layer whose backward sums nothing over the members gives each of them a part."""
    build, plan, x = PLANS[name]
    model, serial = parallel(mesh, build, plan)
    given, here = x.to(mesh.device).requires_grad_(), x.clone().requires_grad_()
    model(given).square().mean().backward()
    serial(here).square().mean().backward()
    assert given.grad is not None and here.grad is not None
    for shard in dr.shards(given.grad):
        torch.testing.assert_close(shard, here.grad)


def test_prepared_inputs_and_outputs(two_workers: None) -> None:
    mesh = make("2x2")
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(output_layouts=Shard(1)),
        "drop": SequenceParallel(use_local_output=False),
    }
    model, serial = parallel(mesh, Block, plan)
    parallelize_module(
        model, mesh["tp"], PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )
    check(mesh, (model, serial), torch.arange(256.0).reshape(2, 8, 16) / 100 - 1)


def test_loss_parallel(mesh: dr.mesh.DeviceMesh) -> None:
    head = {
        "e": RowwiseParallel(input_layouts=Replicate()),
        "o": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model, serial = parallel(mesh, Words, head)
    target = IDS.flip(0)
    with loss_parallel():
        loss = F.cross_entropy(model(IDS.to(mesh.device)).flatten(0, 1), target.to(mesh.device).flatten(0, 1))
        loss.backward()
    wanted = F.cross_entropy(serial(IDS).flatten(0, 1), target.flatten(0, 1))
    wanted.backward()
    same(loss, wanted)
    same_gradients(model, serial)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW fused, with a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(two_workers: None, name: str) -> None:
    mesh = make("2")
    model, serial = parallel(mesh, MLP, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](serial.parameters())
    for _ in range(3):
        (model(X.to(mesh.device)) ** 2).mean().backward()
        (serial(X) ** 2).mean().backward()
        same(clip_grad_norm_(model.parameters(), 0.05), clip_grad_norm_(serial.parameters(), 0.05))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, serial)


# The models of torch's own tests, with their plans

LATE = {
    "tok_embeddings.weight",
    "layers.0.attention.wv.weight",
    "layers.0.feed_forward.w1.bias",
    "norm.bias",
    "output.weight",
}
TRANSFORMERS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "whole sequences": ("2", False, {}),
    "sequence parallel": ("2", True, {}),
    "sequence parallel, other members beside": ("2x2", True, {"checkpoint_activations": True}),
    "local heads": ("2", False, {"weight_tying": False}),
    "few parameters trained": ("2", True, {"weight_tying": False}),
}


@pytest.mark.parametrize("name", fewer(TRANSFORMERS, 3, "other options, 1 s"))
def test_transformer_of_torchs_tests(two_workers: None, name: str) -> None:
    shape, over_sequence, options = TRANSFORMERS[name]
    mesh = make(shape)
    args = ModelArgs(n_layers=1, dropout_p=0.0, **options)
    serial = Transformer(args)
    model: Any = copied(serial, mesh)
    Transformer.parallelize(model, mesh["tp"], over_sequence, local_output_for_attn=name.startswith("local"))
    for part, parameter in [*model.named_parameters(), *serial.named_parameters()]:
        parameter.requires_grad_(not name.startswith("few") or part in LATE)
    ours, theirs = (torch.optim.Adam(m.parameters(), 1e-2) for m in (model, serial))
    for step in range(2):
        ids = torch.randint(args.vocab_size, (8, 8), generator=torch.Generator().manual_seed(step))
        out, wanted = model(ids.to(mesh.device)), serial(ids)
        same(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        same_gradients(model, serial)
        with implicit_replication():  # for what the plan leaves alone, beside what it cuts
            ours.step()
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        same_parameters(model, serial)


@pytest.mark.parametrize("over_sequence", fewer([True, False], 3, "other options"))
@pytest.mark.parametrize("build", [MLPModule, MLPStacked])
def test_mlp_of_torchs_tests(
    mesh: dr.mesh.DeviceMesh, build: Callable[[str], nn.Module], over_sequence: bool
) -> None:
    """With rows of the batch on each member the gradients are of all rows: the serial model's of the whole
    batch.
    """
    first, last = (
        (ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0)))
        if over_sequence
        else (ColwiseParallel(), RowwiseParallel())
    )
    names = ("net1", "net2") if build is MLPModule else ("layers.*.net1", "layers.*.net[2]")
    model, serial = parallel(mesh, lambda: build("cpu"), dict(zip(names, (first, last))))
    batch = torch.arange(80.0).reshape(8, 10) / 40 - 1
    size = mesh["tp"].size()
    rows = [batch.chunk(size)[at[-1]] if over_sequence else batch for at in mesh.coordinates()]
    with torch.inference_mode():
        same(
            model(batch.to(mesh.device))
            if not over_sequence
            else DTensor.from_local(model(dr.from_shards(rows, mesh)), mesh["tp"], [Shard(0)]),
            serial(batch),
        )
    out, wanted = model(dr.from_shards(rows, mesh)), serial(batch)
    for found, at in zip(dr.shards(out.detach()), mesh.coordinates()):
        torch.testing.assert_close(found, wanted.chunk(size)[at[-1]] if over_sequence else wanted)
    out.sum().backward()
    wanted.sum().backward()
    same_gradients(model, serial)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "of torch's tests": lambda: RMSNormPython(16),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_over_a_sequence(mesh: dr.mesh.DeviceMesh, name: str) -> None:
    model, serial = parallel(mesh, NORMS[name], SequenceParallel(sequence_dim=0))
    x = torch.arange(256.0).reshape(8, 2, 16) / 100 - 1
    rows = [x.chunk(mesh["tp"].size())[at[-1]] for at in mesh.coordinates()]
    out, wanted = model(dr.from_shards(rows, mesh)), serial(x)
    same(out, wanted)
    out.sum().backward()
    wanted.sum().backward()
    same_gradients(model, serial)


@pytest.mark.skipif(
    not hasattr(common_dtensor, "ExpertParallel"),
    reason="the experts of torch's tests are from torch 2.13 on",
)
def test_experts_of_torchs_tests(two_workers: None) -> None:
    """Each member has its own tokens and its own experts, and what all members share gets a gradient from
    each one's tokens.
    """
    mesh = make("4")
    serial = Transformer(ModelArgs(n_layers=1, dropout_p=0.0, num_experts=4))
    model: Any = copied(serial, mesh)
    Transformer.parallelize(model, None, False, ep_mesh=mesh["tp"])
    ids = torch.randint(8, (8, 8), generator=torch.Generator().manual_seed(0))
    out, wanted = model(dr.from_shards(list(ids.chunk(4)), mesh)), serial(ids)
    torch.testing.assert_close(torch.cat(dr.shards(out.detach())), wanted.detach(), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    wanted.sum().backward()
    for (name, p), q in zip(model.named_parameters(), serial.parameters()):
        whole = dr.fetch(p.grad) if isinstance(p, DTensor) else sum(dr.shards(p.grad))
        torch.testing.assert_close(whole, q.grad, rtol=1e-5, atol=1e-5, msg=name)


def heads(
    mesh: dr.mesh.DeviceMesh, layout: list[Any], shape: tuple[int, ...], seed: int
) -> tuple[DTensor, torch.Tensor]:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    kept = [Replicate() if isinstance(p, Partial) else p for p in layout]
    t = distribute_tensor(value.to(mesh.device), mesh, kept)
    if kept != layout:
        t = DTensor.from_local(t.to_local() / mesh.size(), mesh, layout, run_check=False)
    return t.detach().requires_grad_(), value.requires_grad_()


ATTENTION: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "batches": ([Shard(0)], [Shard(0)], {}),
    "heads": ([Shard(1)], [Shard(1)], {"is_causal": True}),
    "heads of queries alone": ([Shard(1)], [Replicate()], {"is_causal": True, "scale": 0.3}),
    "positions": ([Shard(2)], [Shard(2)], {"is_causal": True}),
    "numbers": ([Shard(3)], [Partial()], {}),
    "fewer heads of keys": ([Shard(1)], [Shard(1)], {"enable_gqa": True}),
    "one head of keys": ([Shard(1)], [Replicate()], {"enable_gqa": True, "is_causal": True}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(two_workers: None, name: str) -> None:
    mesh = make("2")
    of_queries, of_keys, options = ATTENTION[name]
    few = {"fewer": 2, "one": 1}.get(name.split()[0], 4)
    (q, q_), (k, k_), (v, v_) = (
        heads(mesh, *one)
        for one in ((of_queries, (2, 4, 6, 8), 0), (of_keys, (2, few, 6, 8), 1), (of_keys, (2, few, 6, 8), 2))
    )
    out, wanted = (
        F.scaled_dot_product_attention(q, k, v, **options),
        F.scaled_dot_product_attention(q_, k_, v_, **options),
    )
    same(out, wanted)
    (out**2).sum().backward()
    (wanted**2).sum().backward()
    for t, plain in ((q, q_), (k, k_), (v, v_)):
        assert t.grad is not None and plain.grad is not None
        same(t.grad, plain.grad)


def test_attention_with_a_mask_and_with_dropout(two_workers: None) -> None:
    mesh = make("2x2")
    layout: list[Any] = [Shard(0), Shard(1)]
    (q, q_), (k, k_), (v, v_) = (heads(mesh, layout, (2, 4, 6, 8), seed) for seed in range(3))
    for shape in ((6, 6), (2, 1, 6, 6), (1, 4, 6, 6)):
        added = torch.randn(shape, generator=torch.Generator().manual_seed(6)).requires_grad_()
        bias = distribute_tensor(added.detach().to(mesh.device), mesh, [Replicate()] * 2).requires_grad_()
        (F.scaled_dot_product_attention(q, k, v, bias) ** 2).sum().backward()
        (F.scaled_dot_product_attention(q_, k_, v_, added) ** 2).sum().backward()
        assert bias.grad is not None and added.grad is not None
        # The gradient sums all batches and heads, from the members that have them.
        same(bias.grad, added.grad)
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(5)) > -1
        given = distribute_tensor(mask.to(mesh.device), mesh, [Replicate()] * 2)
        same(F.scaled_dot_product_attention(q, k, v, given), F.scaled_dot_product_attention(q_, k_, v_, mask))
    ones = distribute_tensor(torch.ones(2, 4, 6, 6).to(mesh.device), mesh, layout)
    seen = (
        dr.fetch(
            F.scaled_dot_product_attention(
                ones, ones, distribute_tensor(torch.eye(6).expand(2, 4, 6, 6), mesh, layout), dropout_p=0.5
            )
        )
        != 0
    )
    parts = [part for row in seen.chunk(2) for part in row.chunk(2, 1)]  # what each member has kept
    assert all(not torch.equal(a, b) for k, a in enumerate(parts) for b in parts[:k])
