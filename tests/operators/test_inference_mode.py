"""Inference mode, in which torch hands composite operators over whole: moves bring values, and views stay
views, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import distruntime as dr
from processes import STARTING


@pytest.fixture(scope="module", autouse=True)
def two_workers() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=2, timeout=STARTING):
        yield


MOVES: dict[str, Callable[[Any], Any]] = {
    "to a node": lambda x: x.to(node=0),
    "to a place": lambda x: x.to(dr.place(0, "cpu")),
    "to another's place": lambda x: x.to(torch.zeros(1, device="remote").device),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu and a dtype": lambda x: x.to("cpu", torch.float64),
    "to a dtype": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "copied": lambda x: torch.empty(3, device="remote").copy_(x),
    "a new one here": lambda x: torch.zeros_like(x, device="cpu") + x.cpu(),
    "numpy": lambda x: torch.from_numpy(x.cpu().numpy()),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch._C._AutoDispatchBelowAutograd])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move_brings_the_values(move: Callable[[Any], Any], mode: Callable[[], Any]) -> None:
    with dr.on(1):
        x = torch.arange(3.0, device="remote") + 5
    with mode():
        assert move(x).tolist() == [5, 6, 7]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(4, 3),
    "reshape of what is not contiguous": lambda x: x.t().reshape(12),
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "to the dtype that it has": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "alpha dropout that is off": lambda x: torch.nn.functional.alpha_dropout(x, 0.5, training=False),
    "feature dropout that is off": lambda x: torch.feature_dropout(x, 0.5, False),
    "chunk": lambda x: x.chunk(2)[1],
    "an index": lambda x: x[1],
    "a list of indices": lambda x: x[[0, 1]],
    "data": lambda x: x.data,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_shares_memory_on_a_cpu_shares_it_on_a_worker(view: Callable[[Any], Any]) -> None:
    local = torch.arange(12.0).reshape(3, 4)
    remote = local.to("remote")
    with torch.inference_mode():
        for x in (local, remote):
            view(x).add_(100)
        assert torch.equal(remote.cpu(), local)


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[1],
    "view": lambda x: x.view(12),
    "chunk": lambda x: x.chunk(2)[1],
    "turned": lambda x: x.t(),
    "detached": lambda x: x.detach(),
    "copy": lambda x: x.clone(),
}


def _raises(act: Callable[..., object], *args: object) -> bool:
    try:
        act(*args)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("view", OUTSIDE.values(), ids=OUTSIDE)
def test_a_view_that_is_taken_outside_is_one_of_an_inference_tensor(view: Callable[[Any], Any]) -> None:
    def seen(device: str) -> Any:
        with torch.inference_mode():
            x = torch.arange(12.0).reshape(3, 4).to(device) * 2
        answers = []
        # The first call of an operator takes another way than the later ones.
        for _ in range(3):
            found = view(x)
            written = _raises(found.add_, 1)
            weight = torch.ones_like(found).requires_grad_()
            # Torch says of a detached tensor that it is one, and lets it be written all the same.
            saved = view is not OUTSIDE["detached"] and _raises(torch.mul, weight, found)
            answers.append((written, saved))
            with torch.inference_mode():
                found.add_(1)
        return answers, x.tolist()

    assert seen("remote") == seen("cpu")


class Image(torch.Tensor):
    """A user's class."""


@pytest.mark.parametrize("inference", [True, False], ids=["of an inference tensor", "of a normal tensor"])
def test_views_of_a_users_class_are_what_its_plain_tensor_is(inference: bool) -> None:
    def seen(device: str) -> Any:
        x = torch.arange(12.0).reshape(3, 4).to(device)
        with torch.inference_mode(inference):
            image = (x * 2).as_subclass(Image)
        with torch.inference_mode(not inference):
            of_normal = x.as_subclass(Image)
            found = [image, image[1], image.as_subclass(torch.Tensor), image * 2, of_normal[1], of_normal * 2]
        return [(x.is_inference(), x.tolist()) for x in found]

    assert seen("remote") == seen("cpu")


