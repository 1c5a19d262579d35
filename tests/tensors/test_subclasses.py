"""Subclasses of `torch.Tensor` of remote tensors, as fastai and torchvision have them, and lazy modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import distruntime as dr
from agree import REMOTE


class Image(torch.Tensor):
    def width(self) -> int:
        return self.shape[-1]


class Logged(torch.Tensor):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def image(device: str = REMOTE) -> Any:
    return torch.arange(6.0).view(2, 3).to(device).as_subclass(Image)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "a sum of it": lambda y: y + 1,
    "it and a plain one": lambda y: torch.ones_like(y).as_subclass(torch.Tensor) + y,
    "a view": lambda y: y[:, 1:],
    "a list": lambda y: torch.stack([y, y]),
    "turned in place": lambda y: y.clone().t_(),
    "another shape in place": lambda y: y.clone().unsqueeze_(0),
    "resized": lambda y: y.clone().resize_(3, 2),
    "added in place": lambda y: y.clone().add_(1),
    "converted": lambda y: y.to(torch.float64),
    "its data": lambda y: y.data,
    "through a module": lambda y: nn.Linear(3, 2).to(y.device).requires_grad_(False)(y) * 0,
}


def test_attributes_that_are_replaced_leave_the_value(session: object) -> None:
    operand = image()
    operand.label = "a"
    result = operand + 1
    result.__dict__ = copy.copy(operand.__dict__)
    assert result.label == "a" and torch.equal(result.cpu(), image("cpu") + 1)
    result.__dict__ = {}
    assert not hasattr(result, "label") and torch.equal(result.cpu(), image("cpu") + 1)


@pytest.mark.parametrize("place", ["cpu", REMOTE])
@pytest.mark.parametrize("plain", [False, True])
def test_swapped_tensors_have_each_others_values_and_attributes(
    session: object, place: str, plain: bool
) -> None:
    first, second = image(), torch.ones(4, device=place)
    second = second if plain else second.as_subclass(Image)
    first.label, second.label = "first", "second"
    torch.utils.swap_tensors(first, second)
    assert torch.equal(second.cpu(), image("cpu")) and torch.equal(first.cpu(), torch.ones(4))
    assert (first.label, second.label) == ("second", "first")
    assert isinstance(second, Image) and isinstance(first, Image) is not plain


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_its_class_and_of_its_place(session: object, name: str) -> None:
    here, there = RESULTS[name](image("cpu")), RESULTS[name](image())
    assert isinstance(here, Image) and isinstance(there, Image)
    assert there.device.type == "remote" and there.width() == here.width() and there.shape == here.shape
    back = there.cpu()
    assert type(back) is Image and torch.equal(back, here)


def test_it_comes_and_goes_as_its_class(session: object) -> None:
    y = image()
    assert type(y).__name__ == "Image" and isinstance(y, dr.DistributedTensor)
    assert repr(y).startswith("Image([[0., 1., 2.],\n       [3., 4., 5.]]")
    assert type(dr.fetch(y)) is Image and type(y.cpu()) is Image
    assert isinstance(y.to(node=1), Image) and isinstance(torch.ones(2).as_subclass(Image).to(REMOTE), Image)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Image
    assert isinstance(copy.deepcopy(y), Image)
    plain = y.as_subclass(torch.Tensor)
    assert not isinstance(plain, Image) and torch.equal(plain.cpu(), torch.arange(6.0).view(2, 3))
    # It is one value under two names.
    y.add_(1)
    assert plain.sum().item() == 21


def test_gradients_pass_through(session: object) -> None:
    w = torch.ones(3, device=REMOTE, requires_grad=True)
    z = w.as_subclass(Image) * 2
    assert isinstance(z, Image) and z.requires_grad
    z.square().sum().backward()
    assert w.grad is not None and w.grad.tolist() == [8.0] * 3
    leaf = torch.Tensor._make_subclass(Image, torch.ones(2, device=REMOTE), True)  # type: ignore[arg-type]
    (leaf * 3).sum().backward()
    assert isinstance(leaf, Image) and leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]


def test_what_the_class_does_to_torchs_functions_comes_first(session: object) -> None:
    x = torch.ones(2, device=REMOTE).as_subclass(Logged)
    Logged.calls.clear()
    found = torch.relu(x)
    assert Logged.calls[0] == "relu" and isinstance(found, Logged)
    Logged.calls.clear()


def test_lazy_modules_are_born_on_a_worker(session: object) -> None:
    with torch.device(REMOTE):
        model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
        found = model(torch.ones(2, 3, 8, 8))
    found.sum().backward()
    assert found.shape == (2, 2) and {p.device.type for p in model.parameters()} == {"remote"}
    assert all(p.grad is not None and isinstance(p, nn.Parameter) for p in model.parameters())


def test_lazy_modules_take_a_dtype_before_they_have_a_shape(session: object) -> None:
    for module in (nn.LazyLinear(4, device=REMOTE).half(), nn.LazyLinear(4).to(REMOTE).half()):
        module(torch.ones(2, 3, device=REMOTE, dtype=torch.float16))
        assert module.weight.dtype is torch.float16 and module.weight.device.type == "remote"


def test_lazy_modules_leave_a_worker_before_they_have_a_shape(session: object, tmp_path: Path) -> None:
    module = nn.LazyLinear(4, device=REMOTE)
    torch.save(module, tmp_path / "module.pt")
    copies = [
        pickle.loads(pickle.dumps(module)),
        torch.load(tmp_path / "module.pt", weights_only=False),
        dr.fetch({"weight": module.weight}),
        module.to("cpu"),
    ]
    for found in copies:
        weight = found["weight"] if isinstance(found, dict) else found.weight  # type: ignore[union-attr]
        assert type(weight) is nn.UninitializedParameter and weight.device.type == "cpu"
    assert module(torch.ones(2, 3)).shape == (2, 4) and module.weight.device.type == "cpu"


def fused(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 4, 8).to(device).as_subclass(Image)
    lstm = nn.LSTM(8, 6).to(device)
    norm = nn.GroupNorm(2, 4).to(device)
    results = [lstm(x)[0], norm(x), F.scaled_dot_product_attention(x, x, x), torch.cdist(x, x)]
    with torch.autocast(device, torch.bfloat16):
        lowered = nn.Linear(8, 3).to(device)(x)
    assert lowered.dtype is torch.bfloat16 and all(isinstance(r, Image) for r in (*results, lowered))
    sum(r.sum() for r in results).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in (*lstm.parameters(), *norm.parameters())]
    return [t.detach().cpu().as_subclass(torch.Tensor) for t in (*results, lowered, *grads)]  # type: ignore[union-attr]


def test_fused_kernels_and_autocast_take_it(session: object) -> None:
    torch.testing.assert_close(fused(REMOTE), fused("cpu"), rtol=1e-5, atol=1e-6)


class Wrapper(torch.Tensor):
    """As torchao's tensors are made: it holds a tensor, and claims its device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        found: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=requires_grad
        )
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda t: t.inner if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        found = func(*bare[0], **bare[1])
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, found)


