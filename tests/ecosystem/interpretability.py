"""Libraries that look into a model, or measure it."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from cases import case


@case("captum", "IntegratedGradients, DeepLift, LayerConductance, Occlusion, FeatureAblation", tolerance=1e-3)
def captum(device: str) -> dict[str, object]:
    from captum import attr

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device).eval()
    x = torch.rand(4, 6).to(device)
    found, delta = attr.IntegratedGradients(model).attribute(
        x, target=1, n_steps=10, return_convergence_delta=True
    )
    return {
        "integrated": found,
        "delta": delta + 1,
        "saliency": attr.Saliency(model).attribute(x, target=1),
        "conductance": attr.LayerConductance(model, model[0]).attribute(x, target=1, n_steps=10),
        "occlusion": attr.Occlusion(model).attribute(x, (2,), target=1),
        "deeplift": attr.DeepLift(model).attribute(x, target=1),
        "ablation": attr.FeatureAblation(model).attribute(x, target=1),
    }


@case("nnsight", "trace: save, change and read activations")
def nnsight(device: str) -> dict[str, object]:
    from nnsight import NNsight

    net = nn.Sequential(OrderedDict([("first", nn.Linear(5, 10)), ("second", nn.Linear(10, 2))])).to(device)
    model = NNsight(net)
    with model.trace(torch.ones(1, 5).to(device)):
        hidden = model.first.output.clone().save()
        model.first.output[:, 0] = 0
        out = model.output.save()
    return {"hidden": hidden, "out": out}


@case("transformer-lens", "run_with_cache, hooks, activation patching")
def transformer_lens(device: str) -> dict[str, object]:
    from transformer_lens import HookedTransformer, HookedTransformerConfig, patching

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=32,
        n_ctx=32,
        d_head=8,
        n_heads=4,
        d_vocab=50,
        act_fn="gelu",
        d_mlp=64,
        device=device,
        seed=0,
    )
    model = HookedTransformer(config)
    for parameter in model.parameters():
        wave = torch.sin(torch.arange(parameter.numel()).float()) * 0.2
        parameter.data = wave.reshape(parameter.shape).to(device)
    tokens = torch.arange(10)[None].to(device)
    corrupted = tokens.clone()
    corrupted[0, 3] = 20
    logits, cache = model.run_with_cache(tokens)

    def zero(value: torch.Tensor, hook: object) -> torch.Tensor:
        value[:, :, 0] = 0
        return value

    patched = patching.get_act_patch_resid_pre(model, corrupted, cache, lambda out: out[0, -1, 3])
    return {
        "logits": logits,
        "pattern": cache["pattern", 0],
        "hooked": model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", zero)]),
        "patched": patched,
        "loss": model(tokens, return_type="loss"),
    }


@case("torchmetrics", "a collection of classification metrics; image and regression metrics")
def torchmetrics(device: str) -> dict[str, object]:
    import torchmetrics as tm

    scores, classes = torch.rand(40, 5).softmax(-1).to(device), torch.randint(0, 5, (40,)).to(device)
    kinds = (tm.Accuracy, tm.F1Score, tm.ConfusionMatrix, tm.AUROC, tm.AveragePrecision)
    several = tm.MetricCollection([kind(task="multiclass", num_classes=5) for kind in kinds]).to(device)
    for _ in range(3):
        several.update(scores, classes)
    a, b = (torch.rand(2, 3, 32, 32).to(device) for _ in range(2))
    alone = (
        tm.image.PeakSignalNoiseRatio(data_range=1.0),
        tm.image.StructuralSimilarityIndexMeasure(data_range=1.0),
    )
    flat = (tm.MeanSquaredError(), tm.R2Score(), tm.SpearmanCorrCoef())
    return {
        "several": dict(several.compute()),
        "images": [metric.to(device)(a, b) for metric in alone],
        "numbers": [metric.to(device)(a.flatten(), b.flatten()) for metric in flat],
    }
