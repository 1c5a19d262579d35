"""Python imports this first where the lane puts this folder on the path: see ../torchvision_operators.py.

The scripts in ../as_cuda run as they are. Some of their libraries import torchvision, whose wheel on PyPI
does not load beside a torch that is built for the CPU.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            file = Path(__file__).parents[1] / "torchvision_operators.py"
            spec = importlib.util.spec_from_file_location("torchvision_operators", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            module.load()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
