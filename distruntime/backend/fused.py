"""Composites that decompose differently by device travel whole: attention, recurrent layers, RMS norms.

Left alone, torch would take a proxy for a device it knows nothing of. Attention would become a T x T product,
and two LSTM layers over 20 steps 2,366 instructions. Foreach and fused optimizers travel whole by themselves:
see install.py.
"""

from __future__ import annotations

import torch

from ..operators.propagate import Operator
from ..operators.special import ctc_loss
from ..tensors.tensor import DistributedTensor
from .attention import attention
from .whole import EINSUM, Kernel, on_accelerators, recurrent, to_its_place, without_gradients

_aten = torch.ops.aten

RECURRENT = [
    op
    for packet in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)
    for op in (packet.input, packet.data)
]
KERNELS: dict[Operator, Kernel] = {
    _aten.scaled_dot_product_attention.default: attention,
    _aten.ctc_loss.Tensor: lambda *args: ctc_loss(DistributedTensor, _aten.ctc_loss.Tensor, args, {}),
    **{op: recurrent(op) for op in RECURRENT},
    **{
        op: on_accelerators(op)
        for op in (_aten.rms_norm.default, _aten.lstm_cell.default, _aten.gru_cell.default)
    },
}
# Where they do nothing else, they must cost nothing else: `install` puts them in as they are.
QUICK: dict[Operator, Kernel] = {
    **{op: without_gradients(op) for op in (_aten.linear.default, _aten.matmul.default, EINSUM)},
    _aten.to.device: to_its_place(_aten.to.device),
}
