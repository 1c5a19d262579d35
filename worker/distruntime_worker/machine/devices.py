"""The devices that a worker offers: its CPU, its accelerators, or GPUs that are simulated by CPU tensors."""

from __future__ import annotations

import logging
import os

import torch

from distruntime.errors import ConfigurationError
from distruntime.wire.messages import DeviceRow

from . import accelerator, hardware, lost, random_states
from .settings import per_thread

log = logging.getLogger("distruntime.worker")

_MOST = 127
# The random state of a CPU has so many bytes.
_STATE = torch.get_rng_state().numel()


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
    """Names on the wire, as torch has them here ("cpu", "xpu:1"), and the torch devices behind them."""

    def __init__(self, only: tuple[str, ...] = (), simulate_cuda: int = 0) -> None:
        self.simulated = simulate_cuda > 0
        if not 0 <= simulate_cuda <= _MOST:
            raise ConfigurationError(
                f"--simulate-cuda is a number from 0 to {_MOST}, the most that torch can tell apart; got "
                f"{simulate_cuda}"
            )
        kind, count, why = (
            accelerator.Found(accelerator.SIMULATED, simulate_cuda, "")
            if self.simulated
            else accelerator.find()
        )
        have = ["cpu", *(f"{kind}:{k}" for k in range(count))]
        unknown = [name for name in only if name not in have]
        if unknown:
            raise ConfigurationError(
                f"--devices {','.join(only)}: this machine has no {', '.join(unknown)}; it has "
                f"{', '.join(have)}{f'. {why}' if why else ''}"
            )
        if why:
            log.warning("offering the CPU only: %s", why)
        self.names = [name for name in have if not only or name in only]
        # Kernels run later than their calls on these, so whoever waits for one waits for an event.
        self.asynchronous = [
            torch.device(name) for name in self.names if name != "cpu" and not self.simulated
        ]

    def real(self, named: torch.device) -> torch.device:
        """Return where tensors of the device `named` really live, which is in use from now on.

        Raise `RuntimeError` if this worker does not offer it.
        """
        found = self.behind(named)
        for last in (False, True):
            try:
                accelerator.begin(found)
                break
            except RuntimeError as error:
                why = lost.look(error, "the first use")
                # It may be another device that is lost, whose streams this one would follow.
                if last or found in accelerator.lost:
                    # What is computed there says so again.
                    log.warning("%s cannot be used: %s", named, why)
                    break
        return found

    def behind(self, named: torch.device) -> torch.device:
        """As `real`, without beginning to use the device."""
        if str(named) not in self.names:
            # What an operator reads on the CPU whatever its device, such as a seed, goes there everywhere.
            if named.type in ("meta", "cpu"):
                return named
            raise RuntimeError(f"this worker has no device {named}; it has {', '.join(self.names)}")
        return torch.device("cpu") if self.simulated else named

    def info(self) -> list[DeviceRow]:
        """Return a row for each device, with the memory of now. This opens no context on a device."""
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> DeviceRow:
        if name == "cpu":
            return DeviceRow(name, f"{per_thread.num_threads} threads", *memory(), "", 0, 0, "", _STATE, [])
        if self.simulated:
            return DeviceRow(name, "simulated", *memory(), "", 0, 0, "", _STATE, [])
        device = torch.device(name)
        if device in accelerator.lost:
            return DeviceRow(name, "lost", 0, 0, "", 0, 0, "", 0, [])
        try:
            return self._row_of(name, device)
        except RuntimeError as error:
            why = f"unusable: {str(lost.look(error, 'a look at its memory')).partition(chr(10))[0]:.80}"
            return DeviceRow(name, why, 0, 0, "", 0, 0, "", 0, [])

    def _row_of(self, name: str, device: torch.device) -> DeviceRow:
        found = hardware.properties(device)
        allocated, _, reserved, _ = hardware.allocated(device)
        return DeviceRow(
            name,
            found.name,
            *hardware.memory(device, found),
            hardware.capability(found),
            allocated,
            reserved,
            found.uuid,
            random_states.rng_state_bytes(device),
            hardware.lacks(device, found),
        )
