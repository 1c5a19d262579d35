"""Autograd on remote tensors is autograd: graphs, hooks, in-place, views, version counters, custom functions,
all as here.

Each case runs on "cpu" and on a worker and must give equal results (see `agree.agrees`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.autograd.gradcheck import GradcheckError

from agree import REMOTE, agrees, tensor
from distruntime import DistributedTensor
from distruntime.session.session import active_session

pytestmark = [  # torch's own forward formulas use it; torch 2.15 warns in another class
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning"),
]

# Views, in-place and version counters


@agrees
def test_versions_count_writes(device: str) -> Any:
    x = tensor(device, 4, 3)
    view, detached, seen = x[1:], x.detach(), [x._version]
    for write in (
        lambda: x.add_(1),
        lambda: view.mul_(2),
        lambda: detached.zero_(),
        lambda: x.data.add_(1),
        lambda: x.__setitem__(0, 5.0),
    ):
        write()
        seen.append(x._version)
    return x, seen, view._version, detached._version


LISTS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "a number": lambda x: torch._foreach_add_(x, 2.0),
    "a list": lambda x: torch._foreach_mul_(x, [t.detach() + 1 for t in x]),
    "one operand": lambda x: torch._foreach_neg_(x),
    "zeros": lambda x: torch._foreach_zero_(x),
    "a copy": lambda x: torch._foreach_copy_(x, [t.detach() + 1 for t in x]),
    "out": lambda x: torch.split_with_sizes_copy(torch.ones(8, device=x[0].device), [4, 4], out=x),
}


@pytest.mark.parametrize("name", LISTS)
@agrees
def test_versions_count_writes_to_members_of_lists(device: str, name: str) -> Any:
    seen = []
    # The first call of an operator takes another way than the later ones.
    for _ in range(3):
        x = [tensor(device, 4), tensor(device, 4)]
        loss = (x[0] * torch.ones(4, device=device, requires_grad=True)).sum()
        LISTS[name](x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        seen += [t._version for t in x]
    return seen, x


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@agrees
def test_a_step_between_the_passes_is_caught(device: str, kind: Any) -> Any:
    layer = nn.Linear(3, 3).to(device)
    optimizer = kind(layer.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        x = tensor(device, 2, 3, grad=True)
        loss = layer(x).square().sum()
        layer(x.detach()).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    return loss


@agrees
def test_a_saved_tensor_that_was_written_is_caught(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    y = x.exp()
    out = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    return y


@agrees
def test_writes_of_what_a_recurrent_layer_has_read_are_counted_as_here(device: str) -> Any:
    """Its backward pass runs on the worker, which must not count what torch leaves out."""
    gru = nn.GRU(3, 4)
    with torch.no_grad():
        for p in gru.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    gru, x = gru.to(device), tensor(device, 2, 3, grad=True)
    out = gru(x)[0]
    x.data.add_(1)
    x.data.sub_(1)
    out.sum().backward()
    out = gru(x)[0]
    with torch.no_grad():
        gru.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return x.grad


@agrees
def test_in_place_on_a_view_reaches_the_base(device: str) -> Any:
    x = tensor(device, 4, 3, grad=True)
    base = x * 2
    base[1:3].mul_(3)
    base.view(-1)[::2].add_(1)
    base.t()[0].sigmoid_()
    base.square().sum().backward()
    return base, x.grad, type(base.grad_fn).__name__


@agrees
def test_setitem_carries_gradients(device: str) -> Any:
    x, row, index = (
        tensor(device, 4, 3, grad=True),
        tensor(device, 3, seed=1, grad=True),
        torch.tensor([2, 0]).to(device),
    )
    y = x.clone()
    y[1] = row
    y[index, 1:] = row[:2] * 2
    y[y > 1] = 0.5
    y.square().sum().backward()
    return y, x.grad, row.grad


@agrees
def test_views_stay_views_and_share_their_values(device: str) -> Any:
    x = tensor(device, 4, 6)
    views = [
        x.view(6, 4),
        x.t(),
        x[1:, ::2],
        x.unfold(1, 2, 2),
        x.diagonal(),
        x.expand(2, 4, 6),
        *x.split(2),
        *x.unbind(1),
        x.detach(),
    ]
    x.add_(10)
    views[0].mul_(2)
    return x, views, [v._is_view() for v in views], [v._base is x for v in views]


@agrees
def test_writes_that_autograd_forbids(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="view of a leaf Variable"):
        x[0:2].zero_()
    with pytest.raises(RuntimeError, match=r"expanded|more than one element of the written-to tensor"):
        tensor(device, 1).expand(4).add_(1).cpu()
    with pytest.raises(RuntimeError, match=r"overlap|single memory location|more than one element"):
        y = tensor(device, 5)
        y[1:].copy_(y[:-1])
        y.cpu()  # a worker's error is raised where the value is read
    first, second = (x * 1).split([1, 2])
    with pytest.raises(RuntimeError, match="multiple views"):
        first.add_(second[:1])
    return x


@agrees
def test_writes_outside_the_graph(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    with torch.no_grad():
        x.add_(1).mul_(2)
    x.detach().copy_(tensor(device, 3, seed=1))
    x.data[0] = 7
    (x * 2).sum().backward()
    return x, x.grad


@agrees
def test_metadata_changed_in_place(device: str) -> Any:
    x = tensor(device, 2, 3)
    y = x.clone()
    y.t_()
    y.unsqueeze_(0).squeeze_().transpose_(0, 1)
    z = x.clone().resize_(2, 2)
    w = x.clone().as_strided_((3,), (2,))
    v = torch.empty(0, device=x.device)
    torch.add(x, 1, out=v)
    return y, z, w, v, y + 1, z.sum(), v.t().contiguous()


# Graphs


@agrees
def test_the_graph_looks_the_same(device: str) -> Any:
    x, w = tensor(device, 3, 4, grad=True), tensor(device, 4, 2, seed=1, grad=True)
    out = torch.relu(x @ w).log_softmax(-1).sum()

    def names(node: Any) -> Any:
        return node and (node.name(), [names(child) for child, _ in node.next_functions])

    return out, names(out.grad_fn), [t.is_leaf for t in (x, out)]


@agrees
def test_double_backward_and_gradient_penalty(device: str) -> Any:
    x, w = tensor(device, 5, 3, grad=True), tensor(device, 3, 1, seed=1, grad=True)
    out = torch.tanh(x @ w).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return slope, w.grad, x.grad


@agrees
def test_third_derivative(device: str) -> Any:
    x = tensor(device, 4, grad=True)
    y = x.pow(5).sum()
    found = []
    for _ in range(3):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(g)
        y = g.sum()
    return found


@agrees
def test_backward_twice(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    return x.grad


@agrees
def test_backward_twice_through_what_the_worker_has_recorded(device: str) -> Any:
    x = tensor(device, 2, 3, 4, grad=True)
    y = nn.functional.scaled_dot_product_attention(x, x, x).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


@agrees
def test_backward_with_inputs_and_gradients(device: str) -> Any:
    x, y = tensor(device, 3, grad=True), tensor(device, 3, seed=1, grad=True)
    z = x * y
    z.backward(tensor(device, 3, seed=2), inputs=[x], retain_graph=True)
    assert y.grad is None
    batched = torch.autograd.grad(z, (x, y), torch.eye(3).to(device), is_grads_batched=True)
    unused = torch.autograd.grad(x.sum(), (x, y), allow_unused=True, materialize_grads=True)
    return x.grad, batched, unused


@agrees
def test_gradients_accumulate_and_are_assigned(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    for _ in range(2):
        (x * 2).sum().backward()
    twice = x.grad
    assert twice is not None
    kept = twice.clone()
    x.grad = tensor(device, 3, seed=4)
    x.sum().backward()
    with pytest.raises(RuntimeError):
        x.grad = tensor(device, 4)
    with pytest.raises((RuntimeError, TypeError)):
        x.grad = 1  # type: ignore[assignment]
    return kept, x.grad


@agrees
def test_shape_mistakes_in_backward(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        (x * 2).backward(tensor(device, 4))
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.detach().sum().backward()
    return x


@agrees
def test_grad_modes(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 2
    with torch.inference_mode():
        c = x.detach() * 2
    with torch.set_grad_enabled(False):
        d = torch.nn.functional.linear(x, x[None])
    with pytest.raises(RuntimeError, match=r"Inference tensors cannot be saved|inference tensor"):
        (x * c).sum().backward()
    return a, b, c.clone(), d, c.is_inference()


@agrees
def test_leaves_here_graph_there(device: str) -> Any:
    here = tensor("cpu", 3, grad=True)
    there = tensor(device, 3, seed=1, grad=True)
    out = (here.to(device) * there).sum()
    (out * 2 + out.cpu().to(device) * 3).backward()
    assert here.grad is not None and here.grad.device.type == "cpu"
    return there.grad, here.grad


@agrees
def test_branches_here_and_there_join(device: str) -> Any:
    x = tensor("cpu", 4, grad=True)
    there = (x.to(device) * 2).tanh()
    here = (x * 3).sigmoid()
    (there.cpu() * here).sum().backward()
    return there, x.grad


@agrees
def test_backward_runs_on_the_calling_thread(device: str) -> Any:
    names: list[int] = []
    x = tensor(device, 3, grad=True)
    x.register_hook(lambda g: names.append(threading.get_ident()))
    x.square().sum().backward()
    return x.grad, names == [threading.get_ident()]


@agrees
def test_backward_from_many_threads(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                (x * 2).sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return x.grad


# Functions and hooks


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x.square() * factor, positive

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return grad * 2 * x * ctx.factor, None


class _Double(torch.autograd.Function):
    """In place: what it returns is what it got."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class _Cube(torch.autograd.Function):
    """In the form that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@agrees
def test_custom_functions(device: str) -> Any:
    x = tensor(device, 4, grad=True)
    out, positive = _Scale.apply(x, 1.5)
    y = x * 1
    doubled = _Double.apply(y)
    assert doubled is y
    (out.sum() + doubled.square().sum() + _Cube.apply(x).sum()).backward()
    return out, positive, doubled, x.grad


@agrees
def test_a_custom_function_under_transforms(device: str) -> Any:
    x = tensor(device, 4)
    slope = torch.func.grad(lambda v: _Cube.apply(v).sum())
    curve = torch.func.vmap(torch.func.grad(torch.func.grad(lambda v: _Cube.apply(v))))
    return slope(x), curve(x)


@agrees
def test_hooks_of_every_kind(device: str) -> Any:
    seen: list[Any] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    x = tensor(device, 5, 3, grad=True)
    x.register_hook(lambda g: g * 2)
    model[0].weight.register_hook(lambda g: seen.append(("tensor", g)))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad.clone())))
    model[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model[1].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
    model[2].register_full_backward_hook(lambda m, gin, gout: seen.append(("module", gin[0], gout[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: seen.append(("step", len(seen))))
    out = model(x)
    out.grad_fn.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    middle = out.square()
    middle.retain_grad()
    with graph.register_multi_grad_hook(
        (model[0].bias, model[2].bias), lambda grads: seen.append(("many", grads))
    ):
        middle.sum().backward()
    optimizer.step()
    return x.grad, middle.grad, seen, list(model.parameters())


@agrees
def test_a_hook_that_raises(device: str) -> Any:
    x = tensor(device, 3, grad=True)
    handle = x.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        x.square().sum().backward()
    handle.remove()
    x.square().sum().backward()
    return x.grad


@agrees
def test_saved_tensor_hooks(device: str) -> Any:
    packed: list[tuple[int, ...]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(t.shape))
        return t * 2

    x = tensor(device, 4, grad=True)
    with graph.saved_tensors_hooks(pack, lambda t: t / 2):
        x.exp().square().sum().backward()
    first = x.grad
    y = tensor(device, 4, seed=1, grad=True)
    with graph.save_on_cpu():
        out = y.exp().square().sum()
    out.backward()
    with graph.disable_saved_tensors_hooks("no"), pytest.raises(RuntimeError, match="no"):
        with graph.save_on_cpu():
            pass
    return first, packed, y.grad


@agrees
def test_saved_tensors_may_be_changed(device: str) -> Any:
    """Torch tells storages apart by their addresses there."""
    z = tensor(device, 4, grad=True)
    with graph.allow_mutation_on_saved_tensors():
        b = z * 1
        view = b[:2]
        loss = (b * b.exp()).sum() + (view * view).sum()
        view.mul_(3)
        b.add_(1)
        loss.backward()
    return z.grad, b


@agrees
def test_anomaly_mode_names_the_culprit(device: str) -> Any:
    x = torch.tensor([-1.0, 1.0]).to(device).requires_grad_()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        out = x.sqrt().sum()
        with (
            pytest.warns(UserWarning, match="SqrtBackward0"),
            pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"),
        ):
            out.backward()
    return x


@agrees(remote_result=False)
def test_gradcheck(device: str) -> Any:
    x, w = (
        tensor(device, 3, 2, dtype=torch.float64, grad=True),
        tensor(device, 2, 2, seed=1, dtype=torch.float64, grad=True),
    )

    def wrong(v: torch.Tensor) -> torch.Tensor:
        return v.detach() * v

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(wrong, x)
    return (
        torch.autograd.gradcheck(lambda a, b: torch.tanh(a @ b), (x, w)),
        torch.autograd.gradgradcheck(lambda a, b: torch.tanh(a @ b).sum(), (x, w)),
        torch.autograd.gradcheck(
            lambda a: torch.view_as_real(torch.view_as_complex(a) ** 2), x, check_forward_ad=True
        ),
    )


# A gradient becomes `p.grad` without an instruction


def _backward_instructions(w: torch.Tensor) -> int:
    w.grad = None
    loss = (w * 2).sum()
    node = active_session().nodes[0]
    with node.lock:
        node.flush()
        node.enough, before = 1 << 30, len(node.line_table)
        loss.backward()
        count = len(node.line_table) - before
        node.enough = 0
    return count


@pytest.mark.usefixtures("session")
def test_a_gradient_becomes_grad_without_an_instruction() -> None:
    w = torch.ones(3, 2, device=REMOTE, requires_grad=True)
    counts = [_backward_instructions(w) for _ in range(3)]
    # The first gradient, an expansion and a product; the first call of an operator takes the slow path.
    assert counts[1:] == [3, 3]
    assert w.grad is not None
    # It is a tensor like any other: these change its metadata, and not those of what it was.
    w.grad.t_().add_(1)
    assert w.grad.shape == (2, 3) and w.grad.tolist() == [[3.0] * 3] * 2


@agrees
def test_a_gradient_that_a_hook_keeps_stays_as_it_was(device: str) -> Any:
    w, kept = tensor(device, 3, 2, grad=True), []
    w.register_hook(kept.append)
    for _ in range(3):
        w.grad = None
        (w * 2).sum().backward()
        assert w.grad is not None
        w.grad.t_().mul_(5)
    return kept, w.grad


@agrees
def test_a_gradient_that_a_result_keeps_stays_as_it_was(device: str) -> Any:
    w = tensor(device, 3, 2, grad=True)
    given = tensor(device, 3, 2)
    for _ in range(3):
        w.grad = None
        y = w * 1
        y.retain_grad()
        y.backward(given)
        assert w.grad is not None and y.grad is not None
        w.grad.mul_(5)
    return given, y.grad, w.grad


class Nested(torch.autograd.Function):
    """Begins a backward pass within a backward pass, as many as its number says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_() - 1
        return ctx.x.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if ctx.x > 0:
            with torch.enable_grad():
                Nested.apply(ctx.x).sum().backward()
        return grad


