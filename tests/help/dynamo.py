"""What tests of `torch.compile` share: what Dynamo warns of in them, and which torch this is."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Dynamo imports what torch itself warns of, and looks at what it warns of.
DYNAMO_WARNS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]
