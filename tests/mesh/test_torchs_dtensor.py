"""A part of PyTorch's operator database on DTensors over two workers, operands laid out by torch's own
`DTensorConverter`.

All of it, with what torch's DTensor refuses by itself, is `long/dtensor_op_db.py`.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from dtensor_samples import RIGHT, Side, run_entry
from meshes import make, same, two_workers
from op_samples import entries

__all__ = ["two_workers"]

SAMPLES, LAYOUTS = 2, 5
CHOSEN = {
    "pointwise": "add mul exp clamp where nn.functional.gelu",
    "reductions": "sum mean var amax argmax any linalg.vector_norm",
    "views": "view transpose unsqueeze expand narrow unbind",
    "products": "mm bmm addmm matmul nn.functional.linear",
    "indices": "nn.functional.embedding index_select gather scatter_add",
    "parts": "cat stack split",
    "orders": "sort topk cumsum",
    "random": "nn.functional.dropout bernoulli rand_like",
    "softmax": "softmax log_softmax nn.functional.cross_entropy",
    "norms": "nn.functional.layer_norm nn.functional.rms_norm",
}
# In DTensor's own words, on LocalTensor as on a mesh: of tensors without dimensions, of dimensions of 5 in
# two, of what it has no rule for.
REFUSED = {
    "view": r"Cannot unflatten unevenly sharded tensor",
    "transpose": r"Expected dim1 < ndim",
    "nn.functional.linear": r"dimensionality of sizes \(2\) must match",
    "nn.functional.embedding": r"embedding_renorm_.* does not have a sharding strategy",
    "nn.functional.rms_norm": r"in-place operations that require placement changes",
}
# Its DTensor refuses more.
OLD = torch.__version__ < "2.12"
if OLD:
    REFUSED |= {
        "nn.functional.linear": r"Attempted to flatten multiple dimensions",
        "index_select": r"aten\.index_(add|select)\.default",
        "stack": r"Mismatch in shape: grad_output",
        "sort": r"aten\.scatter\.src got mixed torch\.Tensor and DTensor",
        "topk": r"aten\.scatter\.src got mixed torch\.Tensor and DTensor",
        "cumsum": r"aten\.flip\.default does not have a sharding strategy",
        "nn.functional.layer_norm": r"to be of same shape as normalized_shape",
    }


@pytest.mark.parametrize("kind", CHOSEN)
def test_entries(two_workers: None, kind: str) -> None:
    side, wrong = Side(make("2")), {}
    for op in entries(torch.float32):
        if op.full_name in CHOSEN[kind].split():
            found = [words for sample in run_entry(op, side, SAMPLES, LAYOUTS) for words in sample]
            wrong[op.full_name] = [
                words
                for words in found
                if words != RIGHT and not re.search(REFUSED.get(op.full_name, "$^"), words)
            ]
            assert OLD or found.count(RIGHT) >= len(found) / 2, f"{op.full_name}: {found}"
    assert set(wrong) == set(CHOSEN[kind].split())
    assert not any(wrong.values()), {name: words for name, words in wrong.items() if words}


@pytest.mark.parametrize("name", ["add", "mul", "clamp", "exp", "sigmoid"])
def test_in_place_and_out(two_workers: None, name: str) -> None:
    mesh = make("2")
    (op,) = [op for op in entries(torch.float32) if op.full_name == name]
    x = torch.arange(32.0).reshape(8, 4) / 10 - 1
    args = {"add": (x.flip(0),), "mul": (0.5,), "clamp": (-0.5, 0.5)}.get(name, ())
    wanted = op.op(x, *args)
    for dim in (0, 1):
        given = [
            distribute_tensor(a.to(mesh.device), mesh, [Shard(dim)]) if isinstance(a, torch.Tensor) else a
            for a in args
        ]
        t, out = (distribute_tensor(v.to(mesh.device), mesh, [Shard(dim)]) for v in (x, torch.zeros_like(x)))
        assert op.op(t, *given, out=out) is out
        same(out, wanted)
        local = t.to_local()
        assert op.inplace_variant(t, *given) is t
        same(t, wanted)
        # Both have one memory.
        assert torch.equal(local, t.to_local())
