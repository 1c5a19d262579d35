"""The file that a worker's output goes to where its master has started it: it does not grow for ever.

Whatever writes there, Python, kernels or processes of `dr.spmd`, appends to it, so it may be cut meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat

# A file of more bytes is cut, and so many stay.
_MOST, _KEPT = 64 << 20, 1 << 20
# A master gives a worker's log this name. The user's own files are left alone.
_NAME = re.compile(r"worker-\d+\.log")
_OUTPUT = 1


def cut(descriptor: int = _OUTPUT, most: int = _MOST, kept: int = _KEPT) -> bool:
    """Leave the last lines alone of a log that has grown large. Return whether it has been cut."""
    status = os.fstat(descriptor)
    if status.st_size <= most or not stat.S_ISREG(status.st_mode):
        return False
    path = f"/proc/self/fd/{descriptor}"
    appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    if not appends or not os.path.exists(path) or not _NAME.fullmatch(os.path.basename(os.readlink(path))):
        return False
    with open(path, "rb") as file:
        file.seek(status.st_size - kept)
        last = file.read(kept)
    # What is written between the two calls is lost. A lock would hold up kernels that print.
    os.ftruncate(descriptor, 0)
    left = f"(what was before this was removed: {status.st_size >> 20} MiB)\n".encode()
    os.write(descriptor, left + last.partition(b"\n")[2])
    return True
