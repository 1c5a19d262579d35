"""The worker as a service: the unit that systemd takes, and logs that programs read."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from distruntime.wire.identity import user_name

# It names a file. A service runs in another folder than the person who asks for its unit.
_FILES = ("--key",)

_UNIT = """\
[Unit]
Description=distruntime worker
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={user}
EnvironmentFile=-/etc/default/distruntime-worker
ExecStart={command}
# Exit code 2 means settings that cannot be used.
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=2
TimeoutStopSec=20
# A connection takes a descriptor, and so does each large tensor in shared memory.
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=full
ProtectControlGroups=yes
ProtectKernelTunables=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""


def unit(arguments: Sequence[str]) -> str:
    """Return a systemd unit for a worker with these arguments of the command line."""
    program = shutil.which("distruntime-worker")
    command = [program] if program else [sys.executable, "-m", "distruntime_worker"]
    words = [*command, *_absolute([word for word in arguments if word != "--print-systemd"])]
    return _UNIT.format(user=user_name(), command=" ".join(map(_quoted, words)))


def _absolute(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if found and found[-1] in _FILES:
            word = str(Path(word).absolute())
        elif name in _FILES and equals:
            word = f"{name}={Path(value).absolute()}"
        found.append(word)
    return found


def _quoted(word: str) -> str:
    """Return a word as systemd reads it in a command."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if not word or any(c in word for c in " \t'\";") else word


@final
class JsonLines(logging.Formatter):
    """Writes each record as an object of JSON on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "host": self._host,
            "pid": os.getpid(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
