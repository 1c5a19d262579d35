"""Streams, copies, memory and figures of a worker whose device lags behind it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import device_streams
import distruntime as dr
from agree import REMOTE
from on_device import counts, set_delay

Workers = list[list[dr.types.Place]]


def busy(kernels: int = 60) -> Tensor:
    """Keep the current stream of the current device busy."""
    x = torch.ones(4, device=REMOTE)
    for _ in range(kernels):
        x = x + 1
    return x


# -- streams and events -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1])
def test_a_stream_is_side_by_side_with_another(workers: Workers, k: int) -> None:
    # Two seconds, of which the rest is over as soon as the delay is.
    set_delay(0, 20_000)
    device_streams.two_run_side_by_side(workers[0][k], partial(busy, 100), partial(set_delay, 0, 0))


@pytest.mark.parametrize("implicit", [True, False])
def test_reads_and_writes_of_two_streams_come_in_order(
    device: dr.types.Place, implicit: bool, slow: None
) -> None:
    device_streams.reads_and_writes_come_in_order(device, partial(busy, 20), implicit, 1 << 10, rounds=8)


def test_without_waits_two_streams_race(device: dr.types.Place, slow: None) -> None:
    """The device shows a race: otherwise nothing here shows that there is none."""
    dr.set_implicit_waits(False)
    try:
        one, two = dr.Stream(device), dr.Stream(device)
        x = torch.zeros(1 << 10, device=device)
        dr.synchronize()
        with dr.stream(one):
            busy(100)
            x.add_(1)
        with dr.stream(two):
            y = x * 1
        with dr.stream(two):
            assert y.sum().item() == 0
        dr.synchronize()
    finally:
        dr.set_implicit_waits(True)


def test_freed_memory_is_not_used_while_another_stream_reads_it(device: dr.types.Place, slow: None) -> None:
    device_streams.freed_memory_is_kept_while_it_is_read(device, partial(busy, 20), 1 << 12, rounds=15)


def test_a_fetch_sees_the_value_of_its_moment(device: dr.types.Place, slow: None) -> None:
    device_streams.a_fetch_sees_the_value_of_its_moment(device, busy, 1 << 12)


@pytest.mark.parametrize("k", [0, 1])
def test_elapsed_time_is_that_of_the_device_of_the_events(workers: Workers, k: int) -> None:
    """B6: a stamp of a second device was made on the first."""
    with dr.on(workers[0][k]):
        busy(3).sum().item()
        # Twenty kernels of 20 ms each. Nobody takes as long to launch them.
        set_delay(0, 20_000)
        device_streams.events_time_the_current_stream(partial(busy, 20), least=390)


def test_an_event_is_seen_by_who_goes_on_issuing(device: dr.types.Place) -> None:
    """C5: a poll found an event that was only then recorded, behind all that had been issued."""
    set_delay(0, 100)
    event = dr.Event()
    busy(5)
    event.record()
    polls = 0
    while not event.query() and polls < 300:
        busy(40)
        polls += 1
    assert polls < 300


def test_a_device_waits_for_another_workers_event(workers: Workers, slow: None) -> None:
    here, there = dr.Stream(workers[0][0]), dr.Stream(workers[1][1])
    device_streams.a_stream_waits_for_an_event_of_another(here, there, partial(busy, 200))


# -- copies and staging -----------------------------------------------------------------------------

SIZES = [1, 5, 1000, 1 << 14, (1 << 14) + 1, (1 << 18) - 1, 1 << 20, (1 << 22) + 7]


@pytest.mark.parametrize("count", SIZES)
def test_a_tensor_goes_there_and_comes_back(device: dr.types.Place, count: int) -> None:
    local = torch.randn(count)
    expected = local.clone()
    x = local.to(REMOTE)
    local.zero_()
    assert x.place == device and torch.equal(x.cpu(), expected)
    assert torch.equal((x * 2).cpu(), expected * 2)


def test_uploads_in_a_row_stay_apart(device: dr.types.Place, slow: None) -> None:
    """A buffer of the host is filled again only when the device has read it."""
    local, there = torch.empty(20_000), []
    for k in range(60):
        there.append(local.fill_(k).to(REMOTE))
    assert [float(x.max()) for x in there] == [float(x.min()) for x in there] == list(range(60))


def test_downloads_in_a_row_stay_apart(device: dr.types.Place, slow: None) -> None:
    futures = []
    for k in range(40):
        x = torch.full((5000,), float(k), device=REMOTE)
        futures.append(dr.fetch_async(x))
        del x
    found = [future.result(timeout=60) for future in futures]
    assert [x.unique().tolist() for x in found] == [[float(k)] for k in range(40)]


def test_a_conjugate_is_read_conjugated(device: dr.types.Place, slow: None) -> None:
    """B5: torch conjugates the copy on the host at once, before the device has written it."""
    x = torch.tensor([1 + 2j, 3 - 1j]).to(REMOTE)
    assert x[0].conj().item() == 1 - 2j
    assert x.conj().tolist() == [1 - 2j, 3 + 1j]
    assert dr.fetch(x.conj()).tolist() == [1 - 2j, 3 + 1j]
    assert dr.fetch(x.conj().imag).tolist() == [-2.0, 1.0]
    assert torch.equal(x.conj().cpu(), torch.tensor([1 - 2j, 3 + 1j]))


@pytest.mark.parametrize(
    ("source", "target"), [((0, 0), (0, 1)), ((0, 1), (0, 0)), ((0, 0), (1, 1)), ((1, 1), (0, 1))]
)
def test_a_copy_between_streams_of_two_devices(
    workers: Workers, source: tuple[int, int], target: tuple[int, int], slow: None
) -> None:
    a, b = workers[source[0]][source[1]], workers[target[0]][target[1]]
    one, two = dr.Stream(a), dr.Stream(b)
    for k in range(6):
        with dr.stream(one):
            x = busy(30) * 0 + k
        with dr.stream(two):
            z = x.to(b) + 0
        del x
        with dr.stream(one):
            junk = [torch.full((4,), -1.0, device=REMOTE) for _ in range(8)]
        assert z.place == b and z.tolist() == [k] * 4
        del junk


def test_views_across_streams_outlive_what_they_are_of(device: dr.types.Place) -> None:
    set_delay(0, 100)
    streams = [dr.Stream(device) for _ in range(3)]
    for k in range(30):
        one, two, three = (streams[(k * step + step) % 3] for step in (1, 2, 5))
        with dr.stream(one):
            x = torch.full((256,), float(k), device=REMOTE)
            v = x[16:]
        with dr.stream(two):
            busy(10)
            w = v.view(-1, 16)
        with dr.stream(three):
            y = w * 2
        del x, v
        with dr.stream(one):
            junk = [torch.full((256,), -1.0, device=REMOTE) for _ in range(4)]
        with dr.stream(two):
            z = w + y
        del w, y
        assert z.cpu().unique().tolist() == [3.0 * k]
        del junk


# -- autograd's own streams -------------------------------------------------------------------------

_ON = {
    "default": lambda _: contextlib.nullcontext(),
    "S": lambda s: dr.stream(s[0]),
    "U": lambda s: dr.stream(s[1]),
}
_WAYS = [
    ("default", "default", "default"), ("S", "S", "S"), ("S", "default", None), ("S", "default", "S"),
    ("S", "U", "S"), ("default", "S", "default"), ("default", "S", None),
]  # fmt: skip
TRIALS = 30


@pytest.mark.parametrize(("forward", "backward", "after"), _WAYS)
def test_attention_forward_on_one_stream_and_backward_on_another(
    device: dr.types.Place, forward: str, backward: str, after: str | None
) -> None:
    """B3: the gradients' memory is the forward's stream's, and another stream copies them."""
    set_delay(0, 100)
    streams = [dr.Stream(device), dr.Stream(device)]

    def on(name: str) -> AbstractContextManager[object]:
        return _ON[name](streams)  # type: ignore[no-any-return, no-untyped-call]

    given = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    local = [t.clone().requires_grad_() for t in given]
    F.scaled_dot_product_attention(*local, is_causal=True).square().sum().backward()
    for _ in range(TRIALS):
        remote = [t.to(REMOTE).requires_grad_() for t in given]
        with on(forward):
            out = F.scaled_dot_product_attention(*remote, is_causal=True).square().sum()
        with on(backward):
            out.backward()
        junk = []
        if after is not None:
            with on(after):
                junk = [torch.full((2, 4, 16, 8), 7.0, device=REMOTE) for _ in range(12)]
        for here, there in zip(local, dr.fetch([t.grad for t in remote])):
            torch.testing.assert_close(there, here.grad)
        del junk


