"""A place is a device: torch takes it wherever it takes one, and its number is a rule and stays its own."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from fewer import fewer
from processes import ListeningWorker, until

REMOTE = "remote"
PLACES = [(n, device) for n in range(2) for device in ("cuda:0", "cuda:1", "cpu")]


pytestmark = pytest.mark.usefixtures("two_nodes_with_two_simulated_gpus")


@pytest.fixture
def place() -> dr.types.Place:
    return dr.place(1, "cuda:1")


# torch takes it

LOCAL = torch.arange(6.0).reshape(2, 3)
FACTORIES: dict[str, Callable[[Any, Any], Any]] = {
    "zeros": lambda p, x: torch.zeros(2, 3, device=p),
    "ones": lambda p, x: torch.ones((2,), device=p, dtype=torch.int64),
    "empty": lambda p, x: torch.empty(2, device=p).fill_(2),
    "empty_strided": lambda p, x: torch.empty_strided((2, 3), (1, 2), device=p).fill_(1),
    "full": lambda p, x: torch.full((2,), 7.0, device=p),
    "arange": lambda p, x: torch.arange(5, device=p),
    "linspace": lambda p, x: torch.linspace(0, 1, 5, device=p),
    "logspace": lambda p, x: torch.logspace(0, 1, 5, device=p),
    "eye": lambda p, x: torch.eye(3, device=p),
    "tril_indices": lambda p, x: torch.tril_indices(3, 3, device=p),
    "hann_window": lambda p, x: torch.hann_window(4, device=p),
    "rand": lambda p, x: torch.rand(3, device=p),
    "randn": lambda p, x: torch.randn(3, device=p),
    "randint": lambda p, x: torch.randint(9, (3,), device=p),
    "randperm": lambda p, x: torch.randperm(5, device=p),
    "normal": lambda p, x: torch.normal(0.0, 1.0, (3,), device=p),
    "tensor": lambda p, x: torch.tensor([[1, 2], [3, 4]], device=p),
    "scalar_tensor": lambda p, x: torch.scalar_tensor(3.0, device=p),
    "as_tensor": lambda p, x: torch.as_tensor([1.0, 2.0], device=p),
    "as_tensor of a tensor": lambda p, x: torch.as_tensor(x, device=p),
    "asarray": lambda p, x: torch.asarray([1.0, 2.0], device=p),
    "zeros_like": lambda p, x: torch.zeros_like(x, device=p),
    "ones_like": lambda p, x: torch.ones_like(x, device=p),
    "full_like": lambda p, x: torch.full_like(x, 3.0, device=p),
    "rand_like": lambda p, x: torch.rand_like(x, device=p),
    "new_zeros": lambda p, x: x.new_zeros(3, device=p),
    "new_full": lambda p, x: x.new_full((2,), 3.0, device=p),
    "new_tensor": lambda p, x: x.new_tensor([1.0, 2.0], device=p),
    "to": lambda p, x: x.to(p),
    "to(device=)": lambda p, x: x.to(device=p, dtype=torch.float64, non_blocking=True),
    "to a view": lambda p, x: x.t().to(p),
    "meshgrid": lambda p, x: torch.cartesian_prod(torch.arange(2, device=p), torch.arange(3, device=p)),
    "Parameter": lambda p, x: nn.Parameter(torch.ones(2, device=p)).detach(),
    "Linear": lambda p, x: nn.Linear(2, 3, device=p).weight.detach(),
    "Embedding": lambda p, x: nn.Embedding(4, 2, device=p).weight.detach(),
    "LSTM": lambda p, x: nn.LSTM(2, 3, device=p).bias_hh_l0.detach(),
    "module.to": lambda p, x: nn.Linear(2, 3).to(p).weight.detach(),
    "module.to(device=)": lambda p, x: nn.Linear(2, 3).to(device=p, dtype=torch.float64).weight.detach(),
    "to_empty": lambda p, x: nn.Linear(2, 3, device="meta").to_empty(device=p).weight.detach().fill_(1),
    "dr.factories.FloatTensor": lambda p, x: dr.factories.FloatTensor([1.0, 2.0], device=p),
}  # fmt: skip


@pytest.mark.parametrize("where", fewer(PLACES, 2, "another place, 1 s"), ids=str)
def test_every_factory_takes_a_place(where: tuple[int, str]) -> None:
    place = dr.place(*where)
    for name, make in FACTORIES.items():
        for x in (LOCAL, LOCAL.to("remote:2")):
            torch.manual_seed(4)
            found = make(place, x)
            assert found.place == place and found.device == place.device, name
            torch.manual_seed(4)
            # What a local `dr.factories.FloatTensor` is like, torch does not say.
            if not name.startswith("dr."):
                expected = make("cpu", LOCAL)
                assert torch.equal(found.cpu(), expected) and found.stride() == expected.stride(), name


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("take", [torch.as_tensor, torch.asarray])
def test_what_is_there_already_is_no_copy(take: Callable[..., torch.Tensor], mode: type) -> None:
    x = torch.arange(3.0).to("remote:2")
    with mode(), dr.on(x.place.node, x.place.local_device):
        for device in ("remote:2", x.device, "remote"):
            assert take(x, device=device) is x
        take(x, device=x.device).add_(1)
        assert x.tolist() == [1.0, 2.0, 3.0]
        for other in (take(x, device="remote:1"), take(x, device=x.device, dtype=torch.float64)):
            other.zero_()
        assert x.tolist() == [1.0, 2.0, 3.0]
        assert take(x, device="remote:1").device == torch.device("remote:1")
        with pytest.raises(dr.errors.PlacementError, match='no place has the number of "remote:77"'):
            take(x, device="remote:77")


def test_a_place_is_the_default_device(place: dr.types.Place) -> None:
    torch.set_default_device(place)
    try:
        assert torch.ones(2).place == place and nn.Linear(2, 2).weight.place == place  # type: ignore[attr-defined, union-attr]
        assert torch.get_default_device() == place.device
    finally:
        torch.set_default_device(None)
    for context in (torch.device(place), dr.on(place), torch.remote.device(place)):  # type: ignore[attr-defined]
        with context:
            assert torch.ones(2, device=None if isinstance(context, torch.device) else REMOTE).place == place  # type: ignore[attr-defined]
    assert torch.ones(1).device.type == "cpu"


def test_a_file_is_loaded_to_a_place(place: dr.types.Place) -> None:
    file = io.BytesIO()
    torch.save({"w": LOCAL, "n": 3}, file)
    for where in (place, place.device):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["w"].place == place and torch.equal(loaded["w"].cpu(), LOCAL) and loaded["n"] == 3


def test_gradients_and_optimizers_do_not_care_that_it_is_a_place(place: dr.types.Place) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(place)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    twin.load_state_dict(dr.fetch(model.state_dict()))
    for module, x in ((model, LOCAL.to(place)), (twin, LOCAL)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.cpu(), theirs)


def test_transformers_takes_a_place(place: dr.types.Place) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = transformers.BatchEncoding(
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]}, tensor_type="pt"
    )
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**prompt, **options)
    model.to(place)
    assert model.device == place.device
    found = model.generate(**prompt.to(place), **options)
    assert found.place == place and torch.equal(found.cpu(), expected)


# what it says of itself


def test_a_place_is_spelled_as_its_device(place: dr.types.Place) -> None:
    assert (
        place.device
        == torch.device(place)
        == torch.device("remote", place.index)
        == torch.ones(1, device=place).device
    )
    assert (place.type, place.index, place.number) == ("remote", 4, 4)
    assert (place.node, place.local_device) == (1, "cuda:1")
    assert (str(place), f"{place:>16}", repr(place)) == (
        "node 1 cuda:1",
        "   node 1 cuda:1",
        "dr.place(1, 'cuda:1')",
    )
    assert eval(repr(place)) == place
    assert torch.ones(1, device=place).place is place  # type: ignore[attr-defined]


def test_a_copied_place_is_the_place_and_a_pickled_one_has_its_number(place: dr.types.Place) -> None:
    assert copy.copy(place) is copy.deepcopy({"at": place})["at"] is place
    found = pickle.loads(pickle.dumps(place))
    assert found == place and hash(found) == hash(place) and found != str(place) and found != "remote:4"
    assert (
        dr.factories.FloatTensor(1, device=found).place == place
        and nn.Linear(1, 1).to(found).weight.place == place
    )
    assert found.number == 4 and torch.zeros(1, device=found).place == place  # type: ignore[attr-defined]


def test_places_are_ordered_as_they_are_numbered() -> None:
    names = ("cuda:0", "cuda:2", "cuda:10", "cpu")
    places = [dr.types.Place(node, name) for node in (0, 2, 10) for name in names]
    numbered = [dr.types.Place(place.node, place.local_device, k) for k, place in enumerate(places)]
    assert sorted(reversed(places)) == sorted(reversed(numbered)) == places
    assert places[0] < places[1] <= places[1] and places[-1] > places[0] >= places[0]
    assert max(dr.place(n, d) for n, d in PLACES) == dr.place(1)


def test_a_tensor_prints_its_place_once(place: dr.types.Place) -> None:
    x = torch.ones(2, device=place)
    assert repr(x) == "tensor([1., 1.], device='remote:4' (node 1 cuda:1))"
    assert (
        repr(x.requires_grad_() * 2)
        == "tensor([2., 2.], device='remote:4' (node 1 cuda:1), grad_fn=<MulBackward0>)"
    )
    with dr.init_device_mesh("cuda", (4,)) as mesh:
        y = torch.ones(1, device=REMOTE)
    assert repr(y) == f"tensor([1.], device='remote:{mesh.device.index}' (member 0 of 4))"


# numbers


def test_the_number_of_a_place_is_a_rule() -> None:
    gpus = 2
    for node in range(2):
        for i in range(gpus):
            assert dr.place(node, f"cuda:{i}").number == node * (gpus + 1) + i
        assert dr.place(node).number == node * (gpus + 1) + gpus


def test_a_loop_over_the_devices_visits_each_place_once() -> None:
    remote: Any = torch.remote  # type: ignore[attr-defined]
    visited = [torch.ones(1, device=f"remote:{k}").place for k in range(remote.device_count())]  # type: ignore[attr-defined]
    assert visited == [dr.place(*where) for where in PLACES]
    entered = []
    for k in range(remote.device_count()):
        with remote.device(k):
            assert remote.current_device() == k
            entered += [torch.ones(1, device=REMOTE).place, torch.ones(1).to(REMOTE).place]  # type: ignore[attr-defined]
    assert entered == [place for place in visited for _ in range(2)]


def test_remote_alone_is_the_current_place_and_remote_0_is_not() -> None:
    here, first = dr.place(1, "cpu"), dr.place(0, "cuda:0")
    with dr.on(here):
        for name, make in FACTORIES.items():
            if not name.startswith("dr."):
                for x in (LOCAL, LOCAL.to("remote:3")):
                    assert make(REMOTE, x).place == here, name
                    assert make("remote:0", x).place == first, name
    strided = LOCAL.t().to(REMOTE)
    assert strided.place == first and strided.stride() == LOCAL.t().stride()  # type: ignore[attr-defined]
    x = LOCAL.to(here)
    assert torch.Tensor.to(x, REMOTE).place == first and torch.zeros_like(x, device=REMOTE).place == first  # type: ignore[attr-defined]


# what is refused


@pytest.mark.parametrize(
    "use, words",
    [
        (lambda p: torch.remote.device("cuda:1"), "got 'cuda:1', expected"),  # type: ignore[attr-defined]
        (lambda p: torch.remote.set_device("cpu"), "got 'cpu', expected"),  # type: ignore[attr-defined]
        (lambda p: torch.remote.mem_get_info(6), "remote:6"),  # type: ignore[attr-defined]
        (lambda p: torch.remote.device(-1), "remote:-1"),  # type: ignore[attr-defined]
        (lambda p: dr.Stream(p, device="cuda:1"), "device='cuda:1' was given besides"),
        (lambda p: dr.Stream(1, device=p), "node=1 was given besides"),
        (lambda p: dr.current_stream(p.device, "cpu"), "device='cpu' was given besides"),
        (lambda p: dr.on(p, "cpu"), "device='cpu' was given besides"),
        (lambda p: dr.set_place(p, 1), "device=1 was given besides"),
        (lambda p: torch.ones(1, device=p).to(p, node=0), "node=0 was given besides"),
        (lambda p: torch.ones(1, device=p).to("remote:0", node=1), "node=1 was given besides"),
        (lambda p: nn.Linear(1, 1).to(p, node=0), "node=0 was given besides"),
        (lambda p: dr.place(1, "cuda:2"), "no device 'cuda:2'"),
    ],
)
def test_what_would_be_ignored_is_refused(
    place: dr.types.Place, use: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(dr.errors.PlacementError, match=words.replace("(", r"\(")):
        use(place)


def test_a_checkpoint_holds_no_place(place: dr.types.Place, tmp_path: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match="Place"):
        dr.save({"at": place, "x": torch.ones(1, device=place)}, tmp_path)


# these stand last, as they have sessions of their own


def test_a_node_keeps_its_numbers_when_another_worker_has_it(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=3, simulate_cuda=1)
    places = [dr.place(node, device) for node in range(3) for device in ("cuda:0", "cpu")]
    mesh = dr.init_device_mesh("cpu", (2,))
    on_mesh = mesh.device
    lost, kept = torch.ones(2, device=places[2]), torch.ones(2, device=places[5])
    for killed in (1, 1, 0):
        os.kill(dr.nodes()[killed].pid, signal.SIGKILL)
        until(lambda: "lost" in [node.state for node in dr.nodes()])
        dr.restart(killed)
        assert [d.number for node in dr.nodes() for d in node.devices] == [1, 0, 3, 2, 5, 4]
        for k, place in enumerate(places):
            assert torch.full((2,), float(k), device=f"remote:{k}").place == place  # type: ignore[attr-defined]
            x = torch.full((2,), float(k), device=place)
            assert x.tolist() == [k, k] and x.device.index == k and x.place == place  # type: ignore[attr-defined]
    assert lost.device == places[2].device and kept.tolist() == [1, 1]
    assert torch.zeros(1, device=lost.device).tolist() == [0]
    # It is another worker's, though they have one number.
    with pytest.raises(dr.errors.NodeFailed):
        lost + torch.ones(2, device=lost.device)
    del mesh
    again = dr.init_device_mesh("cpu", (3,))
    assert again.device != on_mesh and torch.ones(1, device=again.device).member(2).place == places[5]  # type: ignore[attr-defined]


def test_a_place_that_is_unpickled_gets_the_number_of_that_session(
    fresh_session: Callable[..., Any],
) -> None:
    fresh_session(world_size=1, simulate_cuda=2)
    # The CPU of node 0 is remote:2 there.
    pickled = pickle.dumps([dr.place(0), dr.place(0, 1)])
    dr.shutdown()
    fresh_session(world_size=1)
    here, elsewhere = pickle.loads(pickled)
    assert here.number == 0 and torch.ones(1, device=here).place == dr.place(0)  # type: ignore[attr-defined]
    # This session does not have the other one.
    with pytest.raises(dr.errors.PlacementError, match=r"make it anew, dr\.place\(node, device\)"):
        torch.zeros(1, device=elsewhere)
    with pytest.raises(dr.errors.PlacementError, match="no device 'cuda:1'"):
        dr.factories.FloatTensor(1, device=elsewhere)


def test_what_is_on_a_gpu_needs_another_device_on_a_node_without_one(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    with_gpu = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--simulate-cuda", "1")
    without = ListeningWorker(tmp_path / "second", "--listen", "tcp://127.0.0.1:0")
    try:
        fresh_session(workers=[with_gpu.address, without.address])
        x: Any = torch.ones(2, device=dr.place(0, 0))
        with pytest.raises(
            dr.errors.PlacementError, match=r'node 1 has no GPU.*\.to\(node=1, device="cpu"\)'
        ):
            x.to(node=1)
        assert x.to(node=1, device="cpu").place == dr.place(1)
    finally:
        dr.shutdown()
        with_gpu.stop()
        without.stop()
