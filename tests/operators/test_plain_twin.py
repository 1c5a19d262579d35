"""The hot path against a plain version of itself: the same signature, the same instruction."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session

aten = torch.ops.aten


# Their whole numbers are values, as fractions are.
NUMERIC = (
    "add",
    "mul",
    "addmm",
    "gt",
    "clamp",
    "full_like",
    "masked_fill",
    "floor_divide",
    "_foreach_add",
    "_foreach_mul",
)


def plain(value: Any, numeric: bool = False) -> tuple[list[Any], list[Any]]:
    """Return an argument's part of the signature, and its operand words: what `dispatch` and `_scan` do in
    one pass.
    """
    if numeric and type(value) is int:
        return [int], [value]
    if isinstance(value, dr.DistributedTensor):
        return [value._handle.spec], [value._handle.ref]
    if type(value) is float:
        return [float], [value]
    if isinstance(value, (list, tuple)):
        if value and all(type(item) is int for item in value):
            return [tuple(value)], []
        parts = [plain(item) for item in value]
        return [len(value), *(k for key, _ in parts for k in key)], [w for _, words in parts for w in words]
    return [type(value), value], []


def plain_call(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the signature of a call and its operand words."""
    key, words = [id(func)], []
    numeric = func._schema.name.partition("::")[2] in NUMERIC
    for value in args:
        part, operands = plain(value, numeric)
        # Among the arguments themselves a list of something else than integers starts with its length, as
        # anywhere.
        key += part
        words += operands
    for name, value in kwargs.items():
        part, operands = plain(value, numeric)
        key += [name, *part]
        words += operands
    return tuple(key), words


def _calls(x: Any, y: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    return [
        (aten.add.Tensor, (x, y), {}),
        (aten.add.Tensor, (x, y), {"alpha": 2}),
        (aten.add.Tensor, (x, 2), {}),
        (aten.add.Tensor, (x, 2.5), {}),
        (aten.add.Tensor, (x, True), {}),
        (aten.add.Tensor, (x, 1), {}),
        (aten.mul.Tensor, (x, -0.0), {}),
        (aten.mul.Tensor, (x, -7), {}),
        (aten.clamp.default, (x, None, 3), {}),
        (aten.masked_fill.Scalar, (x, aten.gt.Scalar(x, -1), 9), {}),
        (aten.floor_divide.default, (x, 2), {}),
        (aten.full_like.default, (x, 1 << 40), {}),
        (aten.pow.Tensor_Scalar, (x, 2), {}),
        (aten.index_fill.int_Scalar, (x, 0, aten.gt.Scalar(x[0], 9).nonzero()[:, 0], 4), {}),
        (aten.view.default, (x, [9]), {}),
        (aten.sum.dim_IntList, (x, [0, 1], True), {}),
        (aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64}),
        (aten.cat.default, ([x, y, x], 1), {}),
        (aten.stack.default, ([x, y],), {}),
        (aten.clamp.default, (x, None, 0.5), {}),
        (aten.slice.Tensor, (x, 0, 1, 9223372036854775807), {}),
        (aten.transpose.int, (x, 0, 1), {}),
        (aten.where.self, (aten.gt.Scalar(x, 0), x, y), {}),
        (aten.full_like.default, (x, 3.5), {}),
        (aten._foreach_add.List, ([x, y], [y, x]), {"alpha": 2}),
        (aten.addmm.default, (x, x, y), {"beta": 0.5, "alpha": 2}),
        (aten.topk.default, (x, 2), {}),
        (aten._foreach_mul.Scalar, ([x, y, x], 2.0), {}),
        (aten._foreach_mul.ScalarList, ([x, y], [1, 2.5]), {}),
        (aten._foreach_mul.ScalarList, ([x, y], [1, 2]), {}),
        (aten.split.Tensor, (x, 1, 1), {}),
        (aten.unbind.int, (x,), {}),
        (aten.native_layer_norm.default, (x, [3], y[0], None, 1e-5), {}),
        # Nobody wants the second of these results.
        (
            aten.native_layer_norm_backward.default,
            (x, y, [3], x[:, :1], y[:, :1], x[0], y[0], [True, False, True]),
            {},
        ),
    ]