@pytest.mark.parametrize(
    ("forward", "backward", "after"), [("S", "default", "S"), ("default", "S", "default")]
)
def test_a_recurrent_layer_forward_on_one_stream_and_backward_on_another(
    device: dr.types.Place, forward: str, backward: str, after: str
) -> None:
    set_delay(0, 50)
    streams = [dr.Stream(device), dr.Stream(device)]
    here, given = torch.nn.LSTM(8, 16, num_layers=2), torch.randn(5, 3, 8)
    there = torch.nn.LSTM(8, 16, num_layers=2)
    there.load_state_dict(here.state_dict())
    there.to(REMOTE)
    here(given)[0].square().sum().backward()
    expected = [p.grad for p in here.parameters()]
    for _ in range(5):
        there.zero_grad()
        x = given.to(REMOTE)
        with _ON[forward](streams):  # type: ignore[no-untyped-call]
            out = there(x)[0].square().sum()
        with _ON[backward](streams):  # type: ignore[no-untyped-call]
            out.backward()
        with _ON[after](streams):  # type: ignore[no-untyped-call]
            junk = [torch.full((64, 16), 7.0, device=REMOTE) for _ in range(20)]
        for got, grad in zip(dr.fetch([p.grad for p in there.parameters()]), expected):
            torch.testing.assert_close(got, grad)
        del junk


