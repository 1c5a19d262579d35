"""The gradients of what a worker has recorded: their strides, and whose memory they are in."""

from __future__ import annotations

import torch

from distruntime_worker.values.functions import Tape, record, replay_backward


def recorded(name: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, Tape]:
    result, tape = record(None, name, [True] * len(inputs), *inputs)
    assert isinstance(result, torch.Tensor) and isinstance(tape, Tape)
    return result, tape


def test_a_gradient_in_memory_of_its_own_is_not_copied_again() -> None:
    made: list[int] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made.extend([1] if func is torch.ops.aten.copy_.default else [])
            return func(*args, **(kwargs or {}))

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    result, tape = recorded("aten::mm", a, b)
    with torch.no_grad(), Seen():
        found = replay_backward(tape, torch.ones_like(result))
    assert not made and torch.equal(found[0], torch.ones(3, 5) @ b.t())
    assert found[0].stride() == a.stride() and found[1].stride() == b.stride()


def test_a_gradient_that_shares_its_memory_is_a_copy() -> None:
    """The sum's gradients are what came in, twice; `exp` saves its result, and the next replay needs it."""
    x, y, given = torch.randn(3), torch.randn(3), torch.ones(3)
    result, tape = recorded("aten::add.Tensor", x, y)
    with torch.no_grad():
        found = [*replay_backward(tape, given), *replay_backward(tape, given)]
        for one in found:
            one.zero_()
    assert given.tolist() == [1, 1, 1]
    assert len({one.untyped_storage().data_ptr() for one in [*found, given]}) == 5
    result, tape = recorded("aten::exp", x)
    with torch.no_grad():
        (first,) = replay_backward(tape, given)
        first.zero_()
        assert torch.equal(replay_backward(tape, given)[0], result)


def test_a_gradient_has_the_strides_of_its_input() -> None:
    wide = torch.randn(5, 4).t()
    _, tape = recorded("aten::mul.Tensor", wide, torch.randn(4, 5))
    with torch.no_grad():
        first, second = replay_backward(tape, torch.ones(4, 5))
    assert first.stride() == wide.stride() and second.stride() == (5, 1)
