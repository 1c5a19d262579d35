"""The optimizer whose state the members of a mesh share: the class of an example."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Partial

__all__ = ["InShares", "Partial"]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "24_state_in_shares.py"
InShares: Any = runpy.run_path(str(EXAMPLE))["InShares"]