def test_a_function_of_two_devices_with_a_stream_each(workers: Workers, slow: None) -> None:
    a, b = workers[0]
    one, two = dr.Stream(a), dr.Stream(b)

    def second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.add_(x.sum().to(y.device) * 0 + 1)

    add = dr.remote(second, writes=(1,))
    for k in range(6):
        with dr.stream(one):
            x = busy(3) * 0
        with dr.stream(two):
            y = busy(60) * 0 + k
        with dr.stream(one):
            add(x, y)
        with dr.stream(two):
            v = y * 1
        assert v.tolist() == [k + 1] * 4


# -- groups and meshes ------------------------------------------------------------------------------


def test_a_group_of_two_devices_of_one_worker_with_a_stream_each(workers: Workers, slow: None) -> None:
    """B4: one thread runs the operation for both members, and each on its own device's stream."""
    a, b = workers[0]
    group = dr.distributed.new_group([a, b])
    one, two = dr.Stream(a), dr.Stream(b)
    for k in range(10):
        with dr.stream(one):
            x = busy(3) * 0 + k
        with dr.stream(two):
            y = busy(60) * 0 + 1000
        with dr.stream(two), dr.stream(one):
            dr.distributed.all_reduce([x, y], group=group)
        with dr.stream(two):
            v = y * 1
        with dr.stream(one):
            u = x * 1
        assert (u[0].item(), v[0].item()) == (1000 + k, 1000 + k)
    group.close()


def test_a_group_of_four_devices_of_two_workers(workers: Workers, slow: None) -> None:
    places = [place for row in workers for place in row]
    group = dr.distributed.new_group(places)
    for k in range(5):
        values = []
        for rank, place in enumerate(places):
            with dr.on(place):
                values.append(busy(10 * rank) * 0 + 10**rank + k)
        dr.distributed.all_reduce(values, group=group)
        assert [v.tolist() for v in values] == [[1111.0 + 4 * k] * 4] * 4
    group.close()


