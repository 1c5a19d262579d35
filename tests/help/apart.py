"""Workers that do not share their files, as if each had a machine of its own: then they meet at tcp ports.

And who listens where.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from processes import ListeningWorker, opened


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses where a process accepts TCP connections."""
    sockets, found = set(), set()
    for name in opened(pid):
        sockets |= set(re.findall(r"^socket:\[(\d+)\]$", name))
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                host, _, port = fields[1].partition(":")
                found.add(
                    (
                        socket.inet_ntop(socket.AF_INET, bytes.fromhex(host)[::-1])
                        if family == "tcp"
                        else host,
                        int(port, 16),
                    )
                )
    return found


@contextmanager
def apart(start: Callable[..., Any], folder: Path, channel: str) -> Iterator[Any]:
    """A session with two workers on loopback, each with a mount namespace of its own.

    Skips the test where there can be none.
    """
    under = ("unshare", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*under, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces take Linux, root and util-linux")
    workers = []
    try:
        for name in ("one", "two"):
            (folder / name).mkdir()
            workers.append(ListeningWorker(folder / name, "--listen", "tcp://127.0.0.1:0", under=under))
        with start(workers=[worker.address for worker in workers], data_channel=channel) as session:
            yield session
    finally:
        for worker in workers:
            worker.stop()
