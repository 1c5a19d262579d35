"""`torch.Generator(device="remote")`: it draws what a generator of this process draws after the same seed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import distruntime as dr
from agree import REMOTE
from distruntime.session.fetching import synchronize_node
from processes import until


def draws(device: str, generator: torch.Generator) -> list[torch.Tensor]:
    generator.manual_seed(7)
    torch.manual_seed(1)
    g: dict[str, Any] = {"generator": generator}
    with torch.no_grad():
        return [
            torch.randn(3, device=device, **g),
            # This one follows torch's own seed, and is the first that does.
            torch.rand(3, device=device),
            torch.rand(2, 2, device=device, **g),
            torch.randperm(9, device=device, **g),
            torch.empty(4, device=device).normal_(**g),
            torch.randint(9, (3,), device=device, **g),
            torch.bernoulli(torch.full((5,), 0.5, device=device), **g),
            torch.multinomial(torch.ones(4, device=device), 2, **g),
            torch.normal(0.0, 1.0, (2,), device=device, **g),
            torch.empty(3, device=device).uniform_(-1, 1, **g),
            nn.init.orthogonal_(torch.empty(3, 3, device=device), **g),
            nn.init.xavier_uniform_(torch.empty(3, 3, device=device), **g),
            torch.randn(2, device=device),
            torch.randperm(5, device=device),
        ]


def test_it_draws_as_a_local_one_and_leaves_the_others_alone(session: object) -> None:
    remote, local = torch.Generator(device=REMOTE), torch.Generator()
    for there, here in zip(draws(REMOTE, remote), draws("cpu", local)):
        assert there.device.type == "remote" and torch.equal(there.cpu(), here)
    # Its state can be asked for at once, and nobody waits for a draw.
    dr.profiler.stalls(reset=True)
    state = remote.get_state()
    first = torch.rand(4, device=REMOTE, generator=remote)
    remote.set_state(state)
    again = torch.rand(4, device=REMOTE, generator=remote)
    twin = remote.clone_state()
    next_ones = [torch.rand(2, device=REMOTE, generator=g) for g in (remote, twin)]
    assert dr.profiler.stalls() == []
    assert torch.equal(first.cpu(), again.cpu())
    assert torch.equal(*(t.cpu() for t in next_ones))
    assert torch.equal(dr.fetch(remote.get_state()), dr.fetch(twin.get_state()))


def test_a_state_goes_through_a_file(session: object) -> None:
    generator = torch.Generator(REMOTE)
    generator.manual_seed(3)
    file = io.BytesIO()
    torch.save(generator.get_state(), file)
    expected = torch.rand(3, device=REMOTE, generator=generator).cpu()
    file.seek(0)
    generator.set_state(torch.load(file))
    assert torch.equal(torch.rand(3, device=REMOTE, generator=generator).cpu(), expected)
    local = torch.Generator()
    local.manual_seed(3)
    assert torch.equal(torch.rand(3, generator=local), expected)


def test_it_is_a_generator_and_others_stay_what_they_were(session: object) -> None:
    remote, local = torch.Generator(device=dr.place(1)), torch.Generator("cpu")
    assert isinstance(remote, torch.Generator) and isinstance(local, torch.Generator)
    assert not isinstance(3, torch.Generator) and issubclass(type(local), torch.Generator)
    assert type(local) is torch._C.Generator and local.device == torch.device("cpu")
    assert remote.device == dr.place(1).device and remote.initial_seed() == local.initial_seed()
    assert remote.manual_seed(5) is remote and remote.initial_seed() == 5
    assert remote.seed() == remote.initial_seed() != 5
    assert torch.rand(1, device=dr.place(1), generator=remote).device == dr.place(1).device


class Keeper:
    def keep(self, x: torch.Tensor) -> None:
        self.x = x

    def total(self) -> torch.Tensor:
        return self.x.sum()


def failed(g: torch.Generator) -> torch.Tensor:
    index, value = torch.tensor([9999]).to(REMOTE), torch.zeros(1, dtype=torch.uint8).to(REMOTE)
    return g.get_state().index_copy_(0, index, value)


@pytest.mark.parametrize(
    "state, kind, text",
    [
        (failed, IndexError, "out of bounds"),
        (lambda g: torch.zeros(5056, dtype=torch.uint8), RuntimeError, "Invalid mt19937 state"),
    ],
)
def test_what_is_no_state_draws_nothing(
    session: object, state: Callable[[torch.Generator], torch.Tensor], kind: type[Exception], text: str
) -> None:
    """The draws came from the place's own generator, without an error."""
    generator: Any = torch.Generator(REMOTE)
    keeper: Any = dr.remote(Keeper)()
    x = torch.ones(3, device=REMOTE)
    keeper.keep(x)
    torch.manual_seed(5)
    generator.set_state(state(generator))
    drawn = [torch.rand(3, device=REMOTE, generator=generator), x.normal_(generator=generator)]
    drawn += [torch.rand(2, device=REMOTE, generator=generator) * 2, x[:1]]
    for value in drawn:
        with pytest.raises(kind, match=text):
            value.tolist()
    assert keeper.total().item() == 3
    assert torch.rand(3, device=REMOTE).tolist() == torch.rand(3).tolist()
    generator.manual_seed(4)
    after = torch.rand(3, device=REMOTE, generator=generator)
    assert after.tolist() == torch.rand(3, generator=torch.Generator().manual_seed(4)).tolist()


