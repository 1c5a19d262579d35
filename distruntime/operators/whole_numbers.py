"""Operators whose whole numbers are words of the call, as its fractions are.

`x * 3` and `x * 4` are one signature and one template then. A loop that counts (`labels == k`,
`total / (k + 1)`) costs what an addition costs, and no table grows with each number.
Measured on 2 cores: 6 us a call, where a new number cost 50 to 150 us, and 1,600 us in `x // k`.
"""

from __future__ import annotations

import torch

# The ids of the operators that `learn` has found to be so, and of the others. The hot path asks these two by
# itself: a dictionary's `get` would take 0.1 us for each dimension and index of a view.
NUMERIC: set[int] = set()
EXACT: set[int] = set()

# An id stays its operator's own as long as that lives.
_learned: list[torch._ops.OpOverload] = []
# These have no tag of torch's that says so. Products have such numbers in `alpha` and `beta`.
_POINTWISE = (
    *("floor_divide", "floor_divide_", "where", "masked_fill_"),
    *("fill", "fill_", "full", "full_like", "new_full", "scalar_tensor"),
    *("addmm", "addmm_", "addmv", "addmv_", "addbmm", "addbmm_", "baddbmm", "baddbmm_", "addr", "addr_"),
)
# A negative power of whole numbers is a mistake that is told at its line. The power of one leaves truth
# values as they are.
_POWERS = ("pow", "pow_", "_foreach_pow", "_foreach_pow_")
# A list of whole numbers is in the signature as it is.
_VALUES = {"number", "Tensor", "List[Tensor", "List[int", "bool", "str"}


def learn(func: torch._ops.OpOverload) -> bool:
    """Return whether no result's metadata depends on the values of an operator's whole numbers.

    It is so where each result is as large as its operands, or as a list says. An operator with a whole number
    among its positional arguments that is no value, such as a dimension, does not count.
    """
    space, _, name = func._schema.name.partition("::")
    pointwise = torch.Tag.pointwise in func.tags or name in _POINTWISE or name.startswith("_foreach_")
    kinds = [str(a.type) for a in func._schema.arguments if not a.kwarg_only]
    values = all(kind.replace("Optional", "").strip("[]") in _VALUES for kind in kinds)
    found = space == "aten" and pointwise and values and name not in _POWERS
    _learned.append(func)
    (NUMERIC if found else EXACT).add(id(func))
    return found


def takes(func: torch._ops.OpOverload) -> bool:
    """Return what is known of an operator, or learn it."""
    return id(func) in NUMERIC or (id(func) not in EXACT and learn(func))
