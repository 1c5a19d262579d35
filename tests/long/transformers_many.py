"""As many architectures of `transformers` as build from a small config: loss and every gradient here and on a worker, with the count.

    PYTHONPATH=.:worker:tests python tests/long/transformers_many.py [--part 1/4] [model type ...]

About two hours; not in `make test`. Nothing is downloaded. An architecture counts if it builds small and its forward runs locally on
one of the batches below; what then differs on the worker makes the exit code 1. What differs in float32 is compared again in float64:
batch norm over two samples magnifies rounding beyond any fixed tolerance, a mistake stays as large as it was.

The comparisons run in a child process. One that crashes or hangs costs its own architecture, and a new child goes on with the next.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
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

MOST_PARAMETERS = 30_000_000
PATIENCE = 300.0  # seconds for one architecture; the slowest takes half a minute
AGREES, ONLY_IN_FLOAT64, DIFFERS, NOT_BUILT, DIED = "agrees", "agrees in float64 only", "differs", "not built", "crashed or hung"
Verdict = tuple[str, str, str]  # model type, one of the above, and why
# Every name that configs use for a size; each is set where the config has it.
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{
        "vocab_size": 99,
        "embedding_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
        "word_embed_proj_dim": 32,
        "state_size": 8,
    },
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "num_channels": 3, "layer_types": None},
    # Whether a layer is dropped is drawn in this process, and its dropout on the worker: from two generators there, from one here.
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "text_encoder_layerdrop"), 0.0),
    # So is some of the noise of `vits`: its flows draw it here and send it.
    **dict.fromkeys(("noise_scale", "noise_scale_duration"), 0.0),
}
_KINDS = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL")


def _config(config_class: Any, depth: int = 0) -> Any:
    """The config with every size that it has set small, in its parts too; if it refuses that, with fewer of them set."""
    known = inspect.signature(config_class).parameters
    plain = config_class()
    sizes = {name: size for name, size in _SMALL.items() if name in known or hasattr(plain, name)}
    for name in known:  # sizes of the stages of a vision model
        stages = getattr(plain, name, None)
        if isinstance(stages, (list, tuple)) and stages and all(type(n) is int and n >= 32 for n in stages):
            sizes[name] = type(stages)(max(8, n // 4) for n in stages)
    parts = {} if depth > 2 else {name: _config(part, depth + 1).to_dict() for name, part in _parts(config_class, plain)}
    careful = {k: v for k, v in sizes.items() if k not in ("head_dim", "layer_types", "num_key_value_heads")}
    widths = {
        k: v for k, v in sizes.items() if "layers" in k or k in ("vocab_size", "num_labels", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    for attempt in (sizes, careful, widths, {}):
        try:
            return config_class(**attempt, **parts)
        except Exception:  # any: a config checks its own numbers in its own way
            continue
    return plain


def _parts(config_class: Any, plain: Any) -> Iterator[tuple[str, Any]]:
    for name in config_class.sub_configs:
        part = getattr(plain, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            yield name, type(part)


def _classes(model_type: str) -> Iterator[Any]:
    for kind in _KINDS:
        names = getattr(modeling_auto, f"{kind}_MAPPING_NAMES").get(model_type)
        if names:
            yield getattr(transformers, names if isinstance(names, str) else names[0], None)


def _build(model_type: str) -> Any:
    """The first class of this architecture that builds small and runs here, with the batch that it takes; or the reason why none does."""
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    reasons = []
    for model_class in _classes(model_type):
        if model_class is None:
            continue
        try:
            config = _config(config_class)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                reasons.append(f"{model_class.__name__}: {size / 1e6:.0f} M parameters")
                continue
            torch.manual_seed(0)
            model = model_class(config)
        except Exception as error:  # any: it does not build from such a config, and is not counted
            reasons.append(f"{model_class.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
            continue
        for batch in _batches(config):
            try:
                _train(model, batch, "cpu")
            except Exception as error:  # any: not the batch that it takes
                reasons.append(f"{model_class.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
                continue
            return model, batch
    return "; ".join(reasons[:2]) or "no class"


def _batches(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 12), generator=generator)
    size = getattr(config, "image_size", 32)
    size = size[0] if isinstance(size, (list, tuple)) else size
    pixels = torch.randn(2, 3, size, size, generator=generator) if isinstance(size, int) and size <= 224 else torch.randn(2, 3, 32, 32)
    yield {"input_ids": ids, "labels": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"input_ids": ids}
    yield {"pixel_values": pixels, "labels": torch.tensor([1, 2])}
    yield {"pixel_values": pixels}
    yield {"input_ids": ids, "pixel_values": pixels}
    yield {"input_values": torch.randn(2, 4000, generator=generator)}
    yield {"input_features": torch.randn(2, 80, 128, generator=generator), "decoder_input_ids": ids}


def _train(model: Any, batch: dict[str, torch.Tensor], device: str) -> Any:
    model = model.to(device).train()
    model.zero_grad()
    torch.manual_seed(1)
    np.random.seed(1)  # what masks audio
    random.seed(1)
    out = model(**{name: value.to(device) for name, value in batch.items()})
    loss = getattr(out, "loss", None)
    if loss is None:
        floating = [t for t in tree_leaves(tuple(out.values())) if isinstance(t, torch.Tensor) and t.requires_grad]
        loss = sum((t if t.dtype is torch.float64 else t.float()).square().mean() for t in floating)
    loss.backward()
    return loss.detach(), {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _ties(model: nn.Module) -> int:
    return len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))


def _compare(model: Any, batch: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    """Raise `Disagreement` unless the model trains there as here. An error of the local run is its own."""
    ties = _ties(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(device: str) -> Any:
        model.to("cpu").load_state_dict(state)
        return _train(model, batch, device)

    check(lambda: run("cpu"), lambda: run(REMOTE), must_work=True, rtol=rtol, atol=atol)
    if _ties(model) != ties:
        raise Disagreement(f"{ties} tied parameters here, {_ties(model)} there")


def _compare_in_float64(model_type: str) -> None:
    """As `_compare`, with a fresh model whose numbers are float64, to tolerances that float32 could not meet."""
    model, batch = _build(model_type)
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    _compare(model.double(), doubled, rtol=1e-7, atol=1e-9)


def _verdict(model_type: str) -> Verdict:
    built = _build(model_type)
    if isinstance(built, str):
        return model_type, NOT_BUILT, built
    name = type(built[0]).__name__
    try:
        _compare(*built, rtol=1e-4, atol=1e-5)
    except Disagreement as difference:
        single = str(difference)
    else:
        return model_type, AGREES, name
    try:
        _compare_in_float64(model_type)
    except Exception as error:  # any: a model that does not run in float64 has not agreed there
        return model_type, DIFFERS, f"{name}: {single}; in float64: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return model_type, ONLY_IN_FLOAT64, f"{name}: in float32: {single}"


def _child(model_types: Sequence[str], out: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with dr.init_master_worker():
        for model_type in model_types:
            out.send(_verdict(model_type))
            if any(node.state != "ready" for node in dr.nodes()):  # it took its worker with it: the next one gets new workers
                return


def _verdicts(model_types: Sequence[str]) -> Iterator[Verdict]:
    """Compare every type; a child process that ends or is silent for too long costs the one that it had in hand."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        f"{counts[AGREES]} architectures agree, {counts[ONLY_IN_FLOAT64]} agree in float64 only, {counts[DIFFERS]} differ, "
        f"{counts[DIED]} crashed or hung, {counts[NOT_BUILT]} do not build from a small config"
    )
    return int(counts[DIFFERS] + counts[DIED] > 0)


if __name__ == "__main__":
    sys.exit(main())
