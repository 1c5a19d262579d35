"""Wrong arguments are told at their line, in the class and the words of torch's own kernels.

`tests/torch_db/test_error_inputs.py` compares many more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from agree import REMOTE, outcome, quietly
from distruntime.operators import rehearsal, result_sizes

Case = Callable[..., object]


def _x(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(16.0, device=device).view(4, 4).to(dtype)


def _image(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(1, 4, 8, 8, dtype=dtype, device=device)


def at_once(case: Callable[[str], object]) -> None:
    """Hold that the very call raises what it raises here, and not the read of its result."""
    _, local = outcome(lambda: case("cpu"))
    assert local is not None and not isinstance(local, Warning), "torch takes it here"
    # The worker has no part in it.
    with pytest.raises(type(local)) as caught:
        case(REMOTE)
    assert type(caught.value) is type(local) and str(caught.value) == str(local)
    # Nothing was issued that would fail.
    dr.synchronize()


double, half, whole, truth = torch.float64, torch.float16, torch.int64, torch.bool
PRODUCTS: dict[str, Callable[[str], object]] = {
    "@": lambda d: _x(d) @ _x(d, double),
    "addmm": lambda d: torch.addmm(_x(d, double), _x(d), _x(d)),
    "bmm": lambda d: torch.bmm(_x(d)[None], _x(d, double)[None]),
    "baddbmm": lambda d: torch.baddbmm(_x(d)[None], _x(d)[None], _x(d, half)[None]),
    "addbmm": lambda d: torch.addbmm(_x(d, double), _x(d)[None], _x(d)[None]),
    "matmul of a batch": lambda d: torch.matmul(_image(d), _image(d, half)),
    "mv": lambda d: torch.mv(_x(d), _x(d, double)[0]),
    "addmv": lambda d: torch.addmv(_x(d)[0], _x(d), _x(d, double)[0]),
    "dot": lambda d: torch.dot(_x(d)[0], _x(d, double)[0]),
    "vdot": lambda d: torch.vdot(_x(d)[0], _x(d, double)[0]),
    "bools": lambda d: _x(d, truth) @ _x(d, truth),
    "linear": lambda d: F.linear(_x(d), _x(d, double)),
    "a bias": lambda d: F.linear(_x(d), _x(d), _x(d, double)[0]),
    "a module of another precision": lambda d: nn.Linear(4, 4).half().to(d)(_x(d)),
    "einsum": lambda d: torch.einsum("ij,jk", _x(d), _x(d, half)),
    "conv2d": lambda d: F.conv2d(_image(d, double), _image(d)),
    "conv1d": lambda d: F.conv1d(_x(d, half)[None], _x(d)[None]),
    "a convolution's bias": lambda d: F.conv2d(_image(d), _image(d), _x(d, double)[0, :1]),
    "conv_transpose2d": lambda d: F.conv_transpose2d(_image(d), _image(d, half).transpose(0, 1)),
    "cross": lambda d: torch.linalg.cross(_x(d)[:, :3], _x(d, double)[:, :3]),
    "cdist": lambda d: torch.cdist(_x(d), _x(d, double)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(_x(d).sigmoid(), _x(d, double).sigmoid()),
    "grid_sample": lambda d: F.grid_sample(
        _image(d), torch.zeros(1, 2, 2, 2, device=d).double(), align_corners=False
    ),
    "grid_sample of volumes": lambda d: F.grid_sample(
        _image(d)[:, None], torch.zeros(1, 2, 2, 2, 3, device=d).double(), align_corners=False
    ),
}
ELEMENTS: dict[str, Callable[[str], object]] = {
    "float & float": lambda d: _x(d) & _x(d),
    "float | bool": lambda d: _x(d) | _x(d, truth),
    "float ^ float": lambda d: _x(d) ^ _x(d),
    "not": lambda d: torch.bitwise_not(_x(d)),
    "float << int": lambda d: _x(d) << _x(d, whole),
    "gelu": lambda d: F.gelu(_x(d, whole)),
    "large": lambda d: torch.zeros(1, 1, device=d).expand(1 << 13, 1 << 12) & 1.0,
    "softplus": lambda d: F.softplus(_x(d, whole)),
    "leaky_relu": lambda d: F.leaky_relu(_x(d, truth)),
}
OTHERS: dict[str, Callable[[str], object]] = {
    "softmax": lambda d: F.softmax(_x(d, whole), 0),
    "cross_entropy": lambda d: F.cross_entropy(_x(d, whole), _x(d, whole)[0]),
    "nll_loss": lambda d: F.nll_loss(_x(d, whole), _x(d, whole)[0]),
    "mse_loss": lambda d: F.mse_loss(_x(d, whole), _x(d, whole)),
    "huber_loss": lambda d: F.huber_loss(_x(d, whole), _x(d, whole)),
    "smooth_l1_loss": lambda d: F.smooth_l1_loss(_x(d, whole), _x(d, whole)),
    "logsigmoid": lambda d: F.logsigmoid(_x(d, whole)),
    "glu": lambda d: F.glu(_x(d, whole)),
    "hardswish": lambda d: F.hardswish(_x(d, whole)),
    "prelu": lambda d: F.prelu(_x(d, whole), _x(d, whole)[0, :1]),
    "adaptive_avg_pool2d": lambda d: F.adaptive_avg_pool2d(_image(d, whole), 2),
    "adaptive_max_pool2d": lambda d: F.adaptive_max_pool2d(_image(d, whole), 2),
    "interpolate": lambda d: F.interpolate(_image(d, whole), scale_factor=2, mode="bilinear"),
    "std": lambda d: _x(d, whole).std(),
    "var": lambda d: _x(d, whole).var(0),
    "std_mean": lambda d: torch.std_mean(_x(d, whole)),
    "var_mean": lambda d: torch.var_mean(_x(d, whole), 0),
    "attention": lambda d: torch.ops.aten._safe_softmax(_x(d, whole), 0),
    "argmax": lambda d: _x(d, truth).argmax(),
    "argmin": lambda d: _x(d, truth).argmin(1),
    "topk": lambda d: _x(d, truth).topk(2),
    "median": lambda d: _x(d, truth).median(),
    "kthvalue": lambda d: _x(d, truth).kthvalue(1),
    "all into numbers": lambda d: torch.all(_x(d), 1, out=_x(d)[0]),
    "any into numbers": lambda d: torch.any(_x(d), 1, out=_x(d, whole)[0]),
    "index_put": lambda d: _x(d).index_put((_x(d, whole)[0] // 4,), _x(d, double)),
    "x[i] = y": lambda d: _x(d, whole).__setitem__(_x(d, whole)[0] // 4, _x(d)),
    "index_add": lambda d: _x(d).index_add(0, _x(d, whole)[0] // 4, _x(d, double)),
    "index_add_": lambda d: _x(d).index_add_(0, _x(d, whole)[0] // 4, _x(d, double)),
    "index_copy": lambda d: _x(d).index_copy(0, _x(d, whole)[0] // 4, _x(d, double)),
    "index_copy_": lambda d: _x(d).index_copy_(0, _x(d, whole)[0] // 4, _x(d, double)),
    "put": lambda d: torch.put(_x(d), _x(d, whole)[0], _x(d, double)[0]),
    "put_": lambda d: _x(d).put_(_x(d, whole)[0], _x(d, double)[0]),
}
LISTS: dict[str, Callable[[str], object]] = {
    "a list of bools": lambda d: torch._foreach_ceil([_x(d, truth), _x(d)]),
    "a list, one of it bools": lambda d: torch._foreach_ceil([_x(d), _x(d), _x(d, truth)]),
    "a list in place": lambda d: torch._foreach_abs_([_x(d, truth)]),
    "a list and a number": lambda d: torch._foreach_add_([_x(d)], 1j),
    "a list and numbers": lambda d: torch._foreach_add_([_x(d), _x(d)], [1.0, 1j]),
    "two lists": lambda d: torch._foreach_sub([_x(d, truth)], [_x(d, truth)]),
    "three lists": lambda d: torch._foreach_addcdiv([_x(d, whole)], [_x(d, whole)], [_x(d, whole)]),
    "a list's norms": lambda d: torch._foreach_norm([_x(d, whole)]),
}
DTYPES = {**PRODUCTS, **ELEMENTS, **OTHERS, **LISTS}


@pytest.mark.parametrize("name", DTYPES)
def test_a_wrong_dtype_is_told_at_its_line(session: object, name: str) -> None:
    at_once(DTYPES[name])


def test_every_operator_that_is_suspicious_has_a_case(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator whose meta kernel looks at dtypes, in every torch that we take, must leave the table."""
    met: set[str] = set()
    told = rehearsal._raise_of_dtypes

    def note(func: Any, *args: Any) -> None:
        met.add(func._schema.name)
        told(func, *args)

    monkeypatch.setattr(rehearsal, "_raise_of_dtypes", note)
    for case in DTYPES.values():
        outcome(lambda case=case: case(REMOTE))
    of_older_versions = {"aten::bmm", "aten::addmv"}
    assert set(rehearsal._SUSPICIOUS) - met == of_older_versions or torch.__version__ < "2.13"


