"""A sample of PyTorch's own operator database, float32, on a device that lags, against this process's CPU.

The device's kernels are the CPU's, so what differs is what a device does otherwise, or this one cannot do.
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch

import distruntime as dr
from agree import Disagreement
from on_device import set_delay, start
from op_samples import entries, run_entry

# So many sample inputs of an entry, and every so manieth entry: the device shows order, and no kernels.
SAMPLES = 4
EVERY = int(os.environ.get("DISTRUNTIME_OP_DB_EVERY", "1"))
CHUNKS = 6
DELAY_US = 5

# What does not agree, and why: an entry that starts to agree must leave this table.
_DRAWS = "a device draws other numbers than a CPU"
_SPARSE = "remote tensors are strided"
KNOWN: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
            *("normal.in_place", "normal.number_mean", "rand_like", "randint", "randint_like", "randn"),
            *("randn_like", "svd_lowrank", "uniform", "nn.functional.dropout", "nn.functional.dropout2d"),
            *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train"),
            *("nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward"),
            "nn.functional.rrelu",
        ),
        _DRAWS,
    ),
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"), _SPARSE),
    "tensor_split": "its sizes as a tensor must be local, as with CUDA",
    **dict.fromkeys(("geqrf", "histogram", "logcumsumexp"), "this device's kernel cannot resize its `out`"),
    "_native_batch_norm_legit": "this device's kernel wants statistics in training",
    "mode": "torch's kernel asks for CPU, CUDA or XPU by name",
}
# This device gives a result the strides that the meta kernel promises, and a CPU's kernel may give others.
_STRIDES = ": stride: local "


def _name(op: object) -> str:
    return str(op.full_name)  # type: ignore[attr-defined]


def _is_well(device: dr.types.Place) -> bool:
    """Wait for what the device has to do, and say whether all of it went well."""
    try:
        return torch.ones((), device=device).item() == 1.0
    except torch.AcceleratorError:
        return False


def _again() -> None:
    """Begin anew after a device was lost."""
    with suppress(Exception):
        dr.shutdown()
    start(2)
    set_delay(0, DELAY_US)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_entries(device: dr.types.Place, chunk: int) -> None:
    set_delay(0, DELAY_US)
    wrong = {}
    for op in entries(torch.float32)[chunk::CHUNKS][::EVERY]:
        name, text = _name(op), ""
        try:
            run_entry(op, torch.float32, SAMPLES)
        except Disagreement as difference:
            text = str(difference)
        except torch.AcceleratorError as lost:
            text = str(lost)
        # A kernel may fail after its entry was compared. The next entry would take the blame for it.
        if "is lost" in text or not _is_well(device):
            text = text or "the device is lost behind it"
            _again()
        if text and name not in KNOWN and _STRIDES not in text:
            wrong[name] = text
        if not text and name in KNOWN:
            wrong[name] = "agrees now: take it out of KNOWN"
    assert not wrong, "\n" + "\n".join(f"{name}: {text[:300]}" for name, text in wrong.items())
