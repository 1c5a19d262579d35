"""Places: every spelling of where a tensor goes, copies between all pairs of places, and their numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from distruntime.session.session import active_session
from processes import STARTING

HERE = None  # a local tensor
CPU0, GPU0, GPU1 = (0, "cpu"), (0, "cuda:0"), (0, "cuda:1")
CPU1, FAR0, FAR1 = (1, "cpu"), (1, "cuda:0"), (1, "cuda:1")
ALL = [CPU0, GPU0, GPU1, CPU1, FAR0, FAR1]
Where = tuple[int, str]


pytestmark = pytest.mark.usefixtures("two_nodes_with_two_simulated_gpus")


def at(where: Where, values: Any = (1.0, 2.0, 3.0)) -> Any:
    """Return a tensor at a place."""
    with dr.on(*where):
        return torch.tensor(values, device="remote")


def where(tensor: Any) -> Where | None:
    """Return where a tensor is, by everything that it says about it."""
    if tensor.device.type == "cpu":
        assert type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
        return HERE
    assert tensor.device.type == "remote" and tensor.get_node() == tensor.place.node
    assert tensor.get_device() == (
        -1 if tensor.place.local_device == "cpu" else int(tensor.place.local_device[5:])
    )
    again = torch.zeros(2, device=tensor.device)  # the device is good for factories, and means the same place
    assert again.place == tensor.place  # type: ignore[attr-defined]
    return tensor.place.node, tensor.place.local_device


# The table of spellings in docs/design.md: what each is from a CPU and from a GPU of node 1, and for modules

SPELLINGS: dict[str, tuple[Callable[[Any], Any], Where | None, Where | None]] = {
    "cpu()": (lambda t: t.cpu(), HERE, HERE),
    'to("cpu")': (lambda t: t.to("cpu"), HERE, HERE),
    'to(device="cpu")': (lambda t: t.to(device="cpu"), HERE, HERE),
    'to(torch.device("cpu"))': (lambda t: t.to(torch.device("cpu")), HERE, HERE),
    "cuda()": (lambda t: t.cuda(), FAR0, FAR0),
    "cuda(1)": (lambda t: t.cuda(1), FAR1, FAR1),
    'cuda("cuda:1")': (lambda t: t.cuda("cuda:1"), FAR1, FAR1),
    "cuda(device=0)": (lambda t: t.cuda(device=0), FAR0, FAR0),
    'to("cuda")': (lambda t: t.to("cuda"), FAR0, FAR0),
    'to("cuda:1")': (lambda t: t.to("cuda:1"), FAR1, FAR1),
    'to(torch.device("cuda:1"))': (lambda t: t.to(torch.device("cuda:1")), FAR1, FAR1),
    'to(torch.device("cuda", 1))': (lambda t: t.to(torch.device("cuda", 1)), FAR1, FAR1),
    'to(device="cuda:1")': (lambda t: t.to(device="cuda:1"), FAR1, FAR1),
    "to(node=0)": (lambda t: t.to(node=0), CPU0, GPU1),
    "to(node=1)": (lambda t: t.to(node=1), CPU1, FAR1),
    'to(node=0, device="cpu")': (lambda t: t.to(node=0, device="cpu"), CPU0, CPU0),
    'to(node=0, device="cuda:1")': (lambda t: t.to(node=0, device="cuda:1"), GPU1, GPU1),
    'to(node=0, device="cuda")': (lambda t: t.to(node=0, device="cuda"), GPU0, GPU0),
    'to("remote")': (lambda t: t.to("remote"), GPU0, GPU0),
    'to(torch.device("remote"))': (lambda t: t.to(torch.device("remote")), GPU0, GPU0),
    "to(other.device)": (lambda t: t.to(at(GPU1).device), GPU1, GPU1),
    "to(device=other.device)": (lambda t: t.to(device=at(CPU0).device), CPU0, CPU0),
    'to(place(0, "cuda:1"))': (lambda t: t.to(dr.place(0, "cuda:1")), GPU1, GPU1),
    "to(place(0, 1))": (lambda t: t.to(dr.place(0, 1)), GPU1, GPU1),
    "to(device=place(0))": (lambda t: t.to(device=dr.place(0)), CPU0, CPU0),
    "to(dtype)": (lambda t: t.to(torch.float64), CPU1, FAR1),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("start", [CPU1, FAR1])
def test_spellings_on_a_tensor(spelling: str, start: Where) -> None:
    move, from_cpu, from_gpu = SPELLINGS[spelling]
    x = at(start)
    y = move(x)
    assert where(y) == (from_cpu if start == CPU1 else from_gpu)
    assert y.tolist() == [1, 2, 3] and where(x) == start
    if where(y) == start and y.dtype == x.dtype:
        assert y is x  # as torch does it
    elif where(y) is not HERE:
        y.zero_()
        assert x.tolist() == [1, 2, 3]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("start", [CPU1, FAR1])
def test_spellings_on_a_module(spelling: str, start: Where) -> None:
    move, from_cpu, from_gpu = SPELLINGS[spelling]
    with dr.on(*start):
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to("remote")
    module[1].bias = module[0].bias  # tied
    weights = module[0].weight.tolist()
    assert move(module) is module
    expected = from_cpu if start == CPU1 else from_gpu
    assert {where(p) for p in [*module.parameters(), *module.buffers()]} == {expected}
    assert module[1].bias is module[0].bias and isinstance(module[0].weight, nn.Parameter)
    assert module[0].weight.tolist() == weights


@pytest.mark.parametrize("place", ALL)
def test_a_local_module_goes_to_any_place(place: Where) -> None:
    module = nn.Linear(2, 2)
    weights = module.weight.tolist()
    assert module.to(dr.place(*place)) is module
    assert where(module.weight) == where(module.bias) == place and module.weight.tolist() == weights
    local = nn.Linear(2, 2)
    assert local.to(at(place).device) is local and where(local.weight) == place
    with dr.on(*place):
        assert where(nn.Linear(2, 2).weight) == place
        assert where(nn.Linear(2, 2, device="cpu").weight) is HERE
        assert where(nn.Linear(2, 2, device="cpu").to("remote").weight) == place


@pytest.mark.parametrize("place", ALL)
def test_a_local_tensor_goes_to_any_place(place: Where) -> None:
    local = torch.tensor([1.0, 2.0])
    kept = at(place)
    for x in (
        local.to(kept.device),
        local.to(device=kept.device),
        torch.zeros(2, device=kept.device).copy_(local),
    ):
        assert where(x) == place and x.tolist() == [1, 2]
    with dr.on(*place):
        assert where(local.to("remote")) == place
        assert where(local.dist_send()) == place  # type: ignore[attr-defined]


def test_the_gradient_of_what_was_sent_comes_back() -> None:
    local = torch.ones(2, requires_grad=True)
    (local.dist_send() * 3).sum().backward()  # type: ignore[attr-defined]
    assert local.grad is not None and local.grad.tolist() == [3, 3]
    with torch.no_grad():
        assert not local.dist_send().requires_grad  # type: ignore[attr-defined]


def test_dtype_and_place_change_together() -> None:
    x = at(CPU0)
    for y in (
        x.to("cuda:1", torch.float64),
        x.to("cuda:1", dtype=torch.float64),
        x.to(device="cuda:1", dtype=torch.float64),
        x.cuda(1).double(),
    ):
        assert where(y) == GPU1 and y.dtype is torch.float64 and y.tolist() == [1, 2, 3]
    y = x.to(torch.zeros(1, dtype=torch.int64))
    assert where(y) is HERE and y.dtype is torch.int64
    y = x.to(at(FAR1, [1]))
    assert where(y) == FAR1 and y.dtype is torch.int64
    y = x.to("cpu", torch.float16)
    assert where(y) is HERE and y.dtype is torch.float16
    assert x.to("cpu", copy=True) is not x
    again = x.to(x.device, copy=True)
    assert again is not x and where(again) == CPU0
    again.zero_()
    assert x.tolist() == [1, 2, 3]


def test_is_the_tensor_itself_where_it_is_already() -> None:
    x, g = at(CPU0), at(GPU1)
    assert x.to(x.device) is x and x.to(dr.place(0)) is x and x.to(node=0) is x and x.dist_send() is x
    assert g.to("cuda:1") is g and g.cuda(1) is g and g.to(g) is g
    with dr.on(0, "cuda:1"):
        assert g.cuda() is g and g.to("remote") is g and g.to("cuda") is g


# Copies between all pairs


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
def test_copies_between_places(source: Where, target: Where) -> None:
    x, y = at(source, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), at(target, [[0.0] * 3] * 2)
    place = dr.place(*target)
    assert where(x.to(place)) == target and x.to(place).tolist() == x.tolist()
    y.copy_(x)
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]]
    y[:, 1:].copy_(x[0, :2])  # a view, a broadcast
    assert y.tolist() == [[1, 1, 2], [4, 1, 2]]
    y.copy_(x.to(torch.int64))  # another dtype
    x.zero_()
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]]
    z = at(target, [1j, 2j])
    z.copy_(at(source, [1 + 1j, 2 - 3j]).conj())
    assert z.tolist() == [1 - 1j, 2 + 3j]


@pytest.mark.parametrize("source, target", [(CPU0, GPU1), (CPU0, FAR1), (FAR1, GPU0), (GPU0, GPU1)])
def test_gradients_flow_back_over_copies(source: Where, target: Where) -> None:
    x = at(source).requires_grad_()
    y = (x * 2).to(dr.place(*target)) * at(target, [1.0, 10.0, 100.0])
    y.cpu().sum().backward()
    assert where(x.grad) == source and x.grad.tolist() == [2, 20, 200]
    leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (leaf.to(at(target).device) * 3).sum().backward()
    assert leaf.grad is not None and where(leaf.grad) is HERE and leaf.grad.tolist() == [3, 3, 3]


def test_a_copy_between_nodes_sees_its_point_of_the_program() -> None:
    x, y = at(CPU0, [0.0]), at(CPU1, [0.0])
    for _ in range(30):
        x.add_(1)
        y.copy_(x)
        x.copy_(y + 1)
    assert (x.item(), y.item()) == (60, 59)


# Contexts


def test_the_context_says_where_new_tensors_go_and_never_where_operations_run() -> None:
    x = at(CPU0)
    with dr.on(1, "cuda:1"):
        assert where(x + 1) == CPU0 and where(torch.zeros_like(x)) == CPU0 and where(x.new_zeros(2)) == CPU0
        assert where(torch.zeros(2)) == FAR1
        assert (
            where(torch.zeros(2, device="remote")) == FAR1
            and where(dr.factories.FloatTensor(2, device="cpu")) == CPU1
            and where(dr.factories.FloatTensor(2, device=0)) == FAR0
        )
        assert where(dr.factories.FloatTensor(2)) == FAR1
        assert where(torch.zeros(2, device="cpu")) is HERE


def test_contexts_nest_and_end() -> None:
    assert where(torch.zeros(1, device="remote")) == GPU0
    with dr.node(1):
        assert (
            where(torch.zeros(1, device="remote")) == FAR0
            and where(torch.zeros(1)) is HERE
            and where(torch.zeros(1, device="remote")) == FAR0
        )
        with dr.device("cuda:1"):
            assert where(torch.zeros(1, device="remote")) == FAR1
            with dr.node(0):
                assert where(torch.zeros(1, device="remote")) == GPU1
            with dr.device(-1):
                assert where(torch.zeros(1, device="remote")) == CPU1
            with pytest.raises(ZeroDivisionError), dr.on(0):
                assert where(torch.zeros(1)) == GPU0
                raise ZeroDivisionError
            assert where(torch.zeros(1, device="remote")) == FAR1
    assert where(torch.zeros(1, device="remote")) == GPU0 and torch.get_default_device() == torch.device(
        "cpu"
    )


def test_defaults_of_the_two_kinds_of_spellings() -> None:
    assert where(dr.factories.FloatTensor(2)) == CPU0 and where(torch.ones(2).dist_send()) == CPU0  # type: ignore[attr-defined]
    assert (
        where(torch.zeros(2, device="remote")) == GPU0
        and where(torch.ones(2).to("remote")) == GPU0
        and where(torch.randn(2, device="remote")) == GPU0
    )
    with dr.node(1):
        assert where(dr.factories.FloatTensor(2)) == CPU1 and where(torch.zeros(2, device="remote")) == FAR0
        assert (
            where(dr.factories.FloatTensor(2, device=1)) == FAR1
            and where(dr.factories.FloatTensor(2, device="cpu")) == CPU1
        )
    with dr.device("cuda:1"):
        assert where(dr.factories.FloatTensor(2)) == GPU1 and where(torch.ones(2).dist_send()) == GPU1  # type: ignore[attr-defined]


def test_a_context_may_be_used_again() -> None:
    context = dr.on(1, "cpu")
    for _ in range(3):
        with context, context:
            assert where(torch.zeros(1)) == CPU1
        assert torch.get_default_device() == torch.device("cpu")


def test_torchs_own_contexts() -> None:
    x = at(FAR1)
    with x.device:
        assert where(torch.zeros(1)) == FAR1
    with dr.node(1), dr.device("cpu"), torch.device("remote"):
        assert where(nn.Linear(2, 2).weight) == CPU1
    torch.set_default_device("remote")
    try:
        assert where(torch.zeros(1)) == GPU0
        with dr.node(1):
            assert where(torch.zeros(1)) == FAR0
    finally:
        torch.set_default_device(None)
    with torch.remote.device(x.device):  # type: ignore[attr-defined]
        assert where(torch.zeros(1, device="remote")) == FAR1


def test_set_place_for_a_prompt() -> None:
    try:
        dr.set_place(1, "cuda:1")
        assert (
            where(torch.zeros(1, device="remote")) == FAR1
            and where(dr.factories.FloatTensor(1)) == FAR1
            and where(torch.ones(1).to("remote")) == FAR1
        )
        with dr.node(0):
            assert where(torch.zeros(1, device="remote")) == GPU0
        with dr.on(0, "cpu"):
            assert where(torch.zeros(1, device="remote")) == CPU0
        dr.set_place(1)
        assert where(torch.zeros(1, device="remote")) == FAR0 and where(dr.factories.FloatTensor(1)) == CPU1
        dr.set_place(dr.place(1, "cpu"))
        assert where(torch.zeros(1, device="remote")) == CPU1
    finally:
        dr.set_place(0)
    assert where(torch.zeros(1, device="remote")) == GPU0 and where(dr.factories.FloatTensor(1)) == CPU0


def test_a_context_that_is_not_entered_says_what_it_is_for() -> None:
    for context, where in ((dr.on(1), "node 1 cuda:0"), (dr.node(1), "node 1"), (dr.device("cpu"), "cpu")):
        assert (
            repr(context)
            == f"<a context: new tensors go to {where} inside `with`; dr.set_place(...) is for good>"
        )


def test_places_are_values() -> None:
    assert dr.place(1, "cuda:1") == dr.place(1, 1) == dr.types.Place(1, "cuda:1") and dr.place(1) == dr.place(
        1, -1
    ) == dr.place(1, "cpu")
    assert len({dr.place(0), dr.place(0, "cpu"), dr.place(1)}) == 2
    assert str(dr.place(1, "cuda:1")) == "node 1 cuda:1"
    assert at(FAR1).place == dr.place(1, 1)


@pytest.mark.parametrize(
    "use, text",
    [
        (lambda: dr.node(2), "no node 2.*nodes 0, 1"), (lambda: dr.node(-1), "no node -1"), (lambda: dr.place(0, "cuda:2"), "no device 'cuda:2'.*cuda:1"),
        (lambda: dr.on(0, 7), "no device 'cuda:7'"), (lambda: dr.set_place(5), "no node 5"), (lambda: at(CPU0).to("cuda:9"), "no device 'cuda:9'"),
        (lambda: at(CPU0).to(node=3), "no node 3"), (lambda: at(CPU0).cuda(4), "no device 'cuda:4'"), (lambda: dr.factories.FloatTensor(1, device=3), "no device 'cuda:3'"),
        (lambda: torch.zeros(1, device="remote:99"), "remote:99"), (lambda: dr.factories.FloatTensor(1, device="cuda:2"), "no device 'cuda:2'"),
        (lambda: dr.device("tpu:0"), "tpu"), (lambda: dr.device(1.5), "1.5"), (lambda: dr.node("a"), "is named by its number, 0 to 1, or by a place; got 'a'"), (lambda: dr.node(True), "is named by its number, 0 to 1, or by a place; got True"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_placement_error(use: Callable[[], Any], text: str) -> None:
    with pytest.raises(dr.errors.PlacementError, match=text):
        use()
    assert where(torch.zeros(1, device="remote")) == GPU0


def test_operands_on_different_places() -> None:
    x, g, far, local = at(CPU0), at(GPU0), at(CPU1), torch.ones(3)
    for code in (
        lambda: x + g,
        lambda: x + far,
        lambda: x + local,
        lambda: local + x,
        lambda: torch.stack([x, g]),
        lambda: x.add_(far),
    ):
        with pytest.raises(dr.errors.PlacementError, match="node"):
            code()
    two = torch.tensor(2.0)
    assert (x * two).tolist() == [2, 4, 6] and where(
        two * g
    ) == GPU0  # zero-dimensional local tensors are sent along
    assert g[torch.tensor([2, 0])].tolist() == [3, 1] and g[torch.tensor([True, False, True])].tolist() == [
        1,
        3,
    ]
    g[torch.tensor([0])] = 9.0
    assert g.tolist() == [9, 2, 3]
    assert torch.where(x > 1, x, torch.tensor(0.0)).tolist() == [0, 2, 3]
    for code in (
        lambda: x * at(CPU1, 2.0),
        lambda: x * at(GPU0, 2.0),
    ):  # a remote one is not: CUDA does not move those either
        with pytest.raises(dr.errors.PlacementError):
            code()


# Numbers


def test_places_are_counted_node_by_node_gpus_first() -> None:
    numbers = {device.number: (info.index, device.name) for info in dr.nodes() for device in info.devices}
    assert numbers == dict(enumerate([GPU0, GPU1, CPU0, FAR0, FAR1, CPU1]))
    for number, place in numbers.items():
        assert where(torch.zeros(1, device=f"remote:{number}")) == place
        assert where(torch.ones(1).to(f"remote:{number}")) == place
    for number, place in numbers.items():
        assert f"{place[1]} (remote:{number})" in str(dr.nodes())


@pytest.fixture(scope="module")
def many() -> Iterator[None]:
    """Three nodes with 100 simulated GPUs each, for the tests that stand last."""
    dr.shutdown()
    dr.init_master_worker(world_size=3, simulate_cuda=100, timeout=STARTING)
    yield


def new(k: int, value: float = 0.0) -> Any:
    """Return a tensor on the k-th of 300 GPUs."""
    with dr.on(k // 100, k % 100):
        return torch.full((2,), value)


@pytest.mark.slow(reason="starts a worker with 300 places, 7 s")
def test_300_places_in_one_session(many: None) -> None:
    kept: list[Any] = []
    for round_ in range(2):
        for k in range(300):
            x = new(k, float(k + round_))
            assert where(x) == (k // 100, f"cuda:{k % 100}")
            assert 0 <= x.device.index <= 126
            y = x + 1
            y.add_(torch.ones(2, device=x.device))
            kept = [*kept[-40:], (k + round_ + 2.0, y)]
            assert len({t.device.index for _, t in kept}) == len({t.place for _, t in kept})
            if k % 10 == 0:
                for value, t in kept:
                    assert t.tolist() == [value] * 2
    (one, there), (two, here) = kept[-1], kept[-2]
    back = there.to(here.device) + here
    assert back.place == here.place and back.tolist() == [one + two] * 2


def test_a_number_is_free_again_when_nobody_lives_there(many: None) -> None:
    session = active_session()
    gc.collect()
    free = len(session.places._free)
    x = new(250)
    view = x[:1]
    del x
    assert len(session.places._free) == free - 1 and view.tolist() == [0]
    del view
    assert len(session.places._free) == free
    w = new(251, 1.0).requires_grad_()
    y = (w * w).sum()
    del w
    assert len(session.places._free) == free - 1
    del y
    assert len(session.places._free) == free


def test_a_device_means_its_place_after_its_last_tensor(many: None) -> None:
    device = new(252).device
    others = [new(k, float(k)) for k in range(100, 130)]
    assert where(torch.zeros(2, device=device)) == (2, "cuda:52")
    assert new(252).device == device
    assert others[-1].tolist() == [129.0] * 2


def test_more_than_127_places_at_once_is_a_clear_error(many: None) -> None:
    gc.collect()
    kept: list[Any] = []
    with pytest.raises(dr.errors.PlacementError, match="127 places"):
        for k in range(300):
            kept.append(new(k))
    assert len(kept) >= 120
    assert all(where(t) == (k // 100, f"cuda:{k % 100}") for k, t in enumerate(kept))
    with pytest.raises(dr.errors.PlacementError, match="127 places"):
        kept[0].to(dr.place(2, 99))
    del kept[-1]
    moved = kept[0].to(dr.place(2, 99))
    assert where(moved) == (2, "cuda:99")
    torch.manual_seed(5)  # seeds the other places too, and needs no number for that
    with dr.on(2, 70), pytest.raises(dr.errors.PlacementError, match="127 places"):
        torch.rand(1)
    del moved
    kept.clear()
    assert new(298).tolist() == [0, 0]


def test_the_first_80_places_have_numbers_of_their_own(many: None) -> None:
    assert torch.remote.device_count() == 80  # type: ignore[attr-defined]
    for k in (0, 79):
        assert dr.place(0, k).number == k and where(torch.ones(1, device=dr.place(0, k))) == (0, f"cuda:{k}")
    beyond = dr.place(2, 70)
    assert dr.nodes()[2].devices[71].number is None
    with pytest.raises(
        dr.errors.PlacementError, match=r"Beyond the 80 places .* dr\.on\(place\), x\.to\(place\)"
    ):
        torch.ones(1, device=beyond)
    with dr.on(beyond):
        x = torch.ones(2)
    assert x.place == beyond and dr.nodes()[2].devices[71].number == x.device.index >= 80  # type: ignore[attr-defined]
    assert where(torch.zeros(2, device=x.device)) == where(at((0, "cuda:1")).to(beyond)) == (2, "cuda:70")
    assert (
        where(nn.Linear(2, 2).to(beyond).weight)
        == where(dr.factories.FloatTensor(2, device=beyond))
        == (2, "cuda:70")
    )
    # Meshes and the places beyond take their numbers from the other end.
    mesh = dr.init_device_mesh([beyond, dr.place(0, 0)], (2,))
    assert mesh.device.index > 80 and where(torch.ones(1, device=mesh.device).member(0)) == (2, "cuda:70")  # type: ignore[attr-defined]


def test_random_numbers_of_every_place_can_be_seeded(many: None) -> None:
    def draw() -> list[float]:
        torch.manual_seed(3)
        with dr.on(2, 70):
            return torch.rand(2).tolist()  # type: ignore[no-any-return]

    assert draw() == draw()