def test_a_loader_shuffles_with_it_where_it_is_the_default_device(session: object) -> None:
    with torch.device(REMOTE):
        there = DataLoader(list(range(9)), shuffle=True, generator=torch.Generator(REMOTE).manual_seed(1))  # type: ignore[arg-type, var-annotated]
        mixed = [int(batch) for batch in there]
    here = DataLoader(list(range(9)), shuffle=True, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type, var-annotated]
    assert mixed == [int(batch) for batch in here]


@pytest.mark.parametrize(
    "mistake, kind, text",
    [
        (
            lambda g: torch.rand(2, device=dr.place(1), generator=g),
            RuntimeError,
            "Expected a 'remote:1' device type for generator but found 'remote:0'",
        ),
        (lambda g: g.manual_seed(1 << 65), RuntimeError, "Overflow"),
        (lambda g: g.set_state(torch.zeros(2)), TypeError, "expected a torch.ByteTensor"),
        (
            lambda g: g.set_state(torch.zeros(3, dtype=torch.uint8)),
            RuntimeError,
            "Expected a CPUGeneratorImplState of size 5056 but found the input RNG state size to be 3",
        ),
        (lambda g: g.get_offset(), dr.errors.NotSupportedError, "get_state, set_state"),
        (lambda g: pickle.dumps(g), dr.errors.NotSupportedError, r"torch\.save\(generator\.get_state"),
        (
            lambda g: torch.rand(2, device=REMOTE, generator=torch.Generator()),
            dr.errors.NotSupportedError,
            'torch.Generator\\("remote:0"\\)',
        ),
    ],
)
def test_mistakes(session: object, mistake: Callable[[Any], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        mistake(torch.Generator(REMOTE))


def test_draws_for_local_tensors_are_not_taken_for_its_own(session: object) -> None:
    generator = torch.Generator(REMOTE)
    torch.rand(2, generator=generator)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'remote:0'"):
        torch.rand(2, device=REMOTE, generator=generator)
    with pytest.warns(UserWarning, match="drew numbers for a tensor of this process"):
        del generator


def test_it_draws_on_a_gpu_as_torchs_own_does(fresh_session: Callable[..., Any]) -> None:
    """A simulated GPU has a CPU's kernels, and each place its own generator."""
    fresh_session(world_size=1, simulate_cuda=2)
    generators = [torch.Generator(dr.place(0, f"cuda:{k}")).manual_seed(4) for k in range(2)]  # type: ignore[call-arg, arg-type]
    drawn = [torch.rand(3, device=g.device, generator=g).cpu() for g in generators]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], torch.rand(3, generator=torch.Generator().manual_seed(4)))


