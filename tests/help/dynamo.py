"""What tests of `torch.compile` share: what Dynamo warns of in them, which torch this is, and whether its
compiler can be imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def _no_compiler() -> str:
    """Return why torch's compiler cannot be imported here; nothing if it can.

    It reads its templates in the encoding of the machine, and there are letters in them that are not ASCII.
    AOTAutograd imports it, too.
    """
    for template in Path(torch.__file__).parent.glob("_inductor/kernel/**/*.jinja"):
        try:
            template.read_text()
        except UnicodeDecodeError as error:
            return f"torch's compiler cannot read its own {template.name} here: {error}"
    return ""


NO_COMPILER = _no_compiler()
COMPILES = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)
# Dynamo imports what torch itself warns of, and looks at what it warns of.
DYNAMO_WARNS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
    COMPILES,
]
