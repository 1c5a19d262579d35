"""The simulated accelerator itself, without distruntime: `run.py` runs this where torch has loaded it.

What a GPU does right must be right here, and what it does wrong must be wrong: a rule has a test that keeps
it, and a test that shows what happens without it.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device_counts import Counts

if not hasattr(torch, "simulated"):
    pytest.skip("torch has not loaded the simulated accelerator: make accelerator", allow_module_level=True)

simulated: Any = torch.simulated
DEVICE = "simulated"
# A kernel takes so many microseconds where a test looks at what has not happened yet.
SLOW = 20_000


def counts() -> Counts:
    return Counts(*torch.ops.simulated.counted())


@pytest.fixture(autouse=True)
def _equal_start() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    simulated.set_delay(0)
    for k in range(simulated.device_count()):
        torch.accelerator.synchronize(k)


@pytest.fixture
def slow() -> Iterator[None]:
    """Let each kernel take long from here on."""
    torch.ones(1, device=DEVICE)
    torch.accelerator.synchronize()
    simulated.set_delay(SLOW)
    yield
    simulated.set_delay(0)


def child(code: str, **knobs: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with these knobs: `child(code, memory=2**20)`."""
    environment = {**os.environ, **{f"SIMULATED_{name.upper()}": str(to) for name, to in knobs.items()}}
    return subprocess.run(
        [sys.executable, "-c", "import torch\n" + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def said(code: str, **knobs: object) -> list[str]:
    """Run code in a process of its own, which must end well. Return the lines that it has printed."""
    done = child(code, **knobs)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- operators --------------------------------------------------------------------------------------


def here_and_there(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare what a function makes on the CPU with what it makes on the device."""
    here = function(*(x.clone() for x in inputs))
    there = function(*(x.to(DEVICE) for x in inputs))
    for a, b in zip(
        here if isinstance(here, tuple) else (here,), there if isinstance(there, tuple) else (there,)
    ):
        if isinstance(a, Tensor):
            assert b.device.type == DEVICE
            torch.testing.assert_close(b.cpu(), a)
        else:
            assert a == b


A, B = torch.randn(4, 5), torch.randn(4, 5)
INDEX = torch.randint(0, 4, (3,))
C = torch.randn(3, 4, dtype=torch.complex64)


def _out(x: Tensor) -> Tensor:
    out = torch.empty(0, device=x.device)
    assert torch.add(x, 1, out=out) is out
    return out


def _resized(x: Tensor) -> Tensor:
    y = x.clone()
    y.resize_(2, 10)
    z = y.new_empty(1).resize_(8).zero_()
    return torch.cat([y.flatten(), z])


def _swapped(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    x.t_()
    y.unsqueeze_(0).squeeze_(0)
    return x, y


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "arithmetic": (lambda a, b: (a + b * 2 - 1) / (b.abs() + 1), (A, B)),
    "matrix product": (lambda a, b: torch.addmm(torch.zeros(4, 4, device=a.device), a, b.t()), (A, B)),
    "in place": (lambda a, b: a.add_(b).mul_(2).clamp_(-1, 1), (A, B)),
    "out": (_out, (A,)),
    "a view is written": (lambda a: (a[1:, ::2].zero_(), a)[1], (A,)),
    "views": (lambda a: a.t().reshape(5, 2, 2).transpose(0, 1)[1].contiguous().view(-1), (A,)),
    "as_strided": (lambda a: a.as_strided((2, 2), (5, 1), 1) + 0, (A,)),
    "split": (lambda a: tuple(x + 0 for x in a.split(2)), (A,)),
    "swapped in place": (_swapped, (A,)),
    "resized": (_resized, (A,)),
    "set_": (lambda a: torch.empty(0, device=a.device).set_(a.untyped_storage(), 2, (3,), (2,)) + 0, (A,)),
    "a dtype's view": (lambda a: a.view(torch.int32) + 1, (A,)),
    "casts": (lambda a: (a.bool(), a.half(), a.double(), a.to(torch.int8)), (A,)),
    "a number of the host": (lambda a: a * torch.tensor(2.5), (A,)),
    "reductions": (lambda a: (a.sum(0), a.mean(), a.max(1).values, a.std(), a.argmax()), (A,)),
    "sort": (lambda a: tuple(a.sort(1)), (A,)),
    "indexing": (
        lambda a, i: (a[i], a[:, 1], a[i, 0], a.index_select(0, i), a.gather(0, i[:, None])),
        (A, INDEX),
    ),
    "indices of the host": (lambda a: a[torch.tensor([2, 0])], (A,)),
    "writing by index": (lambda a, i: a.index_put_((i,), torch.ones(5, device=a.device)), (A, INDEX)),
    "masks": (lambda a: (a[a > 0], a.masked_select(a > 0), a.masked_fill(a > 0, 1.0)), (A,)),
    "writing by mask": (lambda a: torch.cat([a, a.index_put_((a > 0,), a.new_tensor(1))]), (A,)),
    "sizes by value": (lambda a, i: (a.nonzero(), torch.unique(i), torch.bincount(i)), (A, INDEX)),
    "a size by value, out": (lambda a: torch.nonzero(a > 0, out=a.new_empty(0, dtype=torch.long)), (A,)),
    "questions": (lambda a, b: (torch.equal(a, b), bool((a == a).all()), a.is_set_to(a)), (A, B)),
    "complex": (lambda c: (c.conj() * c, c.real + 0, torch.view_as_real(c) + 0, c.imag.neg()), (C,)),
    "conjugate copied": (lambda c: (c.conj().clone(), torch.empty_like(c).copy_(c.conj())), (C,)),
    "linear algebra": (lambda a: torch.linalg.solve(a @ a.t() + torch.eye(4, device=a.device), a), (A,)),
    "fft": (lambda a: torch.fft.rfft(a), (A,)),
    "convolution": (lambda a: F.conv2d(a[None, None], torch.ones(2, 1, 2, 2, device=a.device)), (A,)),
    "factories": (
        lambda a: tuple(
            f(3, 3, device=a.device) for f in (torch.ones, torch.zeros, torch.eye, torch.tril_indices)
        ),
        (A,),
    ),
    "arange": (lambda a: (torch.arange(5, device=a.device), torch.linspace(0, 1, 4, device=a.device)), (A,)),
    "foreach": (lambda a, b: tuple(torch._foreach_add([a, b], 1)), (A, B)),
    "expand and repeat": (lambda a: a[:1].expand(3, 5).repeat(2, 1), (A,)),
    "where": (lambda a, b: torch.where(a > b, a, 0.0), (A, B)),
    "nothing": (lambda a: (a[:0].sum(), a[:0] + 1, a.new_empty(0)), (A,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_a_cpu_gives(name: str) -> None:
    function, inputs = OPERATORS[name]
    here_and_there(function, *inputs)


def test_wrong_shapes_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2, device=DEVICE) + torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="simulated:0") + torch.ones(2, device="simulated:1")


# -- streams and events -----------------------------------------------------------------------------


def test_an_operator_runs_later(slow: None) -> None:
    x = torch.zeros(4, device=DEVICE)
    done = torch.Event(DEVICE)
    y = x + 1
    done.record()
    assert not done.query() and not torch.accelerator.current_stream().query()
    done.synchronize()
    assert done.query() and y.tolist() == [1.0] * 4


def test_another_stream_does_not_wait_unless_it_is_told(slow: None) -> None:
    side = torch.Stream(DEVICE)
    wrong, right = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    x = torch.ones(4, device=DEVICE)
    for _ in range(3):
        x = x + 1
    with side:
        wrong.copy_(x)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        right.copy_(x)
    torch.accelerator.synchronize()
    assert right.tolist() == [4.0] * 4
    assert wrong.tolist() != [4.0] * 4


def test_streams_are_entered_and_left() -> None:
    before = torch.accelerator.current_stream()
    first, second = torch.Stream(DEVICE), torch.Stream("simulated:1", priority=-1)
    assert len({before, first, second}) == 3
    with first:
        assert torch.accelerator.current_stream() == first
        with second:
            assert torch.accelerator.current_device_index() == 1
            assert torch.accelerator.current_stream() == second
        assert torch.accelerator.current_stream() == first
    assert torch.accelerator.current_stream() == before
    torch.accelerator.set_stream(first)
    assert torch.accelerator.current_stream() == first
    torch.accelerator.set_stream(before)


def test_events_have_times(slow: None) -> None:
    x = torch.zeros(4, device=DEVICE)
    first, last = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(3):
        x = x + 1
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 3 * SLOW / 1000
    plain = torch.Event(DEVICE)
    plain.record()
    plain.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        plain.elapsed_time(last)


def test_a_copy_between_devices_waits_for_both(slow: None) -> None:
    x = torch.ones(4, device="simulated:0")
    for _ in range(3):
        x = x + 1
    y = x.to("simulated:1") * 2
    assert y.device.index == 1 and y.tolist() == [8.0] * 4


# -- memory -----------------------------------------------------------------------------------------


def use_elsewhere_and_free(recorded: bool) -> Tensor:
    """Let another stream read memory that is let go of meanwhile, and return what it has read."""
    side = torch.Stream(DEVICE)
    x = torch.ones(256, device=DEVICE)
    out = torch.zeros(256, device=DEVICE)
    torch.accelerator.synchronize()
    with side:
        late = torch.zeros(256, device=DEVICE)
        late += 1
        out.copy_(x)
    if recorded:
        x.record_stream(side)
    del x
    torch.full((256,), 7.0, device=DEVICE)
    torch.accelerator.synchronize()
    return out.cpu()


def test_freed_memory_is_used_again_unless_it_is_recorded(slow: None) -> None:
    assert use_elsewhere_and_free(recorded=True).eq(1).all()
    assert not use_elsewhere_and_free(recorded=False).eq(1).any()


def test_the_order_of_a_stream_is_enough_for_its_own_memory(slow: None) -> None:
    x = torch.ones(256, device=DEVICE)
    address = x.data_ptr()
    y = x + 1
    del x
    z = torch.full((256,), 7.0, device=DEVICE)
    assert z.data_ptr() == address
    assert y.eq(2).all() and z.eq(7).all()


def test_memory_is_counted() -> None:
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device=DEVICE)
    assert torch.accelerator.memory_allocated() == before + 4096
    assert torch.accelerator.max_memory_allocated() >= before + 4096
    free, total = torch.accelerator.get_memory_info()
    assert total == 1 << 30 and free == total - torch.accelerator.memory_reserved()
    del x
    assert torch.accelerator.memory_allocated() == before
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= torch.accelerator.memory_allocated() + 4096
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before


def test_too_much_memory_is_refused_and_nothing_is_lost() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 2048 MiB.*total capacity of 1024 MiB"
    ):
        torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_cached_memory_is_given_up_for_who_needs_it() -> None:
    code = """
    x = torch.empty(600_000, dtype=torch.uint8, device="simulated")
    del x
    y = torch.empty(900_000, dtype=torch.uint8, device="simulated")
    print(torch.accelerator.memory_stats()["num_alloc_retries"])
    """
    assert said(code, memory=1_000_000) == ["1"]


def test_a_storage_grows_and_shrinks() -> None:
    x = torch.arange(4.0, device=DEVICE)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(16)
    assert x.copy_(torch.ones(4)).tolist() == [1.0] * 4


# -- copies -----------------------------------------------------------------------------------------


def test_only_pinned_memory_is_copied_without_waiting(slow: None) -> None:
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    assert pinned.is_pinned() and not pageable.is_pinned()
    before = counts()
    x = pinned.to(DEVICE, non_blocking=True)
    down = torch.zeros(4, pin_memory=True)
    down.copy_(x, non_blocking=True)
    assert down.eq(0).all() and counts().copies == before.copies
    torch.accelerator.synchronize()
    assert down.eq(1).all()
    x.copy_(pageable, non_blocking=True)
    x.cpu()
    torch.empty(4).copy_(x, non_blocking=True)
    assert counts().copies == before.copies + 3


def test_pinned_memory_is_not_used_again_before_its_copy(slow: None) -> None:
    source = torch.ones(256).pin_memory()
    address = source.data_ptr()
    x = source.to(DEVICE, non_blocking=True)
    del source
    other = torch.empty(256, pin_memory=True)
    assert other.data_ptr() != address
    assert x.eq(1).all()
    again = torch.empty(256, pin_memory=True)
    assert again.data_ptr() == address


def test_the_source_of_a_copy_may_not_change_before_it_runs(slow: None) -> None:
    source = torch.ones(256).pin_memory()
    x = source.to(DEVICE, non_blocking=True)
    source.fill_(5)
    assert x.eq(5).all()


def test_a_conjugate_is_conjugated_before_its_bytes_land() -> None:
    """As in torch's CUDA copy: https://github.com/pytorch/pytorch/issues/146286."""
    simulated.set_delay(SLOW)
    x = torch.tensor([1 + 2j], device=DEVICE)
    down = torch.zeros(1, dtype=torch.complex64, pin_memory=True)
    down.copy_(x.conj(), non_blocking=True)
    torch.accelerator.synchronize()
    assert down.item() == 1 + 2j
    assert x.conj().cpu().item() == 1 - 2j


@pytest.mark.parametrize(
    "there", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.expand(3, 4, 6)]
)
def test_layouts_and_types_are_copied(there: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6)
    torch.testing.assert_close(there(x).to(DEVICE).cpu(), there(x))
    torch.testing.assert_close(there(x.to(DEVICE)).cpu(), there(x))
    torch.testing.assert_close(there(x).to(DEVICE, torch.float64).cpu(), there(x).double())
    torch.testing.assert_close(there(x.to(DEVICE)).to("cpu", torch.float16), there(x).half())


# -- a lost device ----------------------------------------------------------------------------------

CAUSES = {
    "embedding": "F.embedding(index, weight)",
    "gather": "weight.gather(0, index[:, None])",
    "index": "weight[index]",
    "loss": "F.nll_loss(weight, index.expand(4))",
    "assertion": "torch._assert_async(index < 0)",
}
LOSE = """
import time
import torch.nn.functional as F
alone = torch.ones(2, device="simulated")
for number, cause in enumerate({causes}, 1):
    torch.accelerator.set_device_index(number)
    weight = torch.zeros(4, 2, device="simulated")
    index = torch.tensor([99], device="simulated")
    eval(cause)
    while True:
        try:
            torch.accelerator.current_stream().query()
            time.sleep(0.01)
        except torch.AcceleratorError:
            break
    calls = {{
        "read": lambda: weight.sum().item(),
        "launch": lambda: weight + 1,
        "synchronize": torch.accelerator.synchronize,
        "record": lambda: torch.Event("simulated").record(),
        "memory": lambda: torch.accelerator.get_memory_info(number),
        "allocate": lambda: torch.empty(1 << 20, device="simulated"),
    }}
    for _ in range(2):
        for name, call in calls.items():
            try:
                call()
                print(name, "went well after", cause)
            except torch.AcceleratorError as error:
                assert "device-side assert triggered" in str(error), error
print("another device:", alone.sum().item())
"""


def test_an_index_out_of_range_costs_the_device() -> None:
    causes = list(CAUSES.values())
    done = child(LOSE.format(causes=causes), devices=1 + len(causes))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["another device: 2.0"]
    for number in range(1, 1 + len(causes)):
        assert f"simulated:{number}: the kernel of" in done.stderr


def test_launch_blocking_raises_where_it_was_caused() -> None:
    code = """
    try:
        torch.ones(3, device="simulated")[torch.tensor([7], device="simulated")]
    except torch.AcceleratorError:
        print("at once")
    """
    assert said(code, launch_blocking=1) == ["at once"]


def test_freeing_what_another_stream_used_ends_the_process_once_the_device_is_lost() -> None:
    """As for CUDA, whose allocator records an event in a destructor."""
    code = """
    x, side = torch.ones(4, device="simulated"), torch.Stream("simulated")
    x.record_stream(side)
    try:
        x[torch.tensor([7], device="simulated")].sum().item()
    except torch.AcceleratorError:
        print("lost", flush=True)
    del x
    print("not reached")
    """
    done = child(code)
    assert done.returncode < 0 and done.stdout.splitlines() == ["lost"]


# -- processes --------------------------------------------------------------------------------------


def test_a_fork_may_use_the_device_only_if_its_parent_has_not() -> None:
    code = """
    import os
    def forked():
        child = os.fork()
        if not child:
            try:
                print(torch.ones(2, device="simulated").sum().item(), flush=True)
            except RuntimeError as error:
                print(str(error)[:47], torch.simulated._is_in_bad_fork(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    assert torch.simulated.device_count() == 2 and not torch.simulated.is_initialized()
    forked()
    torch.ones(2, device="simulated")
    forked()
    """
    assert said(code) == ["2.0", "Cannot re-initialize simulated in forked subpro True"]


def test_a_process_ends_although_its_device_is_busy() -> None:
    code = """
    x = torch.ones(2, device="simulated")
    side = torch.Stream("simulated")
    for _ in range(1000):
        x = x + 1
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        x + 1
    print("end")
    """
    assert said(code, delay_us=50_000) == ["end"]


def test_devices_can_be_hidden() -> None:
    code = """
    print(torch.accelerator.is_available())
    for k in range(torch.accelerator.device_count()):
        print(torch.simulated.get_device_properties(k).uuid)
    """
    every = said(code, devices=3)
    assert len(every) == 4 and len({*every}) == 4
    assert said(code, devices=3, visible_devices="2,0") == ["True", every[3], every[1]]
    assert said(code, devices=3, visible_devices="") == ["False"]


# -- random numbers ---------------------------------------------------------------------------------


def test_random_numbers_follow_the_seed() -> None:
    def drawn() -> list[Tensor]:
        return [
            torch.randn(5, device=DEVICE).cpu(),
            torch.rand(5, device=DEVICE).cpu(),
            torch.randint(0, 9, (5,), device=DEVICE).cpu(),
            F.dropout(torch.ones(20, device=DEVICE)).cpu(),
            torch.randperm(6, device=DEVICE).cpu(),
            torch.multinomial(torch.ones(9, device=DEVICE), 3).cpu(),
        ]

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn()))
    assert not torch.equal(first[0], second[0])
    state = simulated.get_rng_state()
    assert state.numel() == 16 and state.device.type == "cpu"
    third = drawn()
    simulated.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(third, drawn()))


