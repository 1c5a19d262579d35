"""Greetings as a master and a worker send them, for tests that speak the protocol by hand."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import Any

import torch

from distruntime.wire.messages import PROTOCOL, Hello, Join, Welcome

HELLO = Hello(
    PROTOCOL,
    "stranger",
    "new",
    b"token",
    60.0,
    False,
    0,
    torch.__version__,
    platform.python_version(),
    "somewhere",
    [],
    "",
)
JOIN = Join(None, 1, "somewhere", b"incarnation")
WELCOME = Welcome(
    PROTOCOL,
    b"incarnation",
    0,
    0.0,
    torch.__version__,
    platform.python_version(),
    "bad",
    os.getpid(),
    [],
    b"",
    b"",
    [["cpu", "bad", 1, 1, "", 0, 0, "", 0, []]],
    False,
    [],
)


def hello(**changes: Any) -> Hello:
    """Return a greeting that opens a session, with some fields changed."""
    return replace(HELLO, **changes)
