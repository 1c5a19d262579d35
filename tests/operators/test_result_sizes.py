"""What is predicted of results whose sizes follow from the operands', against what kernels return."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._python_dispatch import TorchDispatchMode

import distruntime as dr
import distruntime.operators.propagate as propagate
from distruntime.log.spec import spec_of
from distruntime.operators.result_sizes import kind_of, learn, predict

_MORE = (
    *("addcdiv", "addcmul", "clamp", "lerp", "where", "softmax", "log_softmax", "nn.functional.gelu"),
    *("native_batch_norm", "nn.functional.batch_norm"),
)
_INFOS = [
    info
    for info in op_db
    if torch.float32 in info.dtypes
    and (isinstance(info, (BinaryUfuncInfo, UnaryUfuncInfo)) or info.name in _MORE)
    and not info.name.startswith("jiterator")
]
_SAMPLES = 3


class _Held(TorchDispatchMode):
    """Holds each call against what is predicted of it, and lets the prediction learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call itself."""
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        if any(t.layout is not torch.strided for t in tensors):
            return result
        kind, specs = kind_of(func, args, kwargs or {}, spec_of, True)
        made = result if isinstance(result, tuple) else [result]
        if kind and None not in made:
            real = [*map(spec_of, made)]
            known = predict(func, kind, specs)
            self.counts["known" if known else "unknown"] += 1
            assert known in ([], real), (func, specs, real)
            learn(func, kind, specs, real)
        return result


@pytest.mark.filterwarnings("ignore")
def test_what_is_predicted_is_what_torchs_kernels_return() -> None:
    with _Held() as held, torch.no_grad():
        for info in _INFOS:
            try:
                samples = list(islice(info.sample_inputs("cpu", torch.float32), _SAMPLES))
            except (NotImplementedError, RuntimeError):
                # torch has no such samples on this processor.
                continue
            for sample in samples:
                try:
                    info.op(sample.input, *sample.args, **sample.kwargs)
                except (NotImplementedError, RuntimeError, ValueError):
                    # torch has no such kernel on this processor.
                    continue
    assert held.counts["known"] > 200 and held.counts["unknown"] > 100, held.counts


_LAYOUTS = [
    lambda t: t,
    lambda t: t.transpose(0, 1),
    lambda t: t[:, :1],
    lambda t: t[:1],
    lambda t: t.unsqueeze(0),
    lambda t: t.expand(2, *t.shape),
    lambda t: t[0],
    lambda t: t[0, 0],
    lambda t: t[:0],
    lambda t: t[::2].contiguous(),
]


@pytest.mark.parametrize("func", [torch.add, torch.mul, torch.lt, torch.pow, torch.where])
def test_pairs_of_layouts(func: Any) -> None:
    with _Held() as held:
        for _ in range(2):
            for one in _LAYOUTS:
                for other in _LAYOUTS:
                    x, y = one(torch.rand(4, 4)), other(torch.rand(4, 4, dtype=torch.float64))
                    try:
                        func(x > 0.5, x, y) if func is torch.where else func(x, y)
                    except RuntimeError as error:
                        assert "must match the size" in str(error)
    assert held.counts["known"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_norms_and_softmaxes_of_many_sizes(layout: torch.memory_format) -> None:
    with _Held() as held:
        for sizes in ((2, 3, 5, 4), (3, 4, 1, 2), (1, 3, 2, 2), (2, 3, 5, 4), (4, 1, 3, 3), (5, 2)):
            x = torch.rand(sizes)
            if len(sizes) == 4:
                x = x.contiguous(memory_format=layout)
            x.requires_grad_()
            norm = torch.nn.BatchNorm2d(sizes[1]) if len(sizes) == 4 else torch.nn.BatchNorm1d(sizes[1])
            (norm(x) + x.softmax(1) + x.log_softmax(-1)).sum().backward()
            if len(sizes) == 4:
                torch.nn.BatchNorm2d(sizes[1], affine=False)(x).sum().backward()
                torch.nn.BatchNorm2d(sizes[1], affine=False, track_running_stats=False)(x)
    assert held.counts["known"] > 10 or layout is torch.channels_last


def test_a_call_of_new_sizes_is_no_call_of_a_meta_kernel(
    session: dr.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(3, 5, device="remote")
    x.atan2(x)
    y, row = torch.rand(7, 2, 5, device="remote"), torch.rand(5, device="remote")
    with monkeypatch.context() as patched:
        patched.setattr(propagate, "_propagate", None)
        found = y.atan2(row)
    assert torch.equal(found.cpu(), y.cpu().atan2(row.cpu()))
    with pytest.raises(RuntimeError, match="must match the size"):
        x.atan2(torch.rand(4, device="remote"))