def test_a_mesh_of_four_devices(workers: Workers, slow: None) -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = dr.init_device_mesh("accelerator", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w = torch.randn(8, 6), torch.randn(6, 4)
    got = distribute_tensor(x.to(mesh.device), mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        w.to(mesh.device), mesh, [Replicate(), Shard(1)]
    )
    torch.testing.assert_close(got.full_tensor().cpu(), x @ w)


# -- random numbers ---------------------------------------------------------------------------------


def test_random_numbers_follow_the_seed_on_every_device(workers: Workers) -> None:
    for place in [place for row in workers for place in row]:
        draws = []
        for _ in range(2):
            torch.manual_seed(7)
            draws.append(torch.randn(100, device=place).cpu())
        assert torch.equal(*draws)
        assert not torch.equal(draws[0], torch.randn(100, device=place).cpu())


def test_a_seed_gives_what_the_device_itself_draws(device: dr.types.Place) -> None:
    """Beside it: a process that uses the device without distruntime."""
    code = (
        "import torch; torch.manual_seed(7); x = torch.randn(5, device='simulated'); "
        "y = torch.rand(3, device='simulated'); print([*x.tolist(), *y.tolist()])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    alone = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    torch.manual_seed(7)
    x, y = torch.randn(5, device=device), torch.rand(3, device=device)
    assert str([*x.tolist(), *y.tolist()]) == alone.stdout.strip()


def test_a_random_state_travels(workers: Workers) -> None:
    a, b = workers[0][0], workers[1][1]
    torch.manual_seed(3)
    remote = torch.get_device_module(REMOTE)
    state = remote.get_rng_state(a.device)
    assert state.numel() == 16
    drawn = torch.rand(10, device=a).cpu()
    remote.set_rng_state(state, a.device)
    assert torch.equal(torch.rand(10, device=a).cpu(), drawn)
    remote.set_rng_state(state.cpu(), b.device)
    assert torch.equal(torch.rand(10, device=b).cpu(), drawn)


# -- checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_a_checkpoint_has_the_values_of_its_moment(
    device: dr.types.Place, tmp_path: Path, async_op: bool, slow: None
) -> None:
    side = dr.Stream(device)
    with dr.stream(side):
        x = busy(60)[0] * 0 + torch.zeros(64, 64, device=REMOTE) + 1
    saving = dr.save({"x": x, "turned": x.t(), "n": torch.tensor(3)}, tmp_path, async_op=async_op)
    with dr.stream(side):
        x += 1
    if saving is not None:
        saving.wait()
    found = dr.load(tmp_path)
    assert found["x"].place == device and found["x"].unique().tolist() == [1.0]
    assert found["turned"].stride() == (1, 64) and found["n"].item() == 3
    assert dr.load(tmp_path, place=dr.place(0, "cpu"))["x"].unique().tolist() == [1.0]


def test_weights_of_a_file_come_to_a_device_that_safetensors_has_no_name_for(
    workers: Workers, tmp_path: Path
) -> None:
    weights = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(3)}
    save_file(weights, tmp_path / "weights.safetensors")
    for place in workers[1]:
        found = dr.load(tmp_path, node=place)
        assert {name: tensor.place for name, tensor in found.items()} == {"a": place, "b": place}
        assert found["a"].cpu().equal(weights["a"]) and found["b"].cpu().equal(weights["b"])
    mesh = dr.init_device_mesh("accelerator", (4,))
    shared = dr.load(tmp_path, node=mesh, placements={"a": [Shard(0)], "b": [Replicate()]})
    assert shared["a"].full_tensor().cpu().equal(weights["a"])


# -- memory -----------------------------------------------------------------------------------------


def test_no_memory_is_out_of_memory_error_and_names_the_holders(device: dr.types.Place) -> None:
    gc.collect()
    kept = torch.ones(1 << 20, device=REMOTE)
    huge = torch.empty(1 << 30, device=REMOTE)
    dependent = huge + 1
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        dependent[0].item()
    held = [line for line in str(caught.value).splitlines() if line.startswith("  held there")]
    assert len(held) == 1, str(caught.value)
    assert "4.0 MiB by" in held[0] and "kept = torch.ones" in held[0]
    assert kept.sum().item() == 1 << 20
    del huge, dependent
    fits = torch.ones(1 << 22, device=REMOTE)
    assert fits.sum().item() == 1 << 22


def test_a_backward_that_runs_out_of_memory_can_be_tried_again(device: dr.types.Place) -> None:
    gc.collect()
    # The forward takes 168 of 256 MiB, and the backward two pieces of 56 at once.
    x = torch.ones(14 << 20, device=REMOTE, requires_grad=True)
    y = x.exp().exp()
    loss = y.sum()
    loss.backward()
    with pytest.raises(torch.OutOfMemoryError):
        assert x.grad is not None
        x.grad.sum().item()
    del y, loss
    x.grad = None
    gc.collect()
    small = x[: 1 << 20]
    small.exp().sum().backward()
    assert x.grad is not None
    assert abs(x.grad.sum().item() / (1 << 20) - 2.71828) < 1e-3


