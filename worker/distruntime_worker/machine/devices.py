"""The devices that a worker offers: its CPU, its GPUs, or GPUs that are simulated by CPU tensors."""

from __future__ import annotations

import os

import torch

from distruntime.errors import ConfigurationError
from distruntime.wire.messages import DeviceRow

from .settings import per_thread

_MOST = 127


def memory(keys: tuple[str, str] = ("MemTotal", "MemAvailable")) -> tuple[int, int]:
    """Return total and available bytes of main memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found[keys[0]], found[keys[1]]
    except (OSError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


class Devices:
    """Names on the wire ("cpu", "cuda:1") and the torch devices behind them."""

    def __init__(self, only: tuple[str, ...] = (), simulate_cuda: int = 0) -> None:
        self.simulated = simulate_cuda > 0
        if not 0 <= simulate_cuda <= _MOST:
            raise ConfigurationError(
                f"--simulate-cuda is a number from 0 to {_MOST}, the most that torch can tell apart; got "
                f"{simulate_cuda}"
            )
        count = simulate_cuda or torch.cuda.device_count()
        have = ["cpu", *(f"cuda:{k}" for k in range(count))]
        unknown = [name for name in only if name not in have]
        if unknown:
            raise ConfigurationError(
                f"--devices {','.join(only)}: this machine has no {', '.join(unknown)}; it has "
                f"{', '.join(have)}"
            )
        self.names = [name for name in have if not only or name in only]
        gpus = [name for name in self.names if name != "cpu" and not self.simulated]
        self.first_gpu = torch.device(gpus[0]) if gpus else None

    def real(self, named: torch.device) -> torch.device:
        """Return where tensors of the device `named` really live.

        Raise `RuntimeError` if this worker does not offer it.
        """
        if str(named) not in self.names:
            if named.type == "meta":
                return named
            raise RuntimeError(f"this worker has no device {named}; it has {', '.join(self.names)}")
        return torch.device("cpu") if self.simulated else named

    def info(self) -> list[DeviceRow]:
        """Return a row for each device, with the memory of now."""
        rows: list[DeviceRow] = []
        for name in self.names:
            if name == "cpu":
                rows.append(DeviceRow(name, f"{per_thread.num_threads} threads", *memory(), "", 0, 0))
            elif self.simulated:
                rows.append(DeviceRow(name, "simulated", *memory(), "", 0, 0))
            else:
                free, total = torch.cuda.mem_get_info(name)
                capability = ".".join(map(str, torch.cuda.get_device_capability(name)))
                held = torch.cuda.memory_allocated(name), torch.cuda.memory_reserved(name)
                rows.append(DeviceRow(name, torch.cuda.get_device_name(name), total, free, capability, *held))
        return rows
