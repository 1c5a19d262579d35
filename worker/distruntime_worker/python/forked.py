"""A process that a function has forked, where it would go on as the worker or as a rank."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

# A worker puts another function in its place.
_exit = os._exit


def end_child() -> NoReturn:
    """End this process, as Python ends one: with the traceback and the code of what is being raised."""
    error = sys.exc_info()[1]
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code)
