"""Training on many members: data parallelism, pipelines, experts, sharded optimizers."""

from __future__ import annotations

import typing

from .. import first_use as _first_use

if typing.TYPE_CHECKING:
    from .data_parallel import DataParallel
    from .experts import Experts
    from .pipelining import Pipeline, pipeline
    from .sharded_optimizer import ShardedOptimizer
    from .splitting import split

_first_use.lend(__name__)

__all__ = [
    "DataParallel",
    "Experts",
    "Pipeline",
    "ShardedOptimizer",
    "pipeline",
    "split",
]
