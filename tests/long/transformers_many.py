"""As many architectures of `transformers` as build from a small config: loss and every gradient here and on a
worker, with the count.

    PYTHONPATH=.:worker:tests/help python tests/long/transformers_many.py [--part 1/4] [model type ...]

About two hours; not in `make test`. Nothing is downloaded. An architecture counts if it builds small and its
forward runs locally on one of the batches below; what then differs on the worker makes the exit code 1. What
differs in float32 is compared again in float64: batch norm over two samples magnifies rounding beyond any
fixed tolerance, a mistake stays as large as it was.

The comparisons run in a child process. One that crashes or hangs costs its own architecture, and a new child
goes on with the next.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import importlib
import inspect
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import distruntime as dr
from agree import REMOTE, Disagreement, check

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")
import transformers  # noqa: E402  # reads the environment when imported
from transformers.models.auto import modeling_auto  # noqa: E402

MOST_PARAMETERS = 100_000_000
PATIENCE = 300.0  # seconds for one architecture; the slowest takes half a minute
AGREES, ONLY_IN_FLOAT64, DIFFERS, NOT_BUILT, DIED = (
    "agrees",
    "agrees in float64 only",
    "differs",
    "not built",
    "crashed or hung",
)
Verdict = tuple[str, str, str]  # model type, one of the above, and why
# Every name that configs use for a size; each is set where the config has it.
_SMALL = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "encoder_hidden_size",
            "decoder_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(
        (
            "num_encoder_layers",
            "num_decoder_layers",
            "encoder_num_hidden_layers",
            "decoder_num_hidden_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "hidden_dim",
            "ffn_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "max_source_positions",
            "max_target_positions",
            "n_ctx",
            "max_seq_len",
        ),
        64,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **{
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    **{
        "vocab_size": 99,
        "embedding_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
        "word_embed_proj_dim": 32,
        "state_size": 8,
    },
    "use_cache": False,
    **{
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "num_channels": 3,
        "layer_types": None,
    },
}
# Whether a layer is dropped is drawn in this process, and its dropout on the worker: from two generators
# there, from one here. So is some of the noise of `vits`: its flows draw it here and send it.
_NO_CHANCE = dict.fromkeys(
    (
        "layerdrop",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "text_encoder_layerdrop",
        "noise_scale",
        "noise_scale_duration",
    ),
    0.0,
)
_MISSING = object()
_KINDS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL",
)


# From all sizes to none, for configs whose numbers depend on each other: sizes left alone are those whose
# names hold one of these.
_LEFT_ALONE = ((), ("layer_types", "num_key_value_heads"), ("layer_types", "head", "lora", "qk_", "patch"))


def _configs(config_class: Any) -> Iterator[Any]:
    """The config with every size that it has set small, in its parts too; then with fewer and fewer of them
    set.
    """
    seen = set()
    for level in range(len(_LEFT_ALONE) + 2):
        try:
            config = _config(config_class, level)
            text = str(config.to_dict())
        except Exception:  # any: some configs refuse to be read
            continue
        if text not in seen:
            seen.add(text)
            yield config


def _config(config_class: Any, level: int, depth: int = 0) -> Any:
    known = inspect.signature(config_class).parameters
    plain = config_class()
    sizes = {
        name: size
        for name, size in _SMALL.items()
        if name in known or _get(plain, name, _MISSING) is not _MISSING
    }
    chance: dict[str, Any] = {
        name: value
        for name, value in _NO_CHANCE.items()
        if name in known or _get(plain, name, _MISSING) is not _MISSING
    }
    if (
        _get(plain, "attention_type") == "block_sparse"
    ):  # too short for that, its first forward builds other layers, and so draws here
        chance["attention_type"] = "original_full"
    for name in (
        "rope_scaling",
        "rope_parameters",
    ):  # how the half of a head of 8 is shared out between time, height and width
        rope = _get(plain, name)
        if (
            isinstance(rope, dict) and rope.get("rope_type") == "default"
        ):  # those who share nothing out leave it alone
            sizes[name] = {**rope, "mrope_section": [2, 1, 1]}
    for name in known:  # sizes of the stages of a vision model
        stages = _get(plain, name)
        if isinstance(stages, (list, tuple)) and stages and all(type(n) is int and n >= 32 for n in stages):
            sizes[name] = type(stages)(max(8, n // 4) for n in stages)
    parts = (
        {}
        if depth > 2
        else {name: _config(part, level, depth + 1).to_dict() for name, part in _parts(config_class, plain)}
    )
    attempts = [
        {k: v for k, v in sizes.items() if not any(word in k for word in words)} for words in _LEFT_ALONE
    ]
    attempts.append(
        {
            k: v
            for k, v in sizes.items()
            if "layers" in k or k in ("vocab_size", "num_labels") or k.endswith("token_id")
        }
    )
    attempts.append({})
    for attempt in attempts[level:]:
        try:
            return config_class(**attempt, **chance, **parts)
        except Exception:  # any: a config checks its own numbers in its own way
            continue
    return plain


def _get(config: Any, name: str, missing: Any = None) -> Any:
    try:
        return getattr(config, name, missing)
    except Exception:  # any: what differs between its layers, a config refuses to name
        return missing


def _parts(config_class: Any, plain: Any) -> Iterator[tuple[str, Any]]:
    for name in config_class.sub_configs:
        part = _get(plain, name)
        if isinstance(part, transformers.PretrainedConfig):
            yield name, type(part)


def _classes(model_type: str, config_class: Any) -> Iterator[Any]:
    """What the auto classes know for it; else, for a part of another architecture, the classes of its module
    that take this very config.
    """
    known = False
    for kind in _KINDS:
        names = getattr(modeling_auto, f"{kind}_MAPPING_NAMES").get(model_type)
        if (
            names
            and (model_class := getattr(transformers, names if isinstance(names, str) else names[0], None))
            is not None
        ):
            known = True
            yield model_class
    if known:
        return
    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return
    for model_class in reversed(list(vars(module).values())):  # the outermost stands last
        if (
            isinstance(model_class, type)
            and issubclass(model_class, transformers.PreTrainedModel)
            and model_class.config_class is config_class
        ):
            yield model_class


def _build(model_type: str) -> Any:
    """The first class of this architecture that builds small and runs here, with the batch that it takes; or
    why none does.

    It comes as a function that builds it: a model that has run on one device may keep what it has computed
    there.
    """
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    reasons: dict[str, int] = {}  # and how much each says: that an argument is missing or strange says little
    for model_class in _classes(model_type, config_class):
        try:
            takes = inspect.signature(model_class.forward).parameters
        except ImportError as error:  # a stand-in for a class that needs a package that is not here
            reasons[_reason(model_class, error)] = 4
            continue
        for config in _configs(config_class):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in model_class(config).parameters())
                if size > MOST_PARAMETERS:
                    reasons[f"{model_class.__name__}: {size / 1e6:.0f} M parameters"] = 1
                    continue
                build = functools.partial(_seeded, model_class, config)
                model = build()
            except Exception as error:  # any: it does not build from such a config, and is not counted
                reasons[_reason(model_class, error)] = 2
                continue
            for batch in _batches(config):
                if not all(name in takes for name in batch):
                    continue
                try:
                    _train(model, batch, "cpu")
                except Exception as error:  # any: not the batch that it takes
                    reasons[_reason(model_class, error)] = 0 if "required" in str(error) else 3
                    continue
                return build, batch
    return "; ".join(sorted(reasons, key=lambda reason: -reasons[reason])[:2]) or "no class"


def _seeded(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(copy.deepcopy(config))


def _reason(model_class: Any, error: Exception) -> str:
    return f"{model_class.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:100]}"


def _find(config: Any, *names: str, otherwise: int) -> int:
    """The first of these numbers that a config or one of its parts has."""
    parts = [config, *(_get(config, name) for name in config.sub_configs)]
    for name in names:
        for part in parts:
            value = _get(part, name)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if type(value) is int and value:
                return value
    return otherwise


def _batches(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What architectures take, the usual first."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.randint(3, 90, (2, 12), generator=generator)
    size = _find(config, "image_size", otherwise=32)
    channels = _find(config, "num_channels", "in_channels", otherwise=3)
    pixels = normal(2, channels, size, size) if size <= 224 else normal(2, channels, 32, 32)
    frames = (
        normal(2, _find(config, "num_frames", otherwise=4), channels, size, size)
        if size <= 224
        else normal(2, 4, channels, 32, 32)
    )
    bins = _find(config, "num_mel_bins", "feature_size", "n_mels", "model_in_dim", otherwise=80)
    width = _find(config, "hidden_size", "d_model", "embed_dim", otherwise=32)
    patch = _find(config, "patch_size", otherwise=8)
    flat = normal(16, channels * _find(config, "temporal_patch_size", otherwise=1) * patch * patch)
    grid = torch.tensor([[1, 4, 4]])
    boxes = torch.randint(0, 30, (2, 12, 2), generator=generator).repeat(1, 1, 2) + torch.tensor([0, 0, 5, 5])
    yield {"input_ids": ids, "labels": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"input_ids": ids}
    yield {"pixel_values": pixels, "labels": torch.tensor([1, 2])}
    yield {"pixel_values": pixels}
    yield {"input_ids": ids, "pixel_values": pixels}
    yield {"input_values": normal(2, 4000)}
    yield {"input_features": normal(2, bins, 128), "decoder_input_ids": ids}
    yield {"input_features": normal(2, bins, 128)}
    yield {"input_features": normal(2, 128, bins)}
    yield {"input_features": normal(2, 128, bins), "decoder_input_ids": ids}
    yield {"input_ids": ids, "bbox": boxes}
    yield {"input_ids": ids, "bbox": boxes, "pixel_values": pixels}
    yield {"pixel_values": frames}
    yield {"pixel_values_videos": frames}
    yield {"input_ids": ids, "pixel_values": frames}
    yield {"pixel_values": normal(2, channels, 64, 64)}
    yield {"pixel_values": normal(2, channels, 224, 224)}
    yield {"pixel_values": normal(2, 2, 1, 64, 64)}  # pairs of images, grey
    yield {"pixel_values": flat, "grid_thw": grid}
    yield {"hidden_states": flat, "grid_thw": grid}
    yield {"hidden_states": normal(2, 12, width)}
    yield {"inputs_embeds": normal(2, 12, width)}
    yield {"hidden_states": normal(2, channels, 64, 64)}
    yield {"spectrogram": normal(2, 20, bins)}
    yield {"pixel_values": pixels, "decoder_input_ids": ids}
    yield {"flattened_patches": normal(2, 16, channels * patch * patch + 2), "decoder_input_ids": ids}
    yield {"flattened_patches": normal(2, 16, channels * patch * patch + 2)}
    yield {"input_values": normal(2, 1, 4000)}
    yield {"input_values": normal(2, 128, bins)}
    context = _find(config, "context_length", otherwise=32)
    yield {"past_values": normal(2, context, _find(config, "num_input_channels", otherwise=1))}
    yield {
        "past_values": normal(2, context),
        "past_values_padding": torch.zeros(2, context),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    }


def _train(model: Any, batch: dict[str, torch.Tensor], device: str) -> Any:
    model = model.to(device).train()
    model.zero_grad()
    torch.manual_seed(1)
    np.random.seed(1)  # what masks audio
    random.seed(1)
    out = model(**{name: value.to(device) for name, value in batch.items()})
    loss = getattr(out, "loss", None)
    if loss is None:
        leaves = tree_leaves(tuple(out.values()) if isinstance(out, Mapping) else out)
        floating = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        loss = sum((t if t.dtype is torch.float64 else t.float()).square().mean() for t in floating)
    loss.backward()
    return loss.detach(), {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def _ties(model: nn.Module) -> int:
    return len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))


def _compare(build: Callable[[], Any], batch: dict[str, torch.Tensor]) -> None:
    """Raise `Disagreement` unless the model trains there as here. An error of the local run is its own."""
    ties = []

    def run(device: str) -> Any:
        model = build()
        trained = _train(model, batch, device)
        ties.append(_ties(model))
        return trained

    check(lambda: run("cpu"), lambda: run(REMOTE), must_work=True, rtol=1e-4, atol=1e-5)
    if ties[0] != ties[1]:
        raise Disagreement(f"{ties[0]} tied parameters here, {ties[1]} there")


def _compare_in_float64(build: Callable[[], Any], batch: dict[str, torch.Tensor]) -> None:
    """As `_compare`, with models whose numbers are float64, a hundred times as strict, by the length of each
    gradient.

    Not number by number: where a gradient reaches 1e7, its small elements carry the rounding of the large
    ones.
    """
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    results = []

    def run(device: str) -> Any:
        results.append(_train(build().double(), doubled, device))
        return results[-1]

    check(lambda: run("cpu"), lambda: run(REMOTE), must_work=True, values=False)
    pairs = list(zip(*map(tree_leaves, dr.fetch(results)), strict=True))
    longest = max(here.norm().item() for here, _ in pairs)
    for i, (here, there) in enumerate(pairs):
        apart, length = (here - there).norm().item(), here.norm().item()
        if (
            not apart <= 1e-6 * length + 1e-14 * longest
        ):  # a bias in front of a batch norm has rounding for a gradient
            raise Disagreement(f"result {i}: {apart:.3g} apart, with a length of {length:.3g}")


def _verdict(model_type: str) -> Verdict:
    built = _build(model_type)
    if isinstance(built, str):
        return model_type, NOT_BUILT, built
    name = built[0].args[0].__name__
    try:
        _compare(*built)
    except Disagreement as difference:
        single = str(difference)
    else:
        return model_type, AGREES, name
    try:
        _compare_in_float64(*built)
    except Exception as error:  # any: a model that does not run in float64 has not agreed there
        return (
            model_type,
            DIFFERS,
            f"{name}: {single}; in float64: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        )
    return model_type, ONLY_IN_FLOAT64, f"{name}: in float32: {single}"


def _child(model_types: Sequence[str], out: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with dr.init_master_worker():
        for model_type in model_types:
            out.send(_verdict(model_type))
            # It took its worker with it: the next one gets new workers.
            if any(node.state not in ("ready", "busy") for node in dr.nodes()):
                return


def _verdicts(model_types: Sequence[str]) -> Iterator[Verdict]:
    """Compare every type; a child process that ends or is silent for too long costs the one that it had in
    hand.
    """
    processes = multiprocessing.get_context("spawn")
    left = list(model_types)
    while left:
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=_child, args=(left, theirs))
        child.start()
        theirs.close()
        why, answered = f"no answer within {PATIENCE:.0f} s", False
        try:
            while left and ours.poll(PATIENCE):
                verdict = ours.recv()
                answered = True
                left.pop(0)
                yield verdict
        except EOFError:
            why = ""
        child.join(0 if why and left else 30)
        child.kill()
        child.join()
        if left and (why or child.exitcode or not answered):
            yield left.pop(0), DIED, why or f"the process ended with {child.exitcode}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_types", nargs="*", help="default: all that transformers knows, sorted")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only the Kth of N consecutive parts")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    names = options.model_types or sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    chosen = names[len(names) * (part - 1) // parts : len(names) * part // parts]
    counts: collections.Counter[str] = collections.Counter()
    for model_type, verdict, why in _verdicts(chosen):
        counts[verdict] += 1
        print(f"  {model_type}: {verdict}: {why}", flush=True)
    print(
        f"{counts[AGREES]} architectures agree, {counts[ONLY_IN_FLOAT64]} agree in float64 only, "
        f"{counts[DIFFERS]} differ, "
        f"{counts[DIED]} crashed or hung, {counts[NOT_BUILT]} do not build from a small config"
    )
    return int(counts[DIFFERS] + counts[DIED] > 0)


if __name__ == "__main__":
    sys.exit(main())