# Each of these meta kernels raises another class than torch's, or other words.
WORDS: dict[str, Callable[[str], object]] = {
    "x @ y": lambda d: _x(d) @ _x(d)[:3],
    "x + y": lambda d: _x(d) + _x(d)[:3],
    "clamp without limits": lambda d: _x(d).clamp(),
    "nll_loss's weights": lambda d: F.nll_loss(_x(d), _x(d, whole)[0], weight=_x(d)[0, :2]),
    "grid_sample": lambda d: F.grid_sample(_x(d), _x(d), align_corners=False),
    "slogdet": lambda d: torch.linalg.slogdet(_x(d)[0, 0]),
    "complex": lambda d: torch.complex(_x(d, torch.int32), _x(d, torch.int32)),
    "an index": lambda d: _x(d)[False, [0, 1], [0, 1, 2]],
    "embedding": lambda d: F.embedding(_x(d, whole), _x(d)[0]),
    "cat": lambda d: torch.cat([_x(d), _x(d)[None]]),
    "a convolution's channels": lambda d: F.conv2d(_image(d), torch.ones(2, 3, 3, 3, device=d)),
    "a factory": lambda d: torch.eye(-1, device=d),
    "in place": lambda d: _x(d).add_(torch.ones(3, 4, 4, device=d)),
    "large": lambda d: torch.empty(1 << 13, 1 << 13, device=d) @ torch.empty(1 << 12, 1 << 13, device=d),
    "a large view": lambda d: torch.empty(1 << 10, 1 << 9, device=d).t().view(-1),
    "more than memory": lambda d: _x(d)[:1, :1].expand(1 << 14, 1 << 13) @ _x(d)[:1, :1].expand(4, 1 << 10),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_refused_call_has_the_kernels_class_and_words(session: object, name: str) -> None:
    at_once(WORDS[name])


def test_a_training_script_learns_of_its_mistake_before_the_next_line(session: object) -> None:
    """As with any tutorial's classifier that is half in half precision."""
    dr.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(REMOTE)
    images, labels = torch.rand(8, 1, 8, 8, device=REMOTE), torch.arange(8, device=REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(4):
        if step == 2:
            model[3].half()
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(images), labels)
        except RuntimeError as error:
            assert str(error) == "mat1 and mat2 must have the same dtype, but got Float and Half"
            model[3].float()
            continue
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 3 and losses[2] < losses[0]


# What a rehearsal must not do


def test_what_a_rehearsal_draws_is_not_missed_here(session: object) -> None:
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="1 or 2 dim"):
            torch.multinomial(_x(REMOTE)[None], 2)
    F.dropout(_x(REMOTE), 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_of_local_tensors_has_no_part_in_it(session: object) -> None:
    with (
        pytest.warns(UserWarning, match="around remote operations"),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="same dtype"),
    ):
        _x(REMOTE) @ _x(REMOTE, double)


