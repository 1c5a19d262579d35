"""Calls of every operator that torch's autocast lists: from PyTorch's operator database by name, and by hand
where it has none.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from agree import seed, some
from op_samples import samples

# The module warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _draw(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _positive(n: int) -> torch.Tensor:
    return _draw(n, n) @ _draw(n, n).mT + n * torch.eye(n)


def _by_hand() -> dict[str, tuple[Any, ...] | tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of overloads that the database does not name, by the name that the dispatcher gives them."""
    v, w, m, n = _draw(4), _draw(4) + 1, _draw(4, 4), _draw(4, 4) + 1
    one, two, three = _draw(2, 3, 8), _draw(2, 3, 8, 8), _draw(2, 3, 8, 8, 8)
    k1, k2, k3, bias = _draw(3, 3, 3), _draw(3, 3, 3, 3), _draw(3, 3, 3, 3, 3), _draw(3)
    b, labels = _draw(2, 4, 4), torch.tensor([1, 0, 3, 2])
    log_probs, targets = _draw(5, 2, 4).log_softmax(-1), torch.tensor([[1, 2], [3, 1]])
    heads = _draw(1, 2, 4, 8)
    cell = (_draw(2, 4), _draw(2, 4), _draw(4, 4), _draw(4, 4), _draw(4), _draw(4))

    def gates(k: int) -> tuple[torch.Tensor, ...]:
        return _draw(4 * k, 4), _draw(4 * k, 4), _draw(4 * k), _draw(4 * k)

    convolution = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    # The optional operand of "bilinear" has no say in what the others are cast to.
    return {
        "_addmm_activation": ((m, m, n), {"use_gelu": True}),
        "_convolution": (two, k2, bias, *convolution, False, True, True, True),
        "_convolution.deprecated": (two, k2, bias, *convolution, False, True, True),
        "_cudnn_rnn": (),
        "_grid_sampler_2d_cpu_fallback": (two, _draw(2, 4, 4, 2), 0, 0, False),
        "_lu_with_info": (m,),
        "_native_multi_head_attention": (b, b, b, 4, 2, _draw(12, 4), _draw(12), m, v),
        "_scaled_dot_product_flash_attention": (heads, heads, heads),
        "_thnn_fused_gru_cell": (_draw(2, 12), _draw(2, 12), _draw(2, 4)),
        "_thnn_fused_lstm_cell": (_draw(2, 16), _draw(2, 16), _draw(2, 4)),
        "_upsample_bicubic2d_aa": (two, [4, 4], False),
        "_upsample_nearest_exact1d": (one, [4]),
        "_upsample_nearest_exact2d": (two, [4, 4]),
        "_upsample_nearest_exact3d": (three, [4, 4, 4]),
        "bilinear": (
            m.half(),
            m.half(),
            _draw(3, 4, 4).half(),
            bias,
        ),
        "chain_matmul": ([m, n, m],),
        "conv1d.padding": (one, k1, bias, [1], "same"),
        "conv2d.padding": (two, k2, bias, [1, 1], "same"),
        "conv3d.padding": (three, k3, bias, [1, 1, 1], "same"),
        "conv_tbc": (one, _draw(3, 8, 5), _draw(5)),
        "conv_transpose2d.input": (two, k2, bias),
        "conv_transpose3d.input": (three, k3, bias),
        "convolution": (two, k2, bias, *convolution),
        "cross_entropy_loss": (m, labels),
        "ctc_loss.IntList": (log_probs, targets, [5, 5], [2, 2]),
        "ctc_loss.Tensor": (log_probs, targets, torch.tensor([5, 5]), torch.tensor([2, 2])),
        "cudnn_convolution": (two, k2, [0, 0], [1, 1], [1, 1], 1, False, True, True),
        "cudnn_convolution_transpose": (two, k2, [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True),
        "fake_quantize_per_tensor_affine": (m, 0.1, 0, 0, 255),
        "frobenius_norm.dim": (m, [1]),
        "grid_sampler": (two, _draw(2, 4, 4, 2), 0, 0, False),
        "gru_cell": (cell[0], cell[1], *gates(3)),
        "inverse": (_positive(4),),
        "linalg_cond.p_str": (_positive(4), "fro"),
        "linalg_matrix_norm.str_ord": (m, "fro"),
        "linalg_matrix_rank.atol_rtol_float": ((m,), {"atol": 0.1}),
        "linalg_matrix_rank.atol_rtol_tensor": ((m,), {"atol": torch.tensor(0.1)}),
        "linalg_matrix_rank.tol_tensor": (m, torch.tensor(0.1)),
        "log_softmax.int": (m, 1),
        "lstm_cell": (cell[0], [cell[1], cell[1]], *gates(4)),
        "mkldnn_rnn_layer": (
            _draw(5, 2, 4),
            *gates(4),
            _draw(2, 4),
            _draw(2, 4),
            False,
            [],
            2,
            4,
            1,
            True,
            False,
            False,
            False,
        ),
        "multilabel_margin_loss_forward": (m, torch.zeros(4, 4, dtype=torch.long), 1),
        "nanquantile.scalar": (v, 0.5),
        "nll_loss2d": (two.log_softmax(1), torch.zeros(2, 8, 8, dtype=torch.long)),
        "norm.Scalar": (m,),
        "norm.ScalarOpt_dim": (m, 1, [1]),
        "nuclear_norm": (m,),
        "nuclear_norm.dim": (m, [0, 1]),
        "orgqr": (_draw(4, 3), _draw(3)),
        "pow.Scalar": (2.0, v),
        "pow.Tensor_Scalar": (v, 1.5),
        "pow.Tensor_Tensor": (v, w),
        "prod.dim_int": (m, 1),
        "quantile.scalar": (v, 0.5),
        "reflection_pad1d": (one, [2, 1]),
        "reflection_pad2d": (two, [2, 1, 1, 2]),
        "replication_pad1d": (one, [2, 1]),
        "replication_pad2d": (two, [2, 1, 1, 2]),
        "replication_pad3d": (three, [2, 1, 1, 2, 0, 1]),
        "rnn_relu_cell": (cell[0], cell[1], *gates(1)),
        "rnn_tanh_cell": (cell[0], cell[1], *gates(1)),
        "softmax.int": (m, 1),
        "stft.center": ((_draw(16), 4), {"return_complex": True}),
        "sum.dim_IntList": (m, [1]),
        "upsample_bicubic2d": (two, [4, 4], False),
        "upsample_bilinear2d": (two, [4, 4], False),
        "upsample_linear1d": (one, [4], False),
        "upsample_nearest1d": (one, [4]),
        "upsample_nearest2d": (two, [4, 4]),
        "upsample_nearest3d": (three, [4, 4, 4]),
        "upsample_trilinear3d": (three, [4, 4, 4], False),
    }


@functools.cache
def _hand() -> dict[str, Any]:
    return _by_hand()


@functools.cache
def _database() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in op_db:
        if torch.float32 in op.dtypes and not op.variant_test_name:
            found[op.name.removeprefix("nn.functional.").replace(".", "_")] = op
    return found


def calls(name: str, limit: int = 2) -> list[Call]:
    """Return calls of "aten::name.overload" with float32 operands."""
    name = name.removeprefix("aten::")
    base, _, overload = name.partition(".")
    if name in _hand():
        given = _hand()[name]
        args, kwargs = given if len(given) == 2 and isinstance(given[1], dict) else (given, {})
        return [(getattr(getattr(torch.ops.aten, base), overload or "default"), args, kwargs)]
    assert not overload and base in _database(), f"no sample calls of {name}: add one by hand"
    op = _database()[base]
    seed(0)
    return [(op.op, (s.input, *s.args), s.kwargs) for s in some(samples(op, torch.float32), limit)]


def recast(tree: Any, dtype: torch.dtype, every: int = 1) -> Any:
    """Return the same arguments with every (second, third, ...) floating-point tensor in another dtype."""
    count = iter(range(1 << 30))
    return tree_map_only(
        torch.Tensor,
        lambda t: t.to(dtype) if t.dtype is torch.float32 and next(count) % every == 0 else t,
        tree,
    )
