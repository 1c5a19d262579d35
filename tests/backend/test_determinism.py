"""torch's switch for deterministic algorithms reaches the workers in order, and they say what a CPU says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def put(device: str) -> torch.Tensor:
    index, value = torch.tensor([0, 0], device=device), torch.ones(2, device=device)
    return torch.zeros(4, device=device).put_(index, value)


@pytest.mark.slow(reason="starts a program of its own, 5 s")
def test_an_operator_without_a_deterministic_kernel_is_refused_as_here(session: object) -> None:
    before = put(REMOTE)
    torch.use_deterministic_algorithms(True)
    within = put(REMOTE)
    torch.use_deterministic_algorithms(False)
    after = put(REMOTE)
    assert before.tolist() == after.tolist() == [1, 0, 0, 0]
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        within.cpu()


@pytest.mark.parametrize("switch", [True, "error"])
@pytest.mark.slow(reason="starts programs that import torch, 4 s")
def test_both_of_torchs_functions_are_followed(session: object, switch: Any) -> None:
    if switch is True:
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode(switch)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        put(REMOTE).cpu()


def test_what_is_new_is_filled_as_here(session: object) -> None:
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.float32, torch.int64):
        filled = torch.empty(4, dtype=dtype, device=REMOTE).cpu()
        assert torch.equal(filled, torch.empty(4, dtype=dtype)) or filled.isnan().all()
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = dr.config(node=0)
    assert found is not None and not found[0].fill_uninitialized_memory


def test_a_meta_kernel_does_not_speak_for_cuda(session: object) -> None:
    torch.use_deterministic_algorithms(True)
    sums = [torch.histc(torch.ones(3, device=d), bins=7, min=0, max=3).sum().item() for d in (REMOTE, "cpu")]
    assert sums == [3, 3]
    with pytest.raises(RuntimeError, match="_histc_cuda"):  # a meta tensor of the user's is as it was
        torch.histc(torch.ones(3, device="meta"), min=0, max=3)


def test_warn_only_is_forwarded(session: object) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = dr.config()
    assert found is not None
    assert all(one.use_deterministic_algorithms and one.warn_only for one in found.values())
    torch.use_deterministic_algorithms(False)
    found = dr.config()
    assert found is not None
    assert not any(one.use_deterministic_algorithms or one.warn_only for one in found.values())


def test_what_changes_nothing_is_not_forwarded(session: object) -> None:
    """Dynamo calls this after each compilation, and would undo what `dr.config` has set."""
    dr.config(use_deterministic_algorithms=True)
    try:
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            put(REMOTE).cpu()
    finally:
        dr.config(use_deterministic_algorithms=False)


@pytest.mark.slow(reason="starts three sessions in a program of its own, 8 s")
def test_a_new_session_and_a_new_worker_are_told(fresh_session: Callable[..., Any]) -> None:
    torch.use_deterministic_algorithms(True)
    with fresh_session(world_size=2):
        dr.restart(1, force=True)
        found = dr.config()
        assert found is not None and all(one.use_deterministic_algorithms for one in found.values())
    with fresh_session(world_size=1):
        torch.use_deterministic_algorithms(False)
        found = dr.config()
        assert found is not None and not found[0].use_deterministic_algorithms
