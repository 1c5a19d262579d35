"""Layers over partitioned tensors: `y = dr.nn.Conv2d(P, 3, 8, 3, padding=1)(P.scatter(x))`.

Each takes the shards of a tensor, a list in the order of its partition's places, and returns such a list.
What it computes is what the layer of `torch.nn` of the same name computes of the whole, and so are the
gradients. Its first argument is the partition, and the others are torch's. docs/layers.md has examples.
"""

from __future__ import annotations

from functools import partial

from .between import Each, Repartition
from .classes import CrossEntropyLoss
from .convolutions import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .features import Embedding, Linear
from .losses import (
    BCELoss,
    BCEWithLogitsLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    PoissonNLLLoss,
    SmoothL1Loss,
)
from .norms import BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm, RMSNorm
from .pools import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d, Upsample

__all__ = [
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Each",
    "Embedding",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "PoissonNLLLoss",
    "RMSNorm",
    "Repartition",
    "SmoothL1Loss",
    "Upsample",
]
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