def test_a_module_moves_and_computes() -> None:
    torch.manual_seed(0)
    local = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2)
    ).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        wanted = local(x)
        moved = local.to("remote")
        torch.testing.assert_close(moved(x.to("remote")).cpu(), wanted)
        torch.testing.assert_close(moved.to("cpu")(x), wanted)


# torch hands these over whole in this mode, but for the last three.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view_as": lambda a: a.view_as(a),
    "reshape": lambda a: a.reshape(6),
    "flatten": lambda a: a.flatten(),
    "ravel": lambda a: a.ravel(),
    "movedim": lambda a: a.movedim(0, 1),
    "mT": lambda a: a.mT,
    "unflatten": lambda a: a.unflatten(2, (3, 1)),
    "tensor_split": lambda a: a.tensor_split(2, 1)[0],
    "narrow": lambda a: a.narrow(2, 0, 2),
    "chunk": lambda a: a.chunk(2, 1)[0],
    "view": lambda a: a.view(6),
}


@pytest.mark.parametrize("device", ["cpu", "remote"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_normal_tensors_are_views_to_autograd(name: str, device: str) -> None:
    """A write through one is counted, in this mode and behind it. It was not, and gradients were wrong."""
    for _ in range(2):
        a = torch.ones(1, 2, 3, device=device, requires_grad=True).clone()
        with torch.inference_mode():
            view = VIEWS[name](a)
        assert not view.is_inference() and view._is_view() and view._base is a
        with pytest.raises(RuntimeError, match="A view was created in inference mode and is being modified"):
            view.add_(1)
        square = (a * a).sum()
        with torch.inference_mode():
            VIEWS[name](a).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()  # type: ignore[no-untyped-call]


WHOLE: dict[str, Callable[[torch.Tensor], object]] = {
    "where": lambda x: torch.where(x > 2),
    "nonzero as a tuple": lambda x: x.nonzero(as_tuple=True),
    "histogramdd": lambda x: torch.histogramdd(x.view(-1, 2), [2, 3]),
    "tensor_split at local indices": lambda x: torch.tensor_split(x, torch.tensor([1, 3])),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1]], device=x.device), x.view(-1, 2)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_only_the_parts_of_an_operator_can_tell(name: str) -> None:
    """Composites come whole in this mode, and a meta kernel of the whole knows less than the parts."""
    with torch.inference_mode():
        for start in (0.0, 1.0):
            x = torch.arange(start, start + 6)
            expected, found = tree_leaves(WHOLE[name](x)), tree_leaves(WHOLE[name](x.to("remote")))
            assert all(t.device.type == "remote" for t in found)
            assert [t.tolist() for t in found] == [t.tolist() for t in expected]


@pytest.mark.parametrize("order", [(0.0, 0.5, 1.0), (0.5, 0.0, 1.0)])
def test_a_number_decides_whether_dropout_returns_its_operand(order: tuple[float, ...]) -> None:
    found: dict[str, list[Any]] = {}
    for device in ("cpu", "remote"):
        torch.manual_seed(0)
        x, results = torch.ones(64, device=device), []
        with torch.inference_mode():
            for p in order:
                y = F.dropout(x, p, training=True)
                results += [y.tolist(), y is x]
                y.mul_(3)
                results.append(x.tolist())
        found[device] = results
    assert found["remote"] == found["cpu"]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_a_number_decides_how_large_an_upsampled_result_is(mode: str) -> None:
    x = torch.rand(1, 1, 4, 4)
    there = x.to("remote")
    with torch.inference_mode():
        for scale in (1.5, 1.5, 2.0, 1.5):
            found = F.interpolate(there, scale_factor=scale, mode=mode)
            expected = F.interpolate(x, scale_factor=scale, mode=mode)
            assert found.shape == expected.shape and torch.equal(found.cpu(), expected)
