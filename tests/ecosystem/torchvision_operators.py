"""Lets torchvision's Python part be imported where its compiled part does not load.

The wheel on PyPI is built for CUDA, and its operators do not load beside a torch that is built for the CPU.
Without them `import torchvision` raises, and with it whatever imports torchvision if it is installed:
transformers, Lightning, timm.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def load() -> None:
    """Load the operators, or declare the two that torchvision's import asks for."""
    if _declared:
        return
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def loaded() -> bool:
    return not _declared
