"""Names of `torch.testing._internal` that the test files import, and that this torch has elsewhere.

The tests are of another version than the installed torch. Without these names a file of thousands of tests
could not be imported at all.
"""

from __future__ import annotations

from typing import Any

from torch.testing._internal import common_device_type, common_methods_invocations


def give() -> None:
    """Let the test files find the names. A name that this torch has in its old place stays as it is."""
    here, old = common_device_type, common_methods_invocations
    names = {
        "skip": getattr(here, "skip", None),
        "xfail": getattr(here, "xfail", None),
        "binary_ufuncs_and_refs": old.binary_ufuncs,
        "skipOps": _skip_ops,
    }
    for name, value in names.items():
        if value is not None and not hasattr(old, name):
            setattr(old, name, value)


def _skip_ops(test_case_name: str, base_test_name: str, to_skip: Any) -> Any:
    # The names of class and test are those of the decorated function.
    return common_device_type.skipOps(to_skip)
