"""Files that lie at a worker: weights, and data for training."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .python.loader import DataLoader as DataLoader
    from .python.loader import data_loader as data_loader

_first_use.lend(__name__)