def test_it_ends_with_its_session(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    generator = torch.Generator(REMOTE)
    dr.shutdown()
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.SessionClosed):
        generator.manual_seed(1)
    with pytest.raises(dr.errors.SessionClosed):
        torch.rand(2, device=REMOTE, generator=generator)


def rarer_draws(device: str, generator: torch.Generator) -> list[torch.Tensor]:
    """By position, and into tensors of other sizes."""
    generator.manual_seed(3)
    x, g = torch.linspace(0.1, 0.9, 5).to(device), generator
    integers, floats = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
    return [
        torch.poisson(x * 9, generator=g),
        # torch 2.11 has no meta kernel for it.
        *([torch._standard_gamma(x, generator=g)] if torch.__version__ >= "2.13" else []),
        torch.ops.aten.rrelu_with_noise(x - 0.5, torch.zeros_like(x), 0.1, 0.3, True, g),
        torch.randperm(7, generator=g, out=integers).clone(),
        torch.multinomial(x, 3, generator=g, out=integers),
        torch.rand(5, generator=g, out=floats).clone(),
        torch.normal(x, 2.0, generator=g, out=floats),
    ]


def test_it_draws_by_position_and_into_tensors_of_other_sizes(session: object) -> None:
    remote, local = torch.Generator(device=REMOTE), torch.Generator()
    dr.profiler.stalls(reset=True)
    found = rarer_draws(REMOTE, remote)
    assert dr.profiler.stalls() == []
    for there, here in zip(found, rarer_draws("cpu", local)):
        torch.testing.assert_close(there.cpu(), here)
    x = torch.ones(2, device=REMOTE)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        torch.multinomial(x, 1, generator=remote, out=torch.empty(0, device=REMOTE))
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"binomial.*does not wait\. Leave the generator out"
    ):
        torch.binomial(x, x, generator=remote)


def test_a_draw_waits_for_room_before_it_takes_the_lock(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, node = torch.Generator(device="remote:0"), session.nodes[0]
    x = torch.zeros(2, device="remote:0").uniform_(generator=generator)
    # What the worker acknowledges ends that the node is busy: nothing is left for it to acknowledge.
    synchronize_node(session, node)
    until(lambda: not node.flights)
    waited: list[bool] = []

    def throttle(log: object, why: str) -> None:
        waited.append(session.lock._is_owned())
        node.busy = False

    monkeypatch.setattr(session, "throttle", throttle)
    node.busy = True
    try:
        x.uniform_(generator=generator)
    finally:
        node.busy = False
    assert waited and waited[0] is False


@pytest.mark.filterwarnings("ignore:torch.compile does nothing to remote tensors")
def test_a_compiled_function_takes_it(session: object) -> None:
    def noisy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x * 2 + torch.rand(3, generator=generator, device=x.device)

    remote, local = (torch.Generator(device=device).manual_seed(5) for device in (REMOTE, "cpu"))
    found = torch.compile(noisy, backend="eager")(torch.ones(3, device=REMOTE), remote)
    assert torch.equal(found.cpu(), noisy(torch.ones(3), local))


def copied_and_saved(device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(9)
    torch.rand(3, generator=generator, device=device)
    twin = copy.deepcopy({"g": generator})["g"]
    file = io.BytesIO()
    torch.save({"g": generator, "x": torch.ones(2, device=device)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["g"]
    drawn = [torch.rand(2, generator=g, device=g.device) for g in (loaded, twin, generator)]
    return [*drawn, torch.tensor([loaded.initial_seed(), twin.initial_seed()])]


def test_it_is_copied_and_saved(session: object) -> None:
    for there, here in zip(copied_and_saved(REMOTE), copied_and_saved("cpu")):
        assert torch.equal(there.cpu(), here)