def test_a_generator_of_its_own_is_used() -> None:
    g = torch.Generator(DEVICE).manual_seed(5)
    a = torch.randn(4, device=DEVICE, generator=g)
    before = simulated.get_rng_state()
    b = torch.randn(4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    assert torch.equal(a, b) and torch.equal(before, simulated.get_rng_state())


def test_the_hosts_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    F.dropout(torch.randn(50, device=DEVICE)).sum().item()
    assert torch.equal(before, torch.get_rng_state())


def test_fork_rng_keeps_the_device_state() -> None:
    before = simulated.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.randn(4, device=DEVICE)
    assert torch.equal(before, simulated.get_rng_state())


# -- training ---------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Embedding, fused attention, normalisation, and a loss by index."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss: Tensor = F.cross_entropy(self.out(self.norm(x + y)).flatten(0, 1), index.flatten())
        return loss


class _Loss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        y = y[0] if isinstance(y, tuple) else y
        loss: Tensor = y.square().mean()
        return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (_Loss(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(5, 8)),
    "convolutions": lambda: (
        _Loss(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 2, 3)),
        torch.randn(2, 3, 12, 12),
    ),
    "attention": lambda: (_Attention(), torch.randint(20, (2, 7))),
    "lstm": lambda: (_Loss(nn.LSTM(8, 16, num_layers=2)), torch.randn(5, 2, 8)),
    "gru": lambda: (_Loss(nn.GRU(8, 16)), torch.randn(5, 2, 8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_agrees_with_a_cpu_and_waits_for_nothing(name: str, kind: str) -> None:
    here, x = MODELS[name]()
    there = copy.deepcopy(here).to(DEVICE)
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in (here, there)]
    away = x.to(DEVICE)
    for _ in range(3):
        expected = step(here, optimizers[0], x)
        before = counts()
        loss = step(there, optimizers[1], away)
        after = counts()
        assert after.waits == before.waits and after.kernels > before.kernels
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        assert counts().waits == before.waits + 1
    for a, b in zip(here.parameters(), there.parameters()):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-5)


def test_autocast_casts() -> None:
    a = torch.randn(4, 4, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert F.softmax(a @ a, -1).dtype == torch.float32
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert F.linear(a, a).dtype == torch.float16


def test_a_model_is_saved_and_loaded(tmp_path: Any) -> None:
    model = nn.Linear(3, 2).to(DEVICE)
    torch.save(model.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state")
    assert loaded["weight"].device.type == DEVICE
    assert torch.equal(loaded["weight"], model.weight)


def test_what_a_stream_holds_is_seen_by_no_python() -> None:
    """The threads of the streams run no Python, so a host that waits with its lock does not block them."""
    x = torch.ones(4, device=DEVICE)
    y = torch.stack([x * k for k in range(50)]).sum()
    assert y.item() == 4 * sum(range(50))


def test_new_memory_is_filled_where_torch_is_to_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(5, device=DEVICE).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2), device=DEVICE).isnan().all()
        assert (torch.empty(5, dtype=torch.int64, device=DEVICE) == torch.iinfo(torch.int64).max).all()
    finally:
        torch.use_deterministic_algorithms(False)
