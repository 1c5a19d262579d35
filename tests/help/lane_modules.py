"""The modules of a lane, under their own names. Several lanes have a `run`, a `programs` or a `models`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def modules_of(*folders: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Give what imports a module of these folders. Behind the block no other test sees these modules."""
    names = {path.stem for folder in folders for path in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders]
    # A folder that was written a moment ago is found, too.
    importlib.invalidate_caches()
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
