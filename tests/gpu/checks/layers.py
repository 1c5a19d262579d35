"""Checks 11 and 12: attention by every backend, and recurrent layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from box import Box, first_line
from listing import check


def _attend(device: str, size: int, dtype: torch.dtype, how: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    q, k, v = (
        torch.randn(2, 4, 64, size, generator=draw).to(dtype).to(device).requires_grad_() for _ in range(3)
    )
    options: dict[str, Any] = {}
    if how == "causal":
        options["is_causal"] = True
    elif how == "mask":
        options["attn_mask"] = (torch.arange(64)[:, None] % 7 != torch.arange(64) % 5).to(device)
    elif how == "dropout":
        options["dropout_p"] = 0.25
        torch.manual_seed(7)
    y = F.scaled_dot_product_attention(q, k, v, **options)
    y.float().square().sum().backward()
    return [y.detach(), *(t.grad for t in (q, k, v))]  # type: ignore[misc]


def _apart(here: list[torch.Tensor], there: list[torch.Tensor]) -> float:
    """Return the largest difference, as a part of the largest number of its tensor."""
    pairs = zip((t.float() for t in here), (t.float() for t in dr.fetch(there)), strict=True)
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item() for a, b in pairs)


@check(
    11,
    "attention",
    does="runs attention of head sizes 64, 128, 256, plain, causal, masked and with dropout, with gradients",
    failure=(
        "attention is recorded whole on the worker: values that differ say that it took another kernel than "
        "local code does, or another seed for its dropout. A peak of memory in gigabytes says that it took "
        "the plain kernel and no flash kernel. Look at worker/distruntime_worker/values/functions.py "
        "(record, replay_backward)."
    ),
    seconds=60,
)
def attention(box: Box) -> None:
    wrong, worst = [], 0.0
    with box.session() as places:
        for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
            for size in (64, 128, 256):
                for how in ("plain", "causal", "mask", "dropout"):
                    if how == "dropout" and not (box.cuda or box.simulate_cuda):
                        # A device of another kind draws other numbers than this process.
                        continue
                    here = box.here(_attend, box.local, size, dtype, how)
                    apart = _apart(here, _attend("remote", size, dtype, how))
                    worst = max(worst, apart / bound)
                    if not apart < bound:
                        wrong.append(
                            f"{how}, heads of {size}, {dtype}: differs by {apart:.1e} of the largest"
                        )
        box.saw(f"the worst difference is {worst:.2f} of what is allowed")
        box.require(not wrong, f"{len(wrong)} differ: " + "\n".join(wrong))
        if not box.cuda:
            return box.leave_out("which kernel is taken", "needs CUDA")
        length = 8192
        q = torch.randn(1, 8, length, 64, device=places[0], dtype=torch.bfloat16, requires_grad=True)
        remote = torch.remote
        dr.synchronize()
        remote.reset_peak_memory_stats(places[0])
        before = remote.memory_allocated(places[0])
        F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
        dr.synchronize()
        peak = (remote.max_memory_allocated(places[0]) - before) / 2**20
        matrix = 8 * length * length * 2 / 2**20
        box.saw(
            f"{length} tokens forward and backward: a peak of {peak:.0f} MiB; the whole matrix has "
            f"{matrix:.0f}"
        )
        box.require(peak < matrix, "the plain kernel was taken: the whole matrix of scores was made")


def _recur(device: str, kind: str, dtype: torch.dtype, packed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = getattr(nn, kind)(32, 64, num_layers=2, bidirectional=True).to(dtype).to(device)
    x = (
        torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .to(device)
        .requires_grad_()
    )
    given: Any = x
    if packed:
        given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 7, 4, 2]))
    y = module(given)[0]
    if packed:
        y = nn.utils.rnn.pad_packed_sequence(y)[0]
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@check(
    12,
    "recurrent layers",
    does=(
        "runs LSTM and GRU, float32 and bfloat16, packed too, forward and backward, and reads the worker's "
        "log"
    ),
    failure=(
        "values that differ: look at the recurrent layers in distruntime/backend/fused.py and at "
        "worker/distruntime_worker/values/functions.py. The warning about a single contiguous chunk of "
        "memory in the worker's log is no failure: cuDNN copies the weights at every call, which is slow and "
        "not wrong (docs/limits.md)."
    ),
    seconds=60,
)
def recurrent(box: Box) -> None:
    wrong = []
    with box.session():
        for kind in ("LSTM", "GRU"):
            for dtype, bound in ((torch.float32, 2e-3), (torch.bfloat16, 6e-2)):
                for packed in (False, True):
                    name = f"{kind}, {str(dtype).removeprefix('torch.')}{', packed' if packed else ''}"
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        try:
                            here = box.here(_recur, box.local, kind, dtype, packed)
                        except RuntimeError as error:
                            box.saw(f"{name}: not here either: {first_line(str(error))}")
                            continue
                        apart = _apart(here, _recur("remote", kind, dtype, packed))
                    box.saw(f"{name}: differs by {apart:.1e} of the largest number")
                    if not apart < bound:
                        wrong.append(f"{name}: differs by {apart:.1e}")
    box.require(not wrong, "; ".join(wrong))
    chunks = box.logs().count("single contiguous chunk")
    box.saw(f"the warning about a single contiguous chunk is {chunks} times in the workers' logs")