def test_memory_shows_what_the_allocator_holds(device: dr.types.Place) -> None:
    gc.collect()
    dr.synchronize()
    before = next(d for d in dr.memory().devices if d.place == device)
    x = torch.ones(1 << 22, device=REMOTE)
    dr.synchronize()
    memory = dr.memory()
    after = next(d for d in memory.devices if d.place == device)
    assert after.held - before.held == 4 << 22 and after.values - before.values == 1
    assert after.allocated - before.allocated >= 4 << 22
    assert after.allocated <= after.reserved <= after.total == 1 << 28
    assert "allocated  reserved" in repr(memory).splitlines()[0] and x.dim() == 1


# -- many reads -------------------------------------------------------------------------------------


def test_a_fetch_of_many_values_starts_few_threads(device: dr.types.Place) -> None:
    """C4: a thread for each value of 1,500."""
    state = {f"w{k}": torch.full((64,), float(k), device=REMOTE) for k in range(1500)}
    dr.synchronize()
    tasks = f"/proc/{dr.nodes()[0].pid}/task"
    before, most, over = len(os.listdir(tasks)), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], len(os.listdir(tasks)))

    watching = threading.Thread(target=look)
    watching.start()
    set_delay(0, 100)
    x = busy(300)
    found = dr.fetch(state)
    over.set()
    watching.join()
    assert all(found[f"w{k}"][0] == k for k in range(1500)) and x.dim() == 1
    assert most[0] <= before + 8


# -- what waits -------------------------------------------------------------------------------------


def test_reading_one_number_waits_once(device: dr.types.Place) -> None:
    set_delay(0, 5000)
    x = torch.ones(3, device=REMOTE)
    y = x + 1
    before = counts()
    assert y[0].item() == 2.0
    after = counts().since(before)
    assert (after.waits, after.kernels) == (1, 1)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_read_of_one_device_does_not_wait_for_another(workers: Workers, as_text: bool) -> None:
    """The default streams of both are one stream of the program, which has one mark for both."""
    one, two = workers[0]
    set_delay(0, 20_000)
    with dr.on(two):
        y = busy(200)
    x, done = torch.ones(2, device=one) * 3, dr.Event()
    done.record()
    assert "[3., 3.]" in repr(x) if as_text else x.tolist() == [3, 3]
    assert not done.query()
    set_delay(0, 0)
    assert y.tolist() == [201] * 4


def test_nothing_that_is_issued_waits(device: dr.types.Place) -> None:
    local = torch.randn(64, 64)
    before = counts()
    x = local.to(REMOTE)
    y = torch.arange(64, device=REMOTE) + torch.eye(64, device=REMOTE)
    z = F.one_hot(torch.arange(4, device=REMOTE), 4)
    w = F.layer_norm(x @ y, (64,)).softmax(-1)
    assert counts().since(before).waits == 0
    assert w.shape == (64, 64) and z.shape == (4, 4)


def test_what_a_mesh_draws_waits_for_nothing(workers: Workers) -> None:
    """Each member of a sharded tensor is seeded before and after, and a seed was read from the device."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dr.init_device_mesh("accelerator", (4,))
    x = distribute_tensor(torch.ones(64, 8).to(mesh.device), mesh, [Shard(0)])
    F.dropout(x, 0.5)
    dr.synchronize()
    before = [counts(node) for node in range(2)]
    kept = F.dropout(x, 0.5)
    mesh.manual_seed(3, distinct=True)
    assert [counts(node).since(before[node]).waits for node in range(2)] == [0, 0]
    parts = (dr.fetch(kept) != 0).chunk(4)
    assert all(not torch.equal(parts[0], part) for part in parts[1:])


def test_counts_are_of_this_worker(workers: Workers) -> None:
    before = counts(1)
    torch.ones(3, device=workers[0][0]) + 1
    assert counts(1).since(before).kernels == 0
    torch.ones(3, device=workers[1][0]) + 1
    assert counts(1).since(before).kernels == 2