def test_values_are_not_rehearsed(session: object) -> None:
    """Stand-ins hold other numbers than the operands, so only dtypes count."""
    empty = torch.ones(0, dtype=whole, device=REMOTE)
    assert (empty // 0).tolist() == [] and (empty % empty).tolist() == []
    assert (_x(REMOTE, whole) // (_x(REMOTE, whole) + 1)).sum().item() == 0
    weights, two = torch.rand(3, 2, device=REMOTE), torch.tensor([2, 0], device=REMOTE)
    assert torch.equal(F.embedding(two, weights).cpu(), weights.cpu()[[2, 0]])


def test_a_second_shape_is_not_rehearsed(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.ones(3, 1, device=REMOTE), torch.ones(5, 2, device=REMOTE)
    # Another test may have called it with these dtypes.
    monkeypatch.setattr(rehearsal, "_taken", set())
    monkeypatch.setattr(result_sizes, "_known", {})
    torch.atan2(one, one)
    calls: list[object] = []
    monkeypatch.setattr(rehearsal, "_call", lambda func, *rest: calls.append(func))
    torch.atan2(two, two)
    assert calls == []
    torch.atan2(two.double(), two.double())
    assert calls == [torch.ops.aten.atan2.default]


def test_a_second_list_of_the_same_dtypes_is_not_rehearsed(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lists(*sizes: int) -> list[torch.Tensor]:
        return [torch.ones(size, 2, device=REMOTE) for size in sizes]

    calls: list[Any] = []
    call = rehearsal._call
    monkeypatch.setattr(rehearsal, "_call", lambda *args: calls.append(args) or call(*args))
    monkeypatch.setattr(rehearsal, "_taken", set())
    for sizes in ((3, 4, 3), (5,)):
        torch._foreach_mul(lists(*sizes), lists(*sizes))
        torch._foreach_mul(lists(*sizes), 2.0)
    # One position stands for all that have its dtypes.
    assert [[len(value) if isinstance(value, list) else value for value in args[1]] for args in calls] == [
        [1, 1],
        [1, 2.0],
    ]
    # Elements that are none are not rehearsed.
    assert [t.tolist() for t in torch._foreach_sqrt([torch.ones(0, device=REMOTE)])] == [[]]


def test_the_worker_decides_where_the_meta_kernel_alone_refuses(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meta kernel may be wrong, or speak for another device."""

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("what this meta kernel believes")

    monkeypatch.setattr(rehearsal, "_doubted", set())
    library = torch.library.Library("aten", "IMPL")
    try:
        # It warns that there is such a kernel already.
        quietly(lambda: library.impl("trace", refuse, "Meta", allow_override=True))
        for _ in range(2):
            assert torch.trace(_x(REMOTE)).item() == 30
        assert rehearsal._doubted == {torch.ops.aten.trace.default}
        with pytest.raises(RuntimeError, match="expected a matrix") as caught:
            torch.trace(_x(REMOTE)[0])
        # The kernel was not called here again, as it might compute for long.
        assert isinstance(caught.value, dr.errors.RemoteError)
    finally:
        library._destroy()


def test_a_number_of_another_type_is_rehearsed_too(session: object) -> None:
    """The operator and its tensors had been taken, with a number that fits."""
    _x(REMOTE).mul_(2.0)
    at_once(lambda d: _x(d).mul_(1j))
