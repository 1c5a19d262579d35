"""A device type "remote" for PyTorch's device-generic tests. It is asked what a CPU is asked.

The workers' kernels are a CPU's, so tests for CPUs only are run, and a CPU's dtypes and expected failures
hold. torch's own `TORCH_TEST_DEVICES` would do for the class below, but not for these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.testing import _comparison
from torch.testing._internal import common_device_type
from torch.testing._internal.opinfo import core

REMOTE = "remote"


def device() -> str:
    """Return the current place, in a form that can be compared with a tensor's device."""
    return f"{REMOTE}:{torch.remote.current_device()}"


class RemoteTestBase(common_device_type.DeviceTypeTestBase):
    device_type = REMOTE

    @classmethod
    def get_primary_device(cls) -> str:
        return device()

    @classmethod
    def get_all_devices(cls) -> list[str]:
        return [device()]

    @classmethod
    def _get_dtypes(cls, test: Any) -> Any:
        if not hasattr(test, "dtypes"):
            return None
        return test.dtypes.get("cpu", test.dtypes.get("all"))

    def _should_stop_test_suite(self) -> bool:
        return False


def add() -> None:
    """Let `instantiate_device_type_tests` make tests for CPUs and for remote tensors, and for nothing else.

    torch's lazy backend is left out, as it cannot begin beside a session (docs/limits.md).
    """
    common_device_type.device_type_test_bases[:] = [common_device_type.CPUTestBase, RemoteTestBase]
    desired = common_device_type.get_desired_device_type_test_bases

    def and_remote(
        except_for: str | Iterable[str] | None = None,
        only_for: str | Iterable[str] | None = None,
        include_lazy: bool = False,
        *rest: Any,
        **named: Any,
    ) -> Any:
        # Tests for CUDA and Habana's "hpu" are for any accelerator: torch's dynamo has such.
        if only_for is not None and ("cpu" in only_for or "hpu" in only_for):
            only_for = [*([only_for] if isinstance(only_for, str) else only_for), REMOTE]
        return desired(except_for, only_for, False, *rest, **named)

    common_device_type.get_desired_device_type_test_bases = and_remote
    common_device_type.onlyCPU = common_device_type.onlyOn(["cpu", REMOTE])
    is_active = core.DecorateInfo.is_active

    def active_as_on_a_cpu(self: Any, cls: Any, name: Any, device_type: Any, dtype: Any, named: Any) -> Any:
        if device_type == REMOTE and self.device_type == "cpu":
            device_type = "cpu"
        return is_active(self, cls, name, device_type, dtype, named)

    core.DecorateInfo.is_active = active_as_on_a_cpu
    _compare_fetched(_comparison.TensorLikePair)


def _compare_fetched(pair: Any) -> None:
    """Compare values here: there it costs six waits. torch has compared the attributes before."""
    compare: Callable[..., None] = pair._compare_values

    def fetched(self: Any, actual: torch.Tensor, expected: torch.Tensor) -> None:
        compare(self, *(t.cpu() if t.device.type == REMOTE else t for t in (actual, expected)))

    pair._compare_values = fetched
