"""Copies from worker to worker: `send` and `recv`, `.to(node=)`, `copy_`.

Bytes never pass the master; gradients and failures cross too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.session import active_session
from processes import until

DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.complex32,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, -1),
    "every other": lambda x: x[::2, 1::2],
    "a row": lambda x: x[1],
    "one element": lambda x: x[1, 2],
    "nothing": lambda x: x[:0],
    "no columns": lambda x: x[:, 3:3],
    "permuted": lambda x: x.reshape(2, 2, 6).permute(2, 0, 1),
    "conjugate": lambda x: x.to(torch.complex64).mul(1 + 2j).conj(),
    "negative": lambda x: x.to(torch.complex64).mul(1 + 2j).conj().imag,
    "overlapping": lambda x: x.as_strided((3, 4), (2, 1)),
}


def local(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(24).reshape(4, 6) % 7).to(torch.float32).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_crosses_as_it_is(session: object, dtype: torch.dtype) -> None:
    x = local(dtype)
    moved = there(x).to(node=1)
    assert moved.place == dr.types.Place(1, "cpu") and moved.dtype == dtype
    assert same_bits(moved.cpu(), x)
    dr.distributed.send(moved, 0)
    into = there(torch.zeros(4, 6).to(dtype))
    assert dr.distributed.recv(into, 1) == 1
    assert same_bits(into.cpu(), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_crosses_with_the_strides_that_torch_gives(session: object, layout: str) -> None:
    here, remote = LAYOUTS[layout](local()), LAYOUTS[layout](there(local()))
    moved, twin = remote.to(node=1), here.to("meta")
    assert moved.shape == here.shape and (
        moved.stride() == twin.stride() or not here.numel()
    )  # strides of nothing float
    assert equal(moved.cpu(), here.resolve_conj().resolve_neg())
    into = there(torch.zeros_like(here).contiguous(), 1)
    dr.distributed.send(remote, 1)
    dr.distributed.recv(into)
    assert equal(into.cpu(), here.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "layout", ["transposed", "every other", "a row", "one element", "nothing", "permuted"]
)
def test_a_receive_writes_into_a_view_and_nothing_beside_it(session: object, layout: str) -> None:
    expected, remote = local(), there(local(), 1)
    value = torch.full_like(LAYOUTS[layout](expected), 9.0)
    LAYOUTS[layout](expected).copy_(value)
    dr.distributed.send(there(value), 1)
    dr.distributed.recv(LAYOUTS[layout](remote), 0)
    assert equal(remote.cpu(), expected)


def test_what_is_sent_is_what_it_was(session: object) -> None:
    x, into = there(torch.ones(1000)), there(torch.zeros(1000), 1)
    for k in range(20):
        x.fill_(float(k))
        dr.distributed.send(x, 1, tag=k)
    x.fill_(-1.0)
    for k in reversed(range(20)):
        dr.distributed.recv(into, 0, tag=k)
        assert into.unique().tolist() == [k]


def test_sends_of_one_pair_and_tag_come_in_order_and_any_source_is_the_oldest(session: object) -> None:
    into = there(torch.zeros(()))
    for k in range(3):
        dr.distributed.send(there(torch.tensor(float(k)), 1), 0)
    assert [(dr.distributed.recv(into), into.item()) for _ in range(3)] == [(1, 0.0), (1, 1.0), (1, 2.0)]


def test_a_receive_may_be_posted_first(session: object) -> None:
    into = there(torch.zeros(3), 1)
    work = dr.distributed.irecv(into, 0)
    assert not work.is_completed() and work.source_rank() == -1 and "not begun" in repr(work)
    future = work.get_future()
    with pytest.raises(dr.errors.UsageError, match="none has been issued"):
        work.wait()
    sent = dr.distributed.isend(there(torch.arange(3.0)), 1)
    assert work.wait() and sent.wait()
    assert into.tolist() == [0, 1, 2] and work.source_rank() == 0
    until(work.is_completed)
    until(future.done)
    until(sent.is_completed)
    assert future.value()[0] is into and work.is_success() and sent.is_success()


def test_a_receive_that_would_wait_for_ever_says_so(session: object) -> None:
    into = there(torch.zeros(3), 1)
    dr.distributed.send(there(torch.ones(3)), 1, tag=4)
    with pytest.raises(
        dr.errors.UsageError, match=r"nothing has been sent to node 1 cpu from node 0 with tag 5.*irecv"
    ):
        dr.distributed.recv(into, 0, tag=5)
    dr.distributed.recv(into, 0, tag=4)
    assert into.tolist() == [1, 1, 1]


def test_unequal_ends_are_refused_and_cost_nothing(session: object) -> None:
    line = sys._getframe().f_lineno + 1
    dr.distributed.send(there(torch.ones(3)), 1)
    for into in (there(torch.zeros(4), 1), there(torch.zeros(3, dtype=torch.float64), 1)):
        with pytest.raises(dr.errors.UsageError, match="one shape and dtype") as caught:
            dr.distributed.recv(into)
        assert f"{os.path.basename(__file__)}:{line}" in str(caught.value)
    into = there(torch.zeros(3), 1)
    dr.distributed.recv(into)
    assert into.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "wrong, error, text",
    [
        (lambda x, g: dr.distributed.send(x, 0), dr.errors.UsageError, "does not send to itself"),
        (lambda x, g: dr.distributed.recv(x, x.place), dr.errors.UsageError, "does not send to itself"),
        (lambda x, g: dr.distributed.send(x, 7), dr.errors.PlacementError, "no node 7"),
        (lambda x, g: dr.distributed.send(x), dr.errors.UsageError, "where to"),
        (lambda x, g: dr.distributed.send(x, group_dst=1), dr.errors.UsageError, "none was given"),
        (lambda x, g: dr.distributed.send(x, "one"), dr.errors.UsageError, "node number or a place"),
        (lambda x, g: dr.distributed.send(x, 1, tag="a"), dr.errors.UsageError, "tag must be"),
        (
            lambda x, g: dr.distributed.send(x, group=g, group_dst=5),
            dr.errors.UsageError,
            "rank of the group",
        ),
        (lambda x, g: dr.distributed.send(torch.ones(1), 1), dr.errors.PlacementError, "local tensor"),
        (lambda x, g: dr.distributed.send(3, 1), dr.errors.UsageError, "remote tensor"),
    ],
)
def test_what_cannot_be_sent(session: object, wrong: Any, error: type[Exception], text: str) -> None:
    group = dr.distributed.new_group([0, 1])
    with pytest.raises(error, match=text):
        wrong(there(torch.ones(1)), group)
    group.close()


def test_ranks_of_a_group_are_its_own_and_its_mail_too(session: object) -> None:
    group = dr.distributed.new_group([1, 0])
    a, into = there(torch.ones(2), 1), there(torch.zeros(2))
    dr.distributed.send(a, group=group, group_dst=1)
    with pytest.raises(dr.errors.UsageError, match="nothing has been sent"):
        dr.distributed.recv(into, 1)
    assert dr.distributed.recv(into, group=group, group_src=0) == 1
    work = dr.distributed.irecv(there(torch.zeros(2)), group=group)
    dr.distributed.send(a, 0, group=group)
    assert work.source_rank() == 0 and into.tolist() == [1, 1]
    group.close()


def test_a_parameter_a_module_and_a_buffer_move(session: object) -> None:
    local_module = torch.nn.BatchNorm1d(4)
    module = torch.nn.BatchNorm1d(4)
    module.load_state_dict(local_module.state_dict())
    module.to(there(torch.zeros(1), 1).device)
    assert {t.place for t in (*module.parameters(), *module.buffers())} == {dr.types.Place(1, "cpu")}
    x = torch.randn(6, 4)
    torch.testing.assert_close(module(there(x, 1)).cpu(), local_module(x))
    moved = torch.nn.Parameter(there(torch.ones(3))).to(node=1)
    assert moved.requires_grad and not moved.is_leaf and moved.place.node == 1


def test_to_another_tensors_device_and_copy_(session: object) -> None:
    a, b = there(local()), there(torch.zeros(4, 6), 1)
    assert equal(a.to(b.device).cpu(), local()) and equal(a.to(b).cpu(), local())
    assert equal(a.to(b.device, torch.int64).cpu(), local(torch.int64))
    b.t().copy_(a.t() + 1)
    assert equal(b.cpu(), local() + 1)
    b[:2].copy_(a[0])
    assert equal(b.cpu()[0], local()[0]) and equal(b.cpu()[2], local()[2] + 1)
    c = there(torch.zeros(4, 6, dtype=torch.int32), 1)
    c.copy_(a)
    assert equal(c.cpu(), local(torch.int32))


def test_gradients_travel_back(session: object) -> None:
    x = local().double()
    leaf = there(x).requires_grad_()
    into = there(torch.zeros(6, 4, dtype=torch.float64), 1)
    dr.distributed.send((leaf * 3).t(), 1)
    dr.distributed.recv(into, 0)
    back = (into * into).to(node=0)
    (back.sum() + (leaf.to(node=1) ** 3).sum().to(node=0)).backward()
    assert leaf.grad is not None and leaf.grad.place.node == 0
    torch.testing.assert_close(leaf.grad.cpu(), 18 * x + 3 * x**2)
    with torch.no_grad():
        quiet = there(torch.zeros(4, 6, dtype=torch.float64), 1)
        dr.distributed.send(leaf, 1)
        dr.distributed.recv(quiet)
    assert not quiet.requires_grad


def test_a_leaf_that_requires_grad_is_not_written_and_the_message_stays(session: object) -> None:
    dr.distributed.send(there(torch.ones(3)), 1)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        dr.distributed.recv(there(torch.zeros(3), 1).requires_grad_())
    into = there(torch.zeros(3), 1)
    dr.distributed.recv(into)
    assert into.sum().item() == 3


def test_poison_crosses_with_its_first_cause_and_line(session: object) -> None:
    x = there(torch.arange(3.0))
    line = sys._getframe().f_lineno + 1
    poisoned = x[there(torch.tensor([9]))]
    into = there(torch.zeros(1), 1)
    dr.distributed.send(poisoned, 1)
    dr.distributed.recv(into)
    for broken in (poisoned.to(node=1), into, into.to(node=0) + 1):
        with pytest.raises(IndexError, match="out of bounds") as caught:
            broken.cpu()
        assert f"{os.path.basename(__file__)}:{line}" in str(caught.value) and "on node 0" in str(
            caught.value
        )
    assert x.to(node=1).tolist() == [0, 1, 2]


def test_poison_without_elements_crosses_too(session: object) -> None:
    nothing = there(torch.arange(3.0))[there(torch.tensor([9]))][:0]
    into = there(torch.zeros(0), 1)
    into.copy_(nothing)
    for broken in (nothing.to(node=1), into):
        with pytest.raises(IndexError, match="out of bounds"):
            broken.cpu()


def test_copies_on_streams_wait_for_what_they_read(session: object) -> None:
    side, other = dr.Stream(0), dr.Stream(1)
    with dr.node(0):
        x = torch.zeros(200, 200, device=REMOTE)
    results = []
    for _ in range(30):
        with dr.stream(side):
            x.add_(1.0)
        with dr.stream(other):
            results.append(x.to(node=1)[0, 0] * 2)
        x.add_(1.0)
    assert [r.item() for r in results] == [2.0 * (2 * k + 1) for k in range(30)]


def test_the_bytes_do_not_pass_the_master(session: object) -> None:
    channel = active_session().channel
    x, into = torch.zeros(16 << 20, device=REMOTE), there(torch.ones(1), 1).expand(16 << 20).clone()
    dr.synchronize()
    before = channel.sent_bytes, channel.received_bytes
    y = x.to(node=1)
    dr.distributed.send(x, 1)
    dr.distributed.recv(into)
    assert (y.sum() + into.sum()).item() == 0
    sent, received = channel.sent_bytes - before[0], channel.received_bytes - before[1]
    assert 0 < sent < 50_000 and 0 < received < 50_000


def test_the_counters_count(session: object) -> None:
    channel = active_session().channel
    before = channel.sent_bytes, channel.received_bytes
    loan, active_session().shared.take = active_session().shared.take, lambda size: None  # past shared memory
    try:
        assert torch.ones(1 << 18).to(REMOTE).cpu().sum().item() == 1 << 18
    finally:
        active_session().shared.take = loan
    assert channel.sent_bytes - before[0] > 1 << 20 and channel.received_bytes - before[1] > 1 << 20


def test_a_copy_that_does_not_fit_leaves_copies_usable(session: object) -> None:
    """A member without memory for its part must not keep the other waiting, or break copies for good."""
    huge = there(torch.ones(1)).expand(1 << 46)
    first = there(torch.ones(2)).to(node=1)
    moved = huge.to(node=1)
    with pytest.raises((RuntimeError, dr.errors.NodeFailed), match="allocate memory"):
        moved[0].item()
    with pytest.raises(dr.DistruntimeError, match="allocate memory"):
        dr.synchronize()
    assert first.tolist() == [1, 1]
    assert there(torch.ones(2)).to(node=1).tolist() == [1, 1]
    assert huge[0].item() == 1


def test_several_devices_of_one_node(fresh_session: Any) -> None:
    fresh_session(world_size=2, simulate_cuda=2)
    x = torch.arange(6.0, device=REMOTE)
    assert x.place == dr.types.Place(0, "cuda:0")
    for place in (
        dr.types.Place(0, "cuda:1"),
        dr.types.Place(0, "cpu"),
        dr.types.Place(1, "cuda:1"),
        dr.types.Place(1, "cpu"),
    ):
        into = torch.zeros(6, device=REMOTE).to(place)
        dr.distributed.send(x, place)
        assert dr.distributed.recv(into) == 0
        assert into.place == place and into.tolist() == x.tolist()
        dr.distributed.send(into, x.place)
        back = torch.zeros_like(x)
        assert dr.distributed.recv(back, place) == place.node and back.tolist() == x.tolist()
