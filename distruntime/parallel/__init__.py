"""Training on many members: data parallelism, pipelines, experts."""

from __future__ import annotations

import typing

from .. import first_use as _first_use

if typing.TYPE_CHECKING:
    from .data_parallel import DataParallel as DataParallel
    from .experts import Experts as Experts
    from .pipelining import Pipeline as Pipeline
    from .pipelining import pipeline as pipeline
    from .splitting import split as split

_first_use.lend(__name__)
