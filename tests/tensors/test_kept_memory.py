"""Large tensors live in memory that is used again: never while somebody still holds it."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session
from processes import StruckWhileWaiting, stopped

COUNT, ELEMENTS = 20, 1 << 18  # a mebibyte each: above every threshold for shared and kept memory


def test_what_is_alive_is_never_overwritten(session: Session) -> None:
    here = [torch.randn(ELEMENTS) + k for k in range(COUNT)]
    there = [x.to("remote") for x in here]
    for step in range(3 * COUNT):
        k = step % COUNT
        here[k] = torch.randn(ELEMENTS) - step
        there[k] = here[k].to("remote")
        look = (step * 7) % COUNT
        assert torch.equal(there[look].cpu(), here[look])
    back = [x.cpu() for x in there]
    views = [x[10:20] for x in back]
    del there
    gc.collect()
    again = [x.to("remote").cpu() for x in here]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(here, back, again))
    del back
    gc.collect()
    more = [(x + 1).to("remote").cpu() for x in here]
    assert all(torch.equal(v, x[10:20]) for v, x in zip(views, here))
    assert all(torch.equal(m, x + 1) for m, x in zip(more, here))


def test_a_fetched_tensor_is_its_owners_own(session: Session) -> None:
    remote = torch.arange(float(ELEMENTS)).to("remote")
    first, second = remote.cpu(), remote.cpu()
    first.zero_()
    assert torch.equal(second, torch.arange(float(ELEMENTS))) and torch.equal(remote.cpu(), second)


def test_over_a_network_too(session: Session) -> None:
    nodes = [(node, node.shared) for node in session.nodes]
    try:
        for node, _ in nodes:
            node.shared = False
        test_what_is_alive_is_never_overwritten(session)
        test_a_fetched_tensor_is_its_owners_own(session)
    finally:
        for node, shared in nodes:
            node.shared = shared


def test_when_there_is_no_more_shared_memory(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["distruntime.wire.shared"], "_MOST", 0)
    monkeypatch.setattr(session.shared, "_idle", [])
    here = torch.randn(3 * ELEMENTS)
    back = here.to("remote").cpu()
    assert torch.equal(back, here)
    back.add_(1)
    assert torch.equal(back, here + 1) and torch.equal(here.to("remote")[1:].cpu(), here[1:])


def _lent(session: Session) -> int:
    """Segments of shared memory that a transfer has in hand."""
    return len(session.shared._all) - len(session.shared._idle)


def test_a_transfer_that_fails_gives_its_shared_memory_back(session: Session) -> None:
    before = _lent(session)
    lost = torch.ones(4, 2 * ELEMENTS, device="remote")[torch.tensor([9], device="remote")]
    for read in (lost.cpu, lambda: dr.fetch([lost, torch.ones(2 * ELEMENTS, device="remote")])):
        with pytest.raises(IndexError):
            read()
        gc.collect()
        assert _lent(session) == before


def test_a_read_that_control_c_ends_gives_its_shared_memory_back_once_the_worker_has_answered(
    session: Session,
) -> None:
    x = torch.ones(2 * ELEMENTS, device="remote")  # larger than what a reply carries in itself
    assert x.cpu()[0] == 1
    before = _lent(session)
    with stopped(dr.nodes()[0].pid):
        with pytest.raises(KeyboardInterrupt), StruckWhileWaiting():
            x.cpu()
        gc.collect()
        assert _lent(session) == before + 1, "the worker may write there yet"
    dr.synchronize()
    assert (x + 1).cpu()[0] == 2
    gc.collect()
    assert _lent(session) == before


@pytest.mark.parametrize(
    "channels", [16, 68, 120, 240]
)  # weights of 17, 74, 131 and 261 KB: in the log, in a frame, in shared memory
def test_a_weight_gives_the_last_bits_that_it_gives_here(session: Session, channels: int) -> None:
    """Kernels sum in another order over addresses that are not multiples of 64."""
    x, weight = torch.randn(2, 272, 1, 1), torch.randn(channels, 272, 1, 1)
    for k in range(4):  # a frame may begin at such an address by chance
        piece = weight[k:].clone()
        there = torch.nn.functional.conv2d(x.to("remote"), piece.to("remote"))
        assert torch.equal(there.cpu(), torch.nn.functional.conv2d(x, piece))
