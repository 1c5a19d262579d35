"""Which builds of Python this package refuses."""

from __future__ import annotations

import platform
import sys


def check_interpreter() -> None:
    """Raise ImportError in a free-threaded build of Python, whether its lock is on or off.

    A replay of a program tells by exact reference counts whether somebody else holds a value, and reads the
    interpreter's frames. Both are others in such a build.
    """
    if "t" in getattr(sys, "abiflags", ""):
        raise ImportError(
            f"distruntime relies on exact reference counts, and got a free-threaded Python "
            f"({platform.python_version()}t): start the ordinary build, "
            f"python{sys.version_info[0]}.{sys.version_info[1]}"
        )
