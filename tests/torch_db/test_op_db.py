"""Every float32 entry of PyTorch's own operator database, forward and backward, through a real worker."""

from __future__ import annotations

import pytest
import torch

from agree import Disagreement
from op_samples import VARIANT_SAMPLES, entries, run_entry

CHUNKS = 24
# An entry has at most so many sample inputs here. Seven entries have many hundreds that differ in one number.
SAMPLES = 120
# `make test` runs so many, and the other forms of an entry on one.
FEW = 2

# What does not agree, and why. An entry that starts to agree must leave this table: the test says so.
KNOWN: dict[str, str] = {
    "sparse.sampled_addmm": "sparse CSR: remote tensors are strided",
    "sparse.mm.reduce": "sparse CSR: remote tensors are strided",
    "to_sparse": "sparse COO: remote tensors are strided",
    "tensor_split": "its sizes as a tensor must be local, as with CUDA",
    "ormqr": "strides of one gradient: torch's C++ formula takes another branch for tensor subclasses",
}


def _name(op: object) -> str:
    return str(op.full_name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_entries(session: object, chunk: int) -> None:
    _try(chunk, FEW, forms=1)


@pytest.mark.slow(reason="all sample inputs of a part of the database: some 10 s")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_samples_of_entries(session: object, chunk: int) -> None:
    _try(chunk, SAMPLES)


def _try(chunk: int, limit: int, forms: int = VARIANT_SAMPLES) -> None:
    wrong = {}
    for op in entries(torch.float32)[chunk::CHUNKS]:
        name = _name(op)
        try:
            run_entry(op, torch.float32, limit, forms=forms)
        except Disagreement as difference:
            if name not in KNOWN:
                wrong[name] = str(difference)
        else:
            if name in KNOWN:
                wrong[name] = "agrees now: take it out of KNOWN"
    assert not wrong, "\n" + "\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_how_many_are_covered() -> None:
    names = {_name(op) for op in entries(torch.float32)}
    assert len(names - set(KNOWN)) >= 670 or torch.__version__ < "2.13"
    assert all(reason for reason in KNOWN.values())
