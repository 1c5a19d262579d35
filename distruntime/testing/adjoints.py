"""The adjoint test: whether gradients belong to the function that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import distruntime as dr

Tensors = Sequence[torch.Tensor]


def check_adjoint(
    f: Callable[[list[torch.Tensor]], Tensors | torch.Tensor],
    xs: Tensors,
    *,
    bound: float | None = None,
    seed: int = 0,
) -> float:
    """Check that the gradient of a linear function is its adjoint. Return the error. Block until it is known.

    For the linear part F of `f` and numbers y, drawn at random, <F x, y> must be <x, F* y>, where F* is what
    `backward` computes. A function may add a constant, as a bias does: it is taken off. Layers with max are
    linear at each point, so they pass, too.

    Args:
        f: takes a list of tensors like `xs`, and returns a tensor or a list of them, on any places.
        xs: where the function is tried, local tensors or remote ones; none of them is changed.
        bound: the largest error, as a share of ``max(|F x| |y|, |x| |F* y|)``. By default it is 1e-12 for
            float64 and 1e-5 for float32.
        seed: of the numbers y.

    Raises:
        AssertionError: the error is above the bound, or a gradient has another size, dtype or place than its
            input.
        UsageError: something is no tensor of floating point numbers, or no result depends on `xs`.
    """
    leaves = [_leaf(x, k) for k, x in enumerate(xs)]
    if not leaves:
        raise dr.errors.UsageError("check_adjoint takes a list of tensors, got an empty one")
    outs = _listed(f(leaves))
    with torch.no_grad():
        constants = _listed(f([torch.zeros_like(x) for x in leaves]))
    generator = torch.Generator().manual_seed(seed)
    ys = [torch.randn(y.shape, dtype=y.dtype, generator=generator, device="cpu") for y in outs]
    wanted = [(out, y.to(out.device)) for out, y in zip(outs, ys) if out.requires_grad]
    if not wanted:
        raise dr.errors.UsageError("no result of f depends on xs by a gradient")
    grads = torch.autograd.grad(
        [out for out, _ in wanted], leaves, [y for _, y in wanted], allow_unused=True, materialize_grads=True
    )
    for k, (x, grad) in enumerate(zip(leaves, grads)):
        if (grad.shape, grad.dtype, grad.device) != (x.shape, x.dtype, x.device):
            raise AssertionError(
                f"the gradient of xs[{k}] is {tuple(grad.shape)} {grad.dtype} on {grad.device}, "
                f"expected {tuple(x.shape)} {x.dtype} on {x.device}, as the input is"
            )
    # All values come in one wait.
    here = dr.fetch([[t.detach() for t in ts] for ts in (outs, constants, leaves, grads)])
    results, fixed, points, backs = ([t.cpu().double() for t in ts] for ts in here)
    linear = [out - constant for out, constant in zip(results, fixed)]
    forth, back = _inner(linear, ys), _inner(points, backs)
    scale = max(_norm(linear) * _norm(ys), _norm(points) * _norm(backs))
    error = abs(forth - back) / scale if scale else 0.0
    most = (1e-12 if leaves[0].dtype == torch.float64 else 1e-5) if bound is None else bound
    if not error <= most:
        raise AssertionError(
            f"the gradient is not the adjoint: <F x, y> is {forth!r} and <x, F* y> is {back!r}, "
            f"an error of {error:.2g}, expected at most {most:g}"
        )
    return error


def _leaf(x: object, k: int) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = f"{x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise dr.errors.UsageError(f"xs[{k}] is a tensor of floating point numbers, got {got}")
    return x.detach().clone().requires_grad_()


def _listed(found: Tensors | torch.Tensor) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _inner(xs: Tensors, ys: Tensors) -> float:
    return sum(float((x * y.double()).sum()) for x, y in zip(xs, ys))


def _norm(xs: Tensors) -> float:
    return float(_inner(xs, xs) ** 0.5)
