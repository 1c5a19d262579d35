"""Small tools that scripts add to a loop of their own: optimizers, averages, losses, types."""

from __future__ import annotations

import torch
from torch import nn

from cases import case
from small import classified, classifier


def steps(device: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 4) -> torch.Tensor:
    x, y = (part.to(device) for part in classified())
    losses = []
    for _ in range(number):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@case("schedulefree", "AdamWScheduleFree, its train and eval")
def schedulefree(device: str) -> dict[str, object]:
    from schedulefree import AdamWScheduleFree

    model = classifier().to(device)
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    losses = steps(device, model, optimizer)
    optimizer.eval()
    return {"losses": losses, "weight": model[0].weight}


@case("pytorch_optimizer", "Lion, AdaBelief, SOAP, Muon-like and others", tolerance=1e-3)
def pytorch_optimizer(device: str) -> dict[str, object]:
    import pytorch_optimizer as zoo

    found: dict[str, object] = {}
    for name in ("Lion", "AdaBelief", "SOAP", "Prodigy", "ScheduleFreeSGD", "Adan"):
        model = classifier().to(device)
        optimizer = getattr(zoo, name)(model.parameters(), lr=1e-2)
        getattr(optimizer, "train", lambda: None)()
        found[name] = steps(device, model, optimizer)
    return found


@case("ema-pytorch", "EMA of a model")
def ema_pytorch(device: str) -> dict[str, object]:
    from ema_pytorch import EMA

    model = classifier().to(device)
    average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        steps(device, model, optimizer, 1)
        average.update()
    with torch.no_grad():
        return {"averaged": average(classified()[0].to(device))}


@case("vector-quantize-pytorch", "VectorQuantize with a moving average", tolerance=1e-3)
def vector_quantize(device: str) -> dict[str, object]:
    from vector_quantize_pytorch import VectorQuantize

    layer = VectorQuantize(dim=8, codebook_size=16, decay=0.8).to(device)
    quantized, indices, loss = layer(torch.randn(2, 10, 8).to(device))
    return {"quantized": quantized, "indices": indices, "loss": loss}


@case("pytorch-metric-learning", "a miner, TripletMarginLoss, NTXentLoss", tolerance=1e-3)
def metric_learning(device: str) -> dict[str, object]:
    from pytorch_metric_learning import losses, miners

    points = torch.randn(12, 4).to(device).requires_grad_()
    classes = torch.arange(12).remainder(3).to(device)
    pairs = miners.MultiSimilarityMiner()(points, classes)
    loss = losses.TripletMarginLoss()(points, classes, pairs) + losses.NTXentLoss()(points, classes)
    loss.backward()
    return {"loss": loss, "gradient": points.grad}


@case("jaxtyping", "shapes of remote tensors, checked by isinstance")
def jaxtyping(device: str) -> dict[str, object]:
    from jaxtyping import Float, Int

    x = torch.randn(4, 3).to(device)
    return {
        "floats": isinstance(x, Float[torch.Tensor, "4 3"]),
        "other": isinstance(x, Float[torch.Tensor, "5 3"]),
        "integers": isinstance(x.long(), Int[torch.Tensor, "_ _"]),
        "x": x,
    }