@agrees
def test_a_backward_pass_in_a_thread_of_torch(device: str) -> Any:
    """From the 60th one within another on, C++ threads run them, with no Python around."""
    x = torch.tensor(150.0).to(device).requires_grad_()
    Nested.apply(x).sum().backward()
    return x.grad


def _note_id(seen: list[int], grad: torch.Tensor) -> None:
    seen.append(id(grad))


class _GivesWithGraph(torch.autograd.Function):
    """Its gradient is what the caller has computed with autograd, and holds no more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        ctx.given = given
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.given.pop(), None


@pytest.mark.usefixtures("session")
def test_a_gradient_that_nobody_else_holds_becomes_grad_itself() -> None:
    w = torch.ones(3, 2, device=REMOTE, requires_grad=True)
    for _ in range(2):
        w.grad = None
        seen: list[int] = []
        w.register_hook(partial(_note_id, seen))
        (w * 2).sum().backward()
        assert w.grad is not None and [id(w.grad)] == seen
        assert w.grad.is_leaf and not w.grad.requires_grad and not w.grad._is_view()
        w = w.detach().requires_grad_()


class _Mark:
    """What a node holds, to be seen to go."""


@agrees
def test_a_graph_that_was_kept_goes_with_its_results(device: str) -> Any:
    w, left = tensor(device, 3, 2, grad=True), []
    for _ in range(3):
        # Its node saves its own result.
        y = w.exp()
        assert y.grad_fn is not None
        mark = _Mark()
        y.grad_fn.metadata["mark"] = mark
        left.append(weakref.ref(mark))
        y.sum().backward(retain_graph=True)
        del y, mark
    return [one() is None for one in left], w.grad


@agrees
def test_a_gradient_that_is_a_view_or_has_a_graph_is_detached(device: str) -> Any:
    found = []
    for _ in range(3):
        w = tensor(device, 3, 2, grad=True)
        # The gradient of `view` is a view of the one of the product.
        (w.view(6) * 2).sum().backward()
        assert w.grad is not None
        found.append((w.grad._is_view(), w.grad.requires_grad, w.grad._version, w.grad.detach()))
        v = tensor(device, 3, 2, grad=True)
        v.view(6).backward(tensor(device, 6))
        assert v.grad is not None
        v.grad.detach_().mul_(3)
        found.append((v.grad._is_view(), v.grad.is_leaf, v.grad._version, v.grad))
        u = tensor(device, 3, 2, grad=True)
        _GivesWithGraph.apply(u, [u * u]).sum().backward()  # type: ignore[no-untyped-call]
        assert u.grad is not None
        found.append((u.grad.requires_grad, u.grad.is_leaf, u.grad._version, u.grad))
    return found


SAVING: dict[str, Any] = {
    "exp": torch.exp,
    "exp_": lambda x: (x * 1).exp_(),
    "relu_ of a layer": lambda x: torch.nn.ReLU(inplace=True)(torch.nn.functional.linear(x, x)),
    "softmax": lambda x: x.softmax(0),
    "sqrt_ of a view": lambda x: (x * 1)[0].sqrt_(),
    "product": lambda x: x.prod(),
}


@pytest.mark.parametrize("name", SAVING)
@agrees
def test_what_a_node_has_saved_keeps_its_version(device: str, name: str) -> Any:
    """Each backward pass detaches it, and nobody else holds it: it lost its version in the first one."""
    x = tensor(device, 3, 3).square().add(0.5).requires_grad_()
    result = SAVING[name](x)
    found = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0].clone() for _ in range(3)]
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), x)
    return found


def _proxies() -> int:
    gc.collect()
    return sum(type(one) is DistributedTensor for one in gc.get_objects())


@pytest.mark.usefixtures("session")
def test_what_a_node_has_saved_goes_with_it() -> None:
    """It had got the node as its graph, and each kept the other."""
    x = tensor(REMOTE, 3, 3, grad=True)

    def train() -> None:
        result = x.exp()
        for _ in range(2):
            torch.autograd.grad(result.sum(), x, retain_graph=True)

    train()
    before = _proxies()
    for _ in range(5):
        train()
    assert _proxies() == before
