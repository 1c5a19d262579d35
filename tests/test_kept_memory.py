"""Large tensors live in memory that is used again: never while somebody still holds it."""

from __future__ import annotations

import gc

import torch

import distruntime as dr

COUNT, ELEMENTS = 20, 1 << 18  # a mebibyte each: above every threshold for shared and kept memory


def test_what_is_alive_is_never_overwritten(session: dr.Session) -> None:
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


def test_a_fetched_tensor_is_its_owners_own(session: dr.Session) -> None:
    remote = torch.arange(float(ELEMENTS)).to("remote")
    first, second = remote.cpu(), remote.cpu()
    first.zero_()
    assert torch.equal(second, torch.arange(float(ELEMENTS))) and torch.equal(remote.cpu(), second)


def test_over_a_network_too(session: dr.Session) -> None:
    nodes = [(node, node.shared) for node in session.nodes]
    try:
        for node, _ in nodes:
            node.shared = False
        test_what_is_alive_is_never_overwritten(session)
        test_a_fetched_tensor_is_its_owners_own(session)
    finally:
        for node, shared in nodes:
            node.shared = shared