@pytest.mark.parametrize("number", range(34))
def test_signature_and_instruction(session: Session, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    x, y = torch.randn(3, 3, device="remote"), torch.randn(3, 3, device="remote")
    func, args, kwargs = _calls(x, y)[number]
    place, node = x._handle.place, session.nodes[x.get_node()]
    module = sys.modules["distruntime.operators.dispatch"]
    seen: list[Any] = []
    original = module.first_time  # type: ignore[attr-defined]
    monkeypatch.setattr(
        module,
        "first_time",
        lambda cls, f, a, k, signature, *rest: (
            seen.append(signature),
            original(cls, f, a, k, signature, *rest),
        )[1],
    )
    signature, words = plain_call(func, args, kwargs)
    place.cache.pop(signature, None)
    place.unproven.pop(signature, None)
    first = func(*args, **kwargs)
    assert seen == [signature]
    dr.synchronize()  # the prediction is confirmed: from here on the hot path has it
    assert signature in place.cache
    with node.lock:  # nothing is sent meanwhile
        node.flush()
        node.enough = 1 << 30
        out = func(*args, **kwargs)
        log = [word for word in node.words if word in words or not (isinstance(word, int) and word < 0)]
        node.enough = 0
    results = out if isinstance(out, (list, tuple)) else [out]
    made = [r for r in results if r is not None]
    assert log == [place.cache[signature][0], *words, *(r._handle.ref for r in made)]
    assert seen == [signature] and type(out) is type(first)
    for a, b in zip(first if isinstance(first, (list, tuple)) else [first], results):
        if a is None or b is None:
            assert a is b
            continue
        assert torch.equal(a.cpu(), b.cpu()) and a.stride() == b.stride() and a.dtype == b.dtype


def test_numbers_that_compare_equal_are_told_apart(session: Session) -> None:
    x = torch.arange(3, device="remote")
    assert (
        (x + 1).dtype == torch.int64 and (x + True).dtype == torch.int64 and (x + 1.0).dtype == torch.float32
    )
    assert torch.full((1,), 0.0, device="remote").sign().item() == 0 and torch.copysign(
        x + 1, -0.0
    ).tolist() == [-1, -2, -3]
    assert torch.copysign(x + 1, 0.0).tolist() == [1, 2, 3]


def _factories() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    return [
        (aten.empty.memory_format, ([3, 2],), {"dtype": torch.float64}),
        (aten.empty_strided.default, ([2, 2], [1, 2]), {}),
        (aten.zeros.default, ([3],), {"dtype": torch.int64}),
        (aten.ones.default, ([],), {}),
        (aten.full.default, ([2], 2.5), {}),
        (aten.full.default, ([2], 2), {}),
        (aten.full.default, ([2], True), {}),
        (aten.scalar_tensor.default, (1.5,), {}),
        (aten.rand.default, ([4],), {}),
        (aten.randn.default, ([4],), {}),
        (aten.randint.low, (3, 9, [5]), {}),
        (aten.arange.default, (5,), {}),
        (aten.arange.start_step, (0.5, 2.5, 0.5), {}),
        (aten.linspace.default, (0.0, 1.0, 5), {}),
        (aten.eye.m, (2, 3), {}),
        (aten.randperm.default, (6,), {}),
    ]


@pytest.mark.parametrize("number", range(16))
def test_a_factory_is_one_instruction(session: Session, number: int) -> None:
    func, args, kwargs = _factories()[number]
    place, node = session.places.own[0], session.nodes[0]
    residence = session.places.residence(place)
    torch.manual_seed(7)
    local = func(*args, **kwargs, device=torch.device("cpu"))
    torch.manual_seed(7)
    first = func(*args, **kwargs, device=residence.device)
    # The prediction is confirmed: from here on the hot path has it.
    dr.synchronize()
    with node.lock:
        node.flush()
        node.enough = 1 << 30
        out = func(*args, **kwargs, device=residence.device)
        log = [word for word in node.words if not (isinstance(word, int) and word < 0)]
        node.enough = 0
    whole = int if func._schema.name == "aten::full" else float
    numbers = [a for a in args if type(a) in (float, whole)]
    assert log[1:] == [*numbers, out._handle.ref] and isinstance(log[0], int)
    assert (first.shape, first.stride(), first.dtype) == (local.shape, local.stride(), local.dtype)
    assert (out.shape, out.stride(), out.dtype) == (local.shape, local.stride(), local.dtype)
    if "empty" not in func._schema.name:
        assert torch.equal(first.cpu(), local)


def test_numbers_of_factories_are_told_apart(session: Session) -> None:
    for value in (1, True, 1.0, 2.0, -0.0, 0.0, float("nan")):
        local = torch.full((2,), value)
        for _ in range(3):
            x = torch.full((2,), value, device="remote")
            assert x.dtype == local.dtype and str(x.cpu()) == str(local)
    for stop in (3, 3.0, 2.5, 3.5):
        for _ in range(3):
            assert torch.equal(torch.arange(stop, device="remote").cpu(), torch.arange(stop))
