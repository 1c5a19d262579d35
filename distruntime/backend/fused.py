"""Composites that decompose differently by device travel whole: attention, recurrent layers, RMS norms.

Left alone, torch would take a proxy for a device it knows nothing of. Attention would become a T x T product,
two LSTM layers over 20 steps 2,366 instructions, and `one_hot` would take any class. Foreach and fused
optimizers travel whole by themselves: see install.py.
"""

from __future__ import annotations

import torch

from ..errors import drop_frames
from ..operators.alias_info import Operator
from ..operators.special import claimed, ctc_loss
from ..tensors.tensor import DistributedTensor
from .attention import attention
from .formulas import ATTENTION, Kernel, formula
from .products import ADDMM, EINSUM, LINEAR, MATMUL, addmm, einsum, linear, matmul
from .whole import on_accelerators, recurrent

_aten = torch.ops.aten

RECURRENT = [
    op
    for packet in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)
    for op in (packet.input, packet.data)
]


def one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Compute it in one instruction, as the worker's kernel refuses classes that are out of range.

    torch's formula for a tensor subclass compares, so that such a class gets a row of zeros.
    """
    op = _aten.one_hot.default
    # Modes, transforms and fakes look at each operator of the formula.
    if type(classes) is not DistributedTensor or torch._C._len_torch_dispatch_stack():
        return op.decompose(classes, num_classes)  # type: ignore[no-any-return]
    if num_classes <= 0 and not classes.numel():
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if num_classes == -1:
        # The kernel compares the smallest class with 0.
        num_classes = int(classes.max()) + 1
    with torch._C._AutoDispatchBelowAutograd():
        # The kernel's result is contiguous, where the formula would keep the strides of its operand.
        return op(classes.contiguous(), num_classes)  # type: ignore[no-any-return]


_rank = _aten.linalg_matrix_rank
# What writes into `out`, and what returns the same.
RANKS: dict[Operator, Operator] = {
    _rank.out: _rank.default,
    _rank.out_tol_tensor: _rank.tol_tensor,
    _rank.atol_rtol_float_out: _rank.atol_rtol_float,
    _rank.atol_rtol_tensor_out: _rank.atol_rtol_tensor,
}


# The products of few dimensions write themselves, by the dimensions of their operands.
_DIRECT: dict[tuple[int, int], Operator] = {
    (1, 1): _aten.dot.out,
    (2, 1): _aten.mv.out,
    (2, 2): _aten.mm.out,
}


def matmul_into(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write a product into `out`. Refuse gradients, as torch does.

    torch's formula asks C++ whether a view of `out` has its memory. C++ knows of no memory, and the formula
    then copied that view into `out`: with a graph, or with an error, as its shape is another one.
    """
    direct = _DIRECT.get((first.dim(), second.dim()))
    if direct is not None:
        return direct(first, second, out=out)  # type: ignore[return-value]
    return torch.add(torch.matmul(first, second), 0, out=out)


def rank_into_out(returning: Operator) -> Kernel:
    """Return the kernel that writes a rank into `out`, which the formula for a subclass leaves as it was."""

    def run(*args: object, out: torch.Tensor, **kwargs: object) -> torch.Tensor:
        found: torch.Tensor = returning(*args, **kwargs)  # type: ignore[assignment]
        # `add` would refuse these, too, in words of its own.
        if out.dtype is torch.bool:
            raise RuntimeError(
                "torch.linalg.matrix_rank: Expected result to be safely castable from Long dtype, "
                "but got result with dtype Bool"
            )
        # An operator with `out` resizes it.
        return torch.add(found, 0, out=out)

    return run


_to_device = formula(_aten.to.device)


def to_its_place(self: torch.Tensor, device: torch.device, *args: object, **kwargs: object) -> object:
    """Bring a tensor to a device: `torch.as_tensor` and `torch.asarray` ask for one by `aten::to.device`.

    A tensor that is there already is returned as it is, as torch promises. The formula compares devices in
    C++, where a proxy claims "lazy", so it would copy for "remote". The other overload, `to.dtype_layout`,
    has no such kernel: C++ calls it in every cross entropy, and a kernel in Python adds 7 us to 21 there.
    """
    try:
        return _to_device(self, claimed(self, device), *args, **kwargs)
    except BaseException as error:
        drop_frames(error)
        raise


KERNELS: dict[Operator, Kernel] = {
    **{op: rank_into_out(returning) for op, returning in RANKS.items()},
    _aten.matmul.out: matmul_into,
    _aten.one_hot.default: one_hot,
    _aten.ctc_loss.Tensor: lambda *args: ctc_loss(DistributedTensor, _aten.ctc_loss.Tensor, args, {}),
    **{op: recurrent(op) for op in RECURRENT},
    **{
        op: on_accelerators(op)
        for op in (_aten.rms_norm.default, _aten.lstm_cell.default, _aten.gru_cell.default)
    },
}
# Where they do nothing else, they must cost nothing else: `install` puts them in as they are.
QUICK: dict[Operator, Kernel] = {
    ADDMM: addmm,
    LINEAR: linear,
    MATMUL: matmul,
    EINSUM: einsum,
    ATTENTION: attention,
    _aten.to.device: to_its_place,
}
