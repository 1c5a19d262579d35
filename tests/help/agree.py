"""Remote results must be what the same code gives locally: metadata, values, gradients, kinds of error.

Every comparison here runs the same code twice, once on "cpu" and once on a worker. Nothing is compared with a
stored number.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

import distruntime as dr

REMOTE = "remote"
_Case = Callable[..., Any]


class Disagreement(AssertionError):
    """The worker's result is not the local one."""


def is_remote(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "remote"


def there(value: torch.Tensor, node: int = 0) -> torch.Tensor:
    """Return a copy on a node's CPU."""
    with dr.node(node):
        return value.to(REMOTE)


class Copier:
    """Copies trees of tensors to a device with everything that code can see: strides, offsets, shared
    storages, shared identity.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        return tree_map(self._leaf, tree)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self.device)
        if not isinstance(value, torch.Tensor):
            return self.device if isinstance(value, str) and value == "cpu" else value
        # The original is kept too: its id must not be given away.
        if id(value) not in self._seen:
            copy = self._tensor(value.detach()).detach()
            if isinstance(value, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, value.requires_grad)
            self._seen[id(value)] = value, copy.requires_grad_(value.requires_grad)
        return self._seen[id(value)][1]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return value.clone() if self.device == "cpu" else value.to(self.device)
        if value.is_conj():
            return self._tensor(value.conj()).conj()
        if value.is_neg():
            return self._tensor(value._neg_view())._neg_view()
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in self._storages:
            flat = torch.empty(0, dtype=value.dtype).set_(storage)
            self._storages[key] = flat, flat.clone() if self.device == "cpu" else flat.to(self.device)
        flat = self._storages[key][1]
        return flat.as_strided(value.size(), value.stride(), value.storage_offset())

    def leaves(self) -> list[torch.Tensor]:
        """The copies that want gradients, in the order in which they were met."""
        return [copy for _, copy in self._seen.values() if copy.requires_grad]


def seed(number: int) -> None:
    """Seed this process and the workers, as `torch.manual_seed` does. It takes a tenth of the time.

    torch formats the stack anew for each kind of accelerator that it might have to seed later. Under pytest
    that is half a millisecond, and the operator database seeds fifty thousand times.
    """
    # torch has this module once a session has begun.
    remote = getattr(torch, "remote", None)
    if remote is not None:
        remote.manual_seed_all(number)
    torch.default_generator.manual_seed(number)


def gradients(outputs: Any, leaves: list[torch.Tensor], device: str) -> list[torch.Tensor | None]:
    """Gradients of all differentiable outputs, weighted at random: a plain sum would hide what is constant
    along it.
    """
    outs = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outs or not leaves:
        return []
    generator = torch.Generator().manual_seed(1)
    # Complex weights are drawn as complex numbers. The output has no say in their layout, so `randn` makes
    # all weights contiguous.
    weights = [torch.randn(o.shape, dtype=o.dtype, generator=generator).to(device) for o in outs]
    found = torch.autograd.grad(outs, leaves, weights, allow_unused=True)
    # It is an accident whether a gradient is a view (C++ formulas take other branches for tensor subclasses),
    # so all are detached.
    return [None if g is None else g.detach() for g in found]


def outcome(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What the code gives: a result whose tensors are all here and computed, or the error it raises."""
    try:
        return _settled(run), None
    except Exception as error:
        # The error may be of any kind: it is compared with the other side's.
        return None, error.with_traceback(None)


def _settled(run: Callable[[], Any]) -> Any:
    result = run()
    return result, dr.fetch(tree_map(_detached, result))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def check(
    local: Callable[[], Any],
    remote: Callable[[], Any],
    *,
    values: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    must_work: bool = False,
) -> bool:
    """Run both and raise `Disagreement` unless they agree.

    True if there was a result to compare, False if both raised alike. With `must_work` the local run may
    raise only that torch has no such kernel for this processor.
    """
    __tracebackhide__ = True
    return check_against(expectation(local, must_work), remote, values=values, rtol=rtol, atol=atol)


@dataclass(frozen=True)
class Seen:
    """A tensor as code sees it. Unlike the tensor it can be sent to another process with all of that."""

    visible: dict[str, Any]
    value: torch.Tensor

    @staticmethod
    def of(value: Any) -> Any:
        """Return a tensor as it is seen, and anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return Seen({name: _visible(value, name) for name in _VISIBLE}, value.detach())

    @staticmethod
    def sent(value: Any) -> Any:
        """Return it with a value that lies on the CPU, in no larger storage than it needs."""
        return Seen(value.visible, value.value.cpu().clone()) if isinstance(value, Seen) else value


class Raised(NamedTuple):
    """The kind of an error, and what it says. Unlike some errors it can be sent to another process."""

    kind: type[Exception]
    text: str


@dataclass(frozen=True)
class Expected:
    """What a local run gave: the leaves of a tree, whose tensors are `Seen`, or the error that it raised."""

    leaves: list[Any]
    spec: TreeSpec | None
    error: Raised | None = None

    def sent(self) -> Expected:
        """Return it in a form that can be sent to another process."""
        return Expected([Seen.sent(leaf) for leaf in self.leaves], self.spec, self.error)


def expectation(local: Callable[[], Any], must_work: bool = False) -> Expected:
    """Run the local side. With `must_work` it may raise only that torch has no such kernel."""
    try:
        result = local()
    except Exception as raised:
        # Any other error is then the case's own.
        if must_work and not _has_no_kernel(str(raised)):
            raise
        return Expected([], None, Raised(type(raised), str(raised)))
    leaves, spec = tree_flatten(result)
    return Expected([Seen.of(leaf) for leaf in leaves], spec)


def check_against(
    expected: Expected,
    remote: Callable[[], Any],
    *,
    values: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> bool:
    """Run the remote side and raise `Disagreement` unless it gives what is expected.

    True if there was a result to compare, False if both raised alike.
    """
    __tracebackhide__ = True
    got, error = outcome(remote)
    if expected.error is not None:
        kind, text = expected.error
        shown = _one_line(kind, text)
        if error is None:
            raise Disagreement(f"raises {shown} locally, but not remotely")
        if not isinstance(error, kind):
            raise Disagreement(
                f"raises {shown} locally, but {_one_line(type(error), str(error))} remotely"
            ) from error
        if _has_no_kernel(text) and _first_line(str(error)) != _first_line(text):
            raise Disagreement(
                f"says {_first_line(text)!r} locally, but {_first_line(str(error))!r} remotely"
            ) from error
        return False
    if error is not None:
        raise Disagreement(
            f"works locally, but raises {_one_line(type(error), str(error))} remotely"
        ) from error
    compare(expected, got, values=values, rtol=rtol, atol=atol)
    return True


def _has_no_kernel(text: str) -> bool:
    """Whether torch says that this processor cannot do it: oneDNN's LSTM in bfloat16 needs AVX-512."""
    return "could not create a primitive" in text or "not implemented for" in text


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _one_line(kind: type[Exception], text: str) -> str:
    return f"{kind.__name__}: {' '.join(text.split())[:300]}"


def compare(
    expected: Expected,
    got: tuple[Any, Any],
    *,
    values: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare what is expected with (tree as the code gave it, the same tree fetched)."""
    __tracebackhide__ = True
    proxies, spec = tree_flatten(got[0])
    if expected.spec != spec:
        raise Disagreement(f"structure: local {expected.spec}, remote {spec}")
    fetched = tree_flatten(got[1])[0]
    for i, (a, proxy, b) in enumerate(zip(expected.leaves, proxies, fetched, strict=True)):
        if not isinstance(a, Seen):
            if type(a) is not type(b) or not (a == b or (a != a and b != b) or _close_numbers(a, b)):
                raise Disagreement(f"result {i}: local {a!r}, remote {b!r}")
            continue
        if not isinstance(proxy, torch.Tensor):
            raise Disagreement(f"result {i}: local is a tensor, remote {proxy!r}")
        for name, here in a.visible.items():
            there = _visible(proxy, name)
            if name == "_is_view" and (here is _HIDDEN or (here and there is _HIDDEN)):
                continue
            if here != there:
                raise Disagreement(f"result {i}: {name}: local {here}, remote {there}")
        if is_remote(b):
            raise Disagreement(f"result {i} was not fetched")
        shape, dtype = a.visible["shape"], a.visible["dtype"]
        if b.shape != shape or b.dtype != dtype:
            raise Disagreement(
                f"result {i}: the proxy says {dtype} {tuple(shape)}, its value is {b.dtype} {tuple(b.shape)}"
            )
        if values:
            _compare_values(i, a.value, b, rtol, atol)


_VISIBLE = (
    "shape",
    "dtype",
    "layout",
    "stride",
    "storage_offset",
    "is_conj",
    "is_neg",
    "requires_grad",
    "is_leaf",
    "_is_view",
)


def _holds_of_base(view: torch.Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


# A view of what nobody holds: torch gives one where it makes an operator of others, and remotely that is one
# instruction. How many holds that is depends on the version of torch.
_HIDDEN = "a view of what nobody holds"
_NOBODY = _holds_of_base(torch.ones(2)[:1])


def _visible(tensor: torch.Tensor, name: str) -> Any:
    if name == "_is_view" and tensor._is_view():
        return _HIDDEN if _holds_of_base(tensor) == _NOBODY else True
    if name in ("stride", "storage_offset") and tensor.layout is not torch.strided:
        return None
    # Nobody steps along a dimension of one element or none, and torch itself lets its stride float.
    if name == "stride":
        return [
            step
            for step, size in zip(tensor.stride(), tensor.size(), strict=True)
            if size > 1 and tensor.numel()
        ]
    value = getattr(tensor, name)
    return value() if callable(value) else value


def _close_numbers(a: Any, b: Any) -> bool:
    return isinstance(a, (float, complex)) and abs(a - b) <= 1e-6 * abs(a)


def _compare_values(i: int, a: torch.Tensor, b: torch.Tensor, rtol: float | None, atol: float | None) -> None:
    __tracebackhide__ = True
    # Either may be on another device of this process: a worker's also, where a sample names the device.
    a, b = a.cpu(), b.cpu()
    # `equal` knows no complex32.
    quick = a.layout is torch.strided and not a.is_quantized and a.dtype is not torch.complex32
    if quick and torch.equal(a, b):
        return
    try:
        torch.testing.assert_close(b, a, equal_nan=True, rtol=rtol, atol=atol, check_stride=False)
    except AssertionError as error:
        raise Disagreement(f"result {i}: {' '.join(str(error).split())}") from None


def agrees(
    case: _Case | None = None,
    *,
    remote_result: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Any:
    """Make a test of `case(device)`: run on "cpu" and on a worker, it must give equal results, or raise
    errors of the same class.

    Unless `remote_result=False`, something in the remote result must live on the worker: a case that never
    left would prove nothing.
    """
    if case is None:
        return functools.partial(agrees, remote_result=remote_result, rtol=rtol, atol=atol)
    names = list(inspect.signature(case).parameters)
    assert names[0] == "device", f"{case.__name__} must take the device first"

    @functools.wraps(case)
    def test(session: object, **arguments: Any) -> None:
        __tracebackhide__ = True
        reached: list[bool] = []

        def run(device: str) -> Any:
            seed(0)
            result = case(device, **arguments)
            if device == REMOTE:
                reached.append(any(is_remote(leaf) for leaf in tree_leaves(result)))
            return result

        worked = check(lambda: run("cpu"), lambda: run(REMOTE), rtol=rtol, atol=atol, must_work=True)
        assert reached == [True] or not (worked and remote_result), "nothing in the result is remote"

    signature = inspect.signature(case)
    rest = [p for name, p in signature.parameters.items() if name != "device"]
    session_parameter = inspect.Parameter("session", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([session_parameter, *rest])  # type: ignore[attr-defined]  # pytest reads the fixtures off it
    return test


def tensor(
    device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False
) -> torch.Tensor:
    """Equal random numbers on every device, drawn here: a case must not depend on the worker's generator by
    accident.
    """
    value = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return value.to(device).requires_grad_(grad)


def quietly(run: Callable[[], Any]) -> Any:
    """Torch's own test data and deprecated operators warn; what is compared here is results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()


def some(items: list[Any], limit: int) -> Iterator[Any]:
    """At most `limit` of the items, evenly spread, first and last included."""
    if len(items) <= limit:
        return iter(items)
    return (items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit))
