"""`dr.data.from_pretrained`: a model of transformers whose weights lie at a worker."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import NotSupportedError, UsageError, without_our_frames
from ..session.session import active_session
from ..tensors.fetch import fetch
from .sent import run_at
from .sent_weights import texts_of
from .weights import Laid, fill, is_mesh, load_weights, names_apart, where

# A model's class and its config are transformers', which has no types.
_Theirs = Any  # type: ignore[explicit-any]

log = logging.getLogger("distruntime")

_FILES = ("config.json", "generation_config.json")


@without_our_frames
def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    node: object,
    cls: _Theirs = None,
    dtype: torch.dtype | None = None,
    placements: Laid = None,
) -> _Theirs:
    """Return a model of transformers whose folder lies at a worker, in evaluation mode.

    Its structure is made here, of the folder's `config.json`. Its weights are read there and never come here.
    Block until they are read.

    Args:
        folder: the path of the folder at the worker.
        node: the number of a node, a place, or a mesh, at each of whose nodes the folder lies.
        cls: a class of transformers, for example `AutoModel`. None means the one that the config names.
        dtype: what floating-point weights become. None leaves them as they are in the files.
        placements: how a mesh's members share the weights, as for `dr.load`. None gives each member all.

    Raises:
        FileNotFoundError: the folder, its config or its weights are not there.
        UsageError: the weights are of another model. NotSupportedError: the model's code is in the folder.
    """
    transformers: _Theirs = importlib.import_module("transformers")
    path = os.fspath(folder)
    home = active_session().places.residence(node.places[0], numbered=False) if is_mesh(node) else where(node)
    texts = fetch(run_at(home, texts_of, "dr.data.from_pretrained", path, [*_FILES]))
    assert isinstance(texts, list)
    if texts[0] is None:
        raise FileNotFoundError(
            f"{path} on {home.place} has no config.json: expected a folder of save_pretrained"
        )
    settings = json.JSONDecoder().decode(texts[0])
    kind = settings.get("model_type")
    if kind not in transformers.CONFIG_MAPPING or "auto_map" in settings:
        raise NotSupportedError(
            f"transformers {transformers.__version__} has no model type {kind!r}, or the folder brings code "
            "of its own: make the model under torch.device('meta'), and dr.load(folder, node=..., into=model)"
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict(settings)
    config._name_or_path = path
    model = _made(transformers, config, cls)
    model.eval()
    found = load_weights(path, node, placements=placements, dtype=dtype)
    found = _renamed(model, found)
    missing, more = names_apart(model, found)
    fill(model, found)
    if more:
        log.info("%s has weights that %s does not have: %s", path, type(model).__name__, ", ".join(more[:8]))
    device = node.device if is_mesh(node) else where(node).device
    if missing:
        _begin(model, missing, device, path)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                module._buffers[name] = buffer.to(device)
    if texts[1] is not None and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_dict(json.JSONDecoder().decode(texts[1]))
    return model


def _made(transformers: _Theirs, config: _Theirs, cls: _Theirs) -> _Theirs:
    """Return the model of a config, with parameters on `meta` and buffers with their values."""
    if cls is None:
        name = (config.architectures or [""])[0]
        cls = getattr(transformers, name, None)
        if cls is None:
            raise UsageError(
                f"config.json names the class {name!r}, which transformers {transformers.__version__} does "
                "not have: say which, cls=transformers.AutoModelForCausalLM"
            )
    make = getattr(cls, "_from_config", None) or getattr(cls, "from_config", None)
    if make is None:
        raise UsageError(
            f"cls={cls!r:.80}: expected a class of transformers' models, or one of its Auto classes"
        )
    with _without_weights():
        return make(config)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Put the parameters of modules that are made on `meta`.

    Buffers are computed, as no file has all of them.
    """
    real = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            kind = type(param)
            param = kind(param.to("meta"), requires_grad=param.requires_grad)
        real(self, name, param)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        # What has no device named would go to the current place.
        with torch.device("cpu"):
            yield
    finally:
        torch.nn.Module.register_parameter = real  # type: ignore[method-assign]


def _renamed(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights under the model's own names: a file may have those of its base model, or more."""
    own, prefix = set(model.state_dict()), f"{getattr(model, 'base_model_prefix', '')}."
    longer = {f"{prefix}{name}": name for name in found}
    shorter = {name.removeprefix(prefix): name for name in found}
    same = {name: name for name in found}
    best = max((same, longer, shorter), key=lambda names: len(own & names.keys()))
    return {name: found[old] for name, old in best.items()}


def _begin(model: _Theirs, missing: list[str], device: torch.device, path: str) -> None:
    """Give what no file has its initial values, as transformers does, where whole modules are missing."""
    owners = {name.rpartition(".")[0] for name in missing}
    gone = set(missing)
    for owner in owners:
        module = model.get_submodule(owner)
        names = [name for name, p in module._parameters.items() if p is not None]
        if not names or not all(f"{owner}.{name}" in gone for name in names):
            raise UsageError(
                f"{path} has no {', '.join(missing[:4])} for {type(model).__name__}. Are these the weights "
                "of another model? dr.load(folder, node=...) returns them as they are"
            )
    log.warning("%s has no %s: they begin with new values", path, ", ".join(missing[:8]))
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for name, p in module._parameters.items():
            if p is not None:
                there = torch.empty(p.shape, dtype=p.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=p.requires_grad)
        with torch.no_grad():
            model._init_weights(module)
