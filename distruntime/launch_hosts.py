"""The machines of a launch: from the command line, or from a file as MPI has it."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigurationError


def from_names(text: str) -> list[str]:
    """Return the machine of each worker, from "gpu1,gpu2"."""
    hosts = [name.strip() for name in text.split(",") if name.strip()]
    if not hosts:
        raise ConfigurationError(f"got --hosts {text!r}, expected names of machines: --hosts gpu1,gpu2")
    return hosts


def from_file(path: Path) -> list[str]:
    """Return the machine of each worker, from lines such as "gpu1 slots=2".

    Raises:
        ConfigurationError: the file cannot be read, or a line of it makes no sense.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"got --hostfile {path}, which cannot be read: {error.strerror}. Name a file with a machine in "
            "each line"
        ) from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = 1
        for word in words[1:]:
            name, _, value = word.partition("=")
            # MPI's files have the most slots as well, which is nothing that a worker needs.
            if name not in ("slots", "max_slots", "max-slots") or not value.isdigit() or not int(value):
                raise ConfigurationError(
                    f"{path}, line {number}: got {word!r}, expected slots=N behind the name of a machine"
                )
            slots = int(value) if name == "slots" else slots
        hosts += [words[0]] * slots
    if not hosts:
        raise ConfigurationError(f"got --hostfile {path} without a machine, expected one in each line")
    return hosts


def address(host: str, simulate_cuda: int) -> str:
    """Return the address of a worker that a session starts by ssh, for `init_master_worker(workers=)`.

    An address stays what it is.
    """
    if "://" in host:
        return host
    return f"ssh://{host}" + (f"?simulate_cuda={simulate_cuda}" if simulate_cuda else "")