def trained(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = Wrapper(p.detach(), True)  # type: ignore[arg-type, assignment, union-attr]
    loss = F.cross_entropy(model(torch.randn(5, 4).to(device)), torch.arange(5).to(device) % 3)
    loss.backward()
    assert {p.device.type for p in (loss, *model.parameters())} == {device}
    return [p.grad.inner.cpu() for p in model.parameters()]  # type: ignore[union-attr, attr-defined]


def test_wrappers_that_claim_a_place_are_differentiated(session: object) -> None:
    torch.testing.assert_close(trained(REMOTE), trained("cpu"))


class ByPosition(Wrapper):
    """It says all that torch asks of a wrapper by position."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        about = (inner.stride(), inner.storage_offset(), None, inner.dtype, inner.layout, inner.device)
        found: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, *about, False, True)
        found.inner = inner
        return found


def test_a_wrapper_may_claim_its_place_by_position(session: object) -> None:
    for device in (REMOTE, "remote:1", "cpu"):
        x: Any = ByPosition(torch.ones(2, 3, device=device))
        x.exp().sum().backward()
        assert x.device == x.inner.device == x.grad.device
        assert x.grad.inner.tolist() == torch.ones(2, 3).exp().tolist()


def test_a_class_with_its_own_dispatch_is_told_to_hold_the_tensor(session: object) -> None:
    with pytest.raises(dr.errors.NotSupportedError, match=r"_make_wrapper_subclass\(Wrapper, x\.shape"):
        torch.ones(2, device=REMOTE).as_subclass(Wrapper)
    with pytest.raises(TypeError, match=r"must be a subclass of torch\.Tensor"):
        torch.ones(2, device=REMOTE).as_subclass(int)  # type: ignore[type-var]


def changed_after_it_was_saved(device: str) -> list[torch.Tensor]:
    x, w = torch.ones(2, device=device), torch.ones(2, device=device, requires_grad=True)
    loss = (w * x).sum()
    x.as_subclass(Image).mul_(5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    return [w.grad]


def a_leaf_changed(device: str) -> list[torch.Tensor]:
    x = torch.ones(2, device=device, requires_grad=True)
    x.as_subclass(Image).mul_(3)
    return [x]


def plain_one_changed(device: str) -> list[torch.Tensor]:
    x = torch.ones(2, device=device, requires_grad=True)
    h = x * 2
    y = h.as_subclass(Image)
    h.mul_(3)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [x.grad, y]


def changed_through_it(device: str) -> list[torch.Tensor]:
    x = torch.ones(2, device=device, requires_grad=True)
    h = x * 2
    h.as_subclass(Image).mul_(3)
    h.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [x.grad, h]


def turned(device: str) -> list[torch.Tensor]:
    x = torch.arange(6.0, device=device).view(2, 3)
    y = x.as_subclass(Image)
    y.t_()
    return [x + 1, y]


@pytest.mark.parametrize(
    "use", [changed_after_it_was_saved, a_leaf_changed, plain_one_changed, changed_through_it, turned]
)
def test_it_is_a_view_of_the_tensor_that_it_is_made_of(
    session: object, use: Callable[[str], list[torch.Tensor]]
) -> None:
    try:
        expected = use("cpu")
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:40]):
            use(REMOTE)
    else:
        for there, here in zip(use(REMOTE), expected):
            assert torch.equal(there.detach().cpu(), here.detach())


class Tagged(nn.Parameter):
    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, tag: int = 3) -> Tagged:
        made: Tagged = super().__new__(cls, data, requires_grad)  # type: ignore[assignment]
        made.tag = tag
        return made

    def doubled(self) -> torch.Tensor:
        return self * 2


def parameters_of_a_class(device: str) -> list[object]:
    p = Tagged(torch.ones(2, device=device), False, tag=4)
    model = nn.ParameterList([p, Tagged(torch.ones(2, device=device))])
    twin, copied, other = copy.deepcopy(p), copy.copy(p), type(p)(torch.zeros(2, device=device))
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["0"]
    (model[1].doubled()).sum().backward()  # type: ignore[operator]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    every = (p, twin, copied, other, p.data, p + 1, loaded, *copy.deepcopy(model).double().parameters())
    return [
        (
            isinstance(t, Tagged),
            isinstance(t, nn.Parameter),
            t.requires_grad,
            getattr(t, "tag", None),
            t.tolist(),
        )
        for t in (*every, *model.parameters())
    ]


def test_parameters_of_a_users_class_keep_it(session: object) -> None:
    assert parameters_of_a_class(REMOTE) == parameters_of_a_class("cpu")
    back = dr.fetch(Tagged(torch.ones(2, device=REMOTE), False))
    assert type(back) is Tagged and not back.requires_grad


def test_a_module_that_moves_keeps_what_its_parameters_have(session: object) -> None:
    ran: list[str] = []
    model = nn.Linear(2, 2)
    model.extra = Tagged(torch.ones(2), tag=7)  # type: ignore[assignment]
    model.weight.sharded = True  # type: ignore[attr-defined]
    handle = model.weight.register_hook(lambda grad: ran.append("hook"))
    model.bias.register_post_accumulate_grad_hook(lambda p: ran.append("late"))
    for device in (REMOTE, "cpu", REMOTE):
        model.to(device)
        assert model.weight.sharded is True  # type: ignore[attr-defined]
        assert isinstance(model.extra, Tagged) and model.extra.tag == 7
        assert isinstance(model.extra, dr.DistributedTensor) is (device == REMOTE)
        model(torch.ones(2, device=device)).sum().backward()
        assert sorted(ran) == ["hook", "late"]
        ran.clear()
    handle.remove()
    model(torch.ones(2, device=REMOTE)).sum().backward()
    assert ran == ["late"]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_module_moves_while_a_graph_holds_its_parameters(session: object) -> None:
    """A notebook looks at a result, and then sends the model."""
    model = nn.Sequential(nn.Linear(2, 2), torch.nn.utils.weight_norm(nn.Linear(2, 2)))
    here = model(torch.ones(1, 2))
    expected = here.detach().clone()
    model.to(REMOTE)
    there = model(torch.ones(1, 2, device=REMOTE))
    torch.testing.assert_close(there.detach().cpu(), expected)
    assert torch.equal(here, expected)
    there.sum().backward()
    assert all(p.grad is not None and p.device.type == "remote" for p in model.parameters())
    with pytest.raises(RuntimeError, match="compute it again after"):
        here.sum().backward()
    model.to("cpu")
    assert torch.equal(model(torch.ones(1, 2)), expected)
    model(torch.ones(1, 2)).sum().backward()


def copies(device: str) -> list[object]:
    x = torch.arange(12.0).to(device)
    x.label = ["kept"]  # type: ignore[attr-defined]
    p = nn.Parameter(x[:3])
    p.grad = torch.ones(3, device=device)
    given = [x, x[2:6].view(2, 2), x.view(3, 4).T, x.view(torch.int32)[1:], p, x]
    found = copy.deepcopy(given)
    found[0].label.append("more")
    found[0].add_(1)
    found[1][0, 0] = 70
    assert found[0] is found[5] and all(t.is_leaf and not t._is_view() for t in found)
    return [*(t.tolist() for t in (*found, *given)), found[4].grad, x.label, [t.stride() for t in found]]


def test_deep_copies_share_memory_as_the_tensors_do(session: object) -> None:
    assert copies(REMOTE) == copies("cpu")


@dr.remote
def _tail(x: torch.Tensor) -> torch.Tensor:
    return x[1:]


def test_what_a_function_returns_of_a_class_is_plain_and_in_its_memory(session: object) -> None:
    x = image()
    for _ in range(3):
        found = _tail(x)
        assert not isinstance(found, Image) and found.shape == (1, 3)
        version = found._version
        x.add_(1)
        assert torch.equal(found.cpu(), x.as_subclass(torch.Tensor)[1:].cpu())
        assert found._version == version + 1


class Slotted(torch.Tensor):
    """Its `__new__` gives an attribute, which has a slot, and its torch functions hand it on."""

    __slots__ = ("log",)
    log: list[str]

    def __new__(cls, data: torch.Tensor, log: list[str] | None = None) -> Slotted:
        made: Slotted = torch.Tensor._make_subclass(cls, data)  # type: ignore[arg-type]
        made.log = [] if log is None else log
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return (
            cls(result, args[0].log)
            if isinstance(result, torch.Tensor) and not isinstance(result, cls)
            else result
        )


def slotted(device: str) -> list[object]:
    x = Slotted(torch.arange(3.0).to(device), ["kept"])
    data, shallow = x.data, copy.copy(x)
    found = [type(data) is type(x), data.log is x.log, shallow.log is x.log, data.tolist()]
    with torch._C.DisableTorchFunctionSubclass():
        found.append(isinstance(x.data, Slotted))
    return found


def test_the_data_of_a_users_class_goes_through_its_functions(session: object) -> None:
    assert slotted(REMOTE) == slotted("cpu")


def test_a_deep_copy_has_what_a_class_keeps_in_slots(session: object) -> None:
    x = Slotted(torch.arange(3.0).to(REMOTE), ["kept"])
    found = copy.deepcopy([x, x])
    assert isinstance(found[0], Slotted) and found[0] is found[1]
    assert found[0].log == ["kept"] and found[0].log is not x.log


@pytest.mark.parametrize("param", [False, True], ids=["a tensor", "a parameter"])
def test_a_file_has_what_a_class_keeps_in_slots(session: object, param: bool) -> None:
    def saved(device: str) -> list[object]:
        x: Any = Slotted(torch.arange(3.0).to(device), ["kept"])
        x = nn.Parameter(x) if param else x
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        with torch.serialization.safe_globals([Slotted]):
            found: Any = torch.load(file)
        return [
            type(found).__name__,
            isinstance(found, nn.Parameter),
            found.log,
            found.requires_grad,
            found.tolist(),
        ]

    assert saved(REMOTE) == saved("cpu")
