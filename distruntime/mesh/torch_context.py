"""torch's context parallelism on a mesh: its attention over a cut sequence is that of attention.py.

torch cuts the buffers, and makes DTensors of queries, keys and values. Then each rank would go through a ring
of its own CUDA kernels, and leave out what is behind its queries. The members of a mesh go through one ring
together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed import tensor

from ..backend.on_import import when_imported
from ..errors import NotSupportedError, PlacementError
from .attention import attention
from .each_member import home_of
from .torch_fsdp import replace
from .torch_world import around

_tensor: Any = tensor
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


# What says whether attention goes in parts, and how they are cut. Another torch may have moved it.
_NEEDED = ("_sdpa_handler", "_cp_options")


def prepare() -> None:
    """Have `context_parallel` refuse buffers that it could not cut in place."""
    when_imported(_MODULE, _check_buffers)


def _check_buffers(module: ModuleType) -> None:
    own: Any = module
    replace("context_parallel", _of_buffers_there(own.context_parallel))


@around
def _of_buffers_there(
    context_parallel: Callable[..., Any],
    /,
    mesh: Any,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    home, module = getattr(mesh, "_home", None), sys.modules.get(_MODULE)
    if home is not None and not all(hasattr(module, name) for name in _NEEDED):
        raise NotSupportedError(
            f"context_parallel of torch {torch.__version__} is not the one that distruntime knows. "
            "dr.lines.attention(mesh.lines(dim), q, k, v, is_causal=True) is attention over parts of a "
            "sequence, without it"
        )
    for t in (buffers or ()) if home is not None else ():
        if home_of(t) is not home:
            where = getattr(t, "place", t.device)
            raise PlacementError(
                "context_parallel cuts its buffers in place, so that each member has its part; one of "
                f"shape {tuple(t.shape)} is on {where}. Give it to all members before: x.to(mesh.device)"
            )
    return context_parallel(mesh, buffers=None if buffers is None else list(buffers), **kwargs)


def in_parts(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, **named: Any
) -> Any:
    """Return the attention of DTensors that are cut by positions; None if torch is not to do it in parts."""
    module: Any = sys.modules.get(_MODULE)
    handler = getattr(module, "_sdpa_handler", None)
    known = _tensor.DTensor._op_dispatcher._custom_op_handlers
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    by_positions = [_tensor.Shard(query.ndim - 2)]
    if handler is None or known.get(op) is not handler:
        return None
    if any(list(t.placements) != by_positions for t in (query, key, value)):
        return None
    if attn_mask is not None or dropout_p:
        raise NotSupportedError(
            "attention in parts of a sequence (context_parallel) takes no mask and no dropout, got "
            f"{'a mask' if attn_mask is not None else f'dropout_p={dropout_p}'}: use is_causal=True, or "
            "gather the sequence before"
        )
    mesh = query.device_mesh
    local = [t.to_local() for t in (query, key, value)]
    balanced = bool(module._cp_options.enable_load_balance)
    found = attention(mesh.lines(), *local, is_causal=is_causal, balanced=balanced, **named)
    return _tensor.DTensor.from_local(found, mesh, by_positions, run_check=False)
