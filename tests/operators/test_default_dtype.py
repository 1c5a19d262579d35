"""torch's default dtype is followed: a worker gives what this process would give, for all who share it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.places import Places

OTHERS = [torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CALLS: dict[str, Callable[[str], Any]] = {
    "empty": lambda d: torch.empty(3, device=d).fill_(1),
    "zeros": lambda d: torch.zeros(3, device=d),
    "ones": lambda d: torch.ones(3, device=d),
    "full": lambda d: torch.full((3,), 2.5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "arange": lambda d: torch.arange(0.0, 2.0, 0.3, device=d),
    "arange of integers": lambda d: torch.arange(3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(5, False, 3.0, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.5, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "tensor": lambda d: torch.tensor([1.5], device=d),
    "division": lambda d: torch.arange(7, device=d) / 3,
    "a float": lambda d: torch.arange(7, device=d) * 2.3,
    "an imaginary number": lambda d: torch.view_as_real(torch.arange(7, device=d).double() * 1j),
    "a power": lambda d: torch.pow(2.1, torch.arange(7, device=d)),
    "a root": lambda d: torch.arange(7, device=d).sqrt(),
    "of truth values": lambda d: (torch.arange(7, device=d) > 3).exp(),
    "where of numbers": lambda d: torch.where(torch.arange(7, device=d) > 3, 1.1, 2.2),
    "where of a tensor": lambda d: torch.where(torch.arange(7, device=d) > 3, torch.arange(7, device=d), 2.2),
    "a comparison": lambda d: torch.arange(300, device=d) == 257.0,
    "out=": lambda d: torch.div(torch.arange(7, device=d), 3, out=torch.zeros(7, dtype=torch.float64).to(d)),
    "a list": lambda d: torch._foreach_mul([torch.arange(7, device=d), torch.ones(2).double().to(d)], 2.3),
    "one that is float already": lambda d: torch.ones(7).to(d) / torch.arange(1, 8, device=d),
    "in place": lambda d: torch.ones(7, dtype=torch.float64).to(d).div_(torch.arange(1, 8, device=d)),
    "what stays whole": lambda d: torch.arange(7, device=d).masked_fill(torch.arange(7, device=d) > 3, 2.0),
    "a layer": lambda d: torch.nn.Linear(3, 4, device=d).weight.detach() * 0,
}


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got.dtype == expected.dtype == got.cpu().dtype and torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_follows_the_default_whatever_has_run_before(session: object, call: Any) -> None:
    for dtype in (torch.float32, *OTHERS, torch.float32, *OTHERS):
        with default(dtype):
            for _ in range(3):  # new, being confirmed, and known
                assert same(call(REMOTE), call("cpu")), dtype
                dr.synchronize()


def test_a_call_in_flight_keeps_the_default_that_it_was_issued_under(session: object) -> None:
    x, made = torch.arange(5, device=REMOTE), []
    for dtype in (*OTHERS, torch.float32) * 3:
        with default(dtype):
            made.append((dtype, x / 4, torch.zeros(2, device=REMOTE)))
    for dtype, quarters, zeros in made:
        assert quarters.dtype == zeros.dtype == dtype
        assert torch.equal(quarters.cpu(), torch.arange(5).to(dtype) / 4) and zeros.cpu().dtype == dtype


def test_it_holds_for_all_threads_as_torchs_does(session: object) -> None:
    found: list[torch.dtype] = []
    with default(torch.float64):
        thread = threading.Thread(
            target=lambda: found.append((torch.arange(3, device=REMOTE) / 2).cpu().dtype)
        )
        thread.start()
        thread.join()
    assert found == [torch.float64]


def test_a_thread_that_calls_while_it_changes_leaves_nothing_behind(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(5, 3, 2, device=REMOTE),
        lambda: torch.rand(5, 3, 2, device=REMOTE),
        lambda: torch.arange(0.0, 11.0, device=REMOTE),
    ]
    follow = Places.follow_default_dtype

    def late(places: Places) -> None:
        thread = threading.Thread(target=lambda: [call() for call in calls])
        thread.start()
        thread.join()
        dr.synchronize()
        follow(places)

    with monkeypatch.context() as patched:
        patched.setattr(Places, "follow_default_dtype", late)
        torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
    assert [call().dtype for call in calls] == [torch.float32] * 3


def test_the_old_way_to_set_it_is_followed_too(session: object) -> None:
    x = torch.arange(3, device=REMOTE)
    before = (x / 2).dtype
    try:
        # Torch says once in a process that this is deprecated, and another test may have heard it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_default_tensor_type(torch.DoubleTensor)
        assert (x / 2).cpu().dtype == torch.zeros(2, device=REMOTE).cpu().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert before == (x / 2).cpu().dtype == torch.float32


def test_a_session_that_begins_under_another_default_follows_it(fresh_session: Callable[..., Any]) -> None:
    with default(torch.float64), fresh_session(world_size=1):
        assert torch.zeros(2, device=REMOTE).cpu().dtype == torch.float64
        assert (torch.arange(2, device=REMOTE) / 2).cpu().dtype == torch.float64


def test_streams_and_meshes_follow_it(fresh_session: Callable[..., Any]) -> None:
    with fresh_session(world_size=2):
        mesh = dr.init_device_mesh("cpu", (2,))
        x, side = torch.arange(4, device=REMOTE), dr.Stream()
        whole = dr.from_shards([there(torch.arange(4), k) for k in range(2)], mesh)
        for dtype in (torch.float32, *OTHERS):
            with default(dtype):
                with dr.stream(side):
                    half = x / 2
                third = whole / 3
            assert half.dtype == half.cpu().dtype == dtype
            assert torch.equal(third.member(1).cpu(), torch.arange(4).to(dtype) / 3)


def test_what_cannot_be_made_explicit_is_refused(session: object) -> None:
    def only(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            raise RuntimeError("integers only")
        return x.new_empty(x.shape, dtype=torch.get_default_dtype())

    with torch.library._scoped_library("truth_test", "FRAGMENT") as library:
        library.define("only(Tensor x) -> Tensor")
        library.impl("only", only, "Meta")
        x = torch.arange(3, device=REMOTE)
        with (
            default(torch.float64),
            pytest.raises(dr.errors.NotSupportedError, match=r"x\.to\(torch\.float64\)"),
        ):
            torch.ops.truth_test.only(x)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_made_in_the_dtype_that_it_is_asked_for(session: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    ids = torch.arange(12).reshape(2, 6)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        for _ in range(2):
            with torch.device(REMOTE):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            local = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert {p.cpu().dtype for p in model.parameters()} == {dtype}
            local.load_state_dict(dr.fetch(model.state_dict()))
            logits = model(ids.to(REMOTE)).logits
            expected = local(ids).logits
            assert logits.dtype == expected.dtype == dtype
            assert torch.equal(logits.cpu(), expected)
