"""Small data in the formats that the scripts of list.toml look for: python data.py NAME FOLDER ...

Each function writes some into a folder.
Texts and pictures are drawn from a seed, or come from packages that are installed anyway.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Maker = Callable[[Path], None]
MAKERS: dict[str, Maker] = {}
WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards quietly mix strange potions "
    "in an old tower near the river and nobody ever asks them why"
).split()


def maker(make: Maker) -> Maker:
    MAKERS[make.__name__] = make
    return make


def sentences(number: int, seed: int = 0) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(number):
        yield " ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 12)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# -- texts ------------------------------------------------------------------------------------------------


@maker
def nanogpt_text(folder: Path) -> None:
    """Write train.bin, val.bin and meta.pkl, as nanoGPT's prepare.py does for characters."""
    text = "\n".join(sentences(400))
    letters = sorted(set(text))
    numbers = {letter: k for k, letter in enumerate(letters)}
    ids = np.array([numbers[letter] for letter in text], dtype=np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    ids[: -len(ids) // 10].tofile(folder / "train.bin")
    ids[-len(ids) // 10 :].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": numbers}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


@maker
def wikitext(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt."""
    for seed, (name, number) in enumerate({"train": 150, "valid": 20, "test": 20}.items()):
        write(folder / f"{name}.txt", "\n".join(f" {line} " for line in sentences(number, seed)) + "\n")


@maker
def penn(folder: Path) -> None:
    write(folder / "train.txt", "\n".join(sentences(9000)) + "\n")


@maker
def text(folder: Path) -> None:
    write(folder / "input.txt", "\n".join(sentences(400)))


@maker
def stories(folder: Path) -> None:
    """Write two shards of numbers below 64, as llama2.c's tinystories.py does for words."""
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(2):
        draw = np.random.default_rng(k)
        ids = (np.cumsum(draw.integers(0, 3, 4000)) % 64).astype(np.uint16)
        ids.tofile(folder / f"data{k:02d}.bin")


# -- models and data sets of the hub, in the folders where their names point --------------------------------


def tokenizer(folder: Path) -> int:
    """Write a tokenizer that knows the words, and return how many tokens it has."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: k for k, word in enumerate([*special, *sorted(set(WORDS))])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_max_length=128,
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return len(vocabulary)


@maker
def tiny_bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=tokenizer(folder), **size)).save_pretrained(folder)


@maker
def tiny_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"vocab_size": tokenizer(folder), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**size, **tokens)).save_pretrained(folder)


def lines_of_json(path: Path, rows: list[dict[str, object]]) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


@maker
def texts(folder: Path) -> None:
    lines_of_json(folder / "train.jsonl", [{"text": line} for line in sentences(40)])


@maker
def prompts(folder: Path) -> None:
    lines_of_json(folder / "train.jsonl", [{"prompt": line} for line in sentences(40)])


@maker
def preferences(folder: Path) -> None:
    words = list(sentences(120))
    rows = zip(words[::3], words[1::3], words[2::3])
    lines_of_json(folder / "train.jsonl", [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in rows])


@maker
def alpaca(folder: Path) -> None:
    words = list(sentences(120))
    rows = zip(words[::3], words[1::3], words[2::3])
    lines_of_json(folder / "train.jsonl", [{"instruction": a, "input": b, "output": c} for a, b, c in rows])


@maker
def mrpc(folder: Path) -> None:
    """Write pairs of sentences with labels, as one of the parts of GLUE."""
    names = {"train": 64, "validation": 20, "test": 8}
    for seed, (name, number) in enumerate(names.items()):
        words = list(sentences(2 * number, seed))
        rows = [
            {"sentence1": a, "sentence2": a if k % 2 else b, "label": k % 2, "idx": k}
            for k, (a, b) in enumerate(zip(words[::2], words[1::2]))
        ]
        lines_of_json(folder / f"{name}.jsonl", rows)
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in names)
    write(folder / "README.md", f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


@maker
def glue_metric(folder: Path) -> None:
    """Write a metric that `evaluate.load("glue", "mrpc")` finds: accuracy and F1."""
    write(
        folder / "glue.py",
        """import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score


class Glue(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions)),
        }
""",
    )


@maker
def unet(folder: Path) -> None:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    )
    model.save_config(folder)


@maker
def elevators(folder: Path) -> None:
    """Write a table of 18 columns and what depends on them, as the notebooks of gpytorch load it."""
    from scipy.io import savemat

    draw = np.random.default_rng(0)
    columns = draw.random((300, 18))
    value = np.sin(3 * columns[:, 0]) + columns[:, 1] * columns[:, 2] + 0.05 * draw.standard_normal(300)
    folder.mkdir(parents=True, exist_ok=True)
    savemat(folder / "elevators.mat", {"data": np.column_stack([columns, value])})


# -- pictures ---------------------------------------------------------------------------------------------


def pictures(number: int, size: int, channels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of ten classes, each a bright square at a place of its own, and their labels."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, number)
    images = draw.integers(0, 60, (number, size, size, channels))
    side = size // 4
    for image, label in zip(images, labels):
        row, column = divmod(int(label), 4)
        image[row * side : (row + 1) * side, column * side : (column + 1) * side] += 150
    return images.astype(np.uint8), labels.astype(np.uint8)


def mnist_of(folder: Path, train: int, test: int) -> None:
    """Write the four files of MNIST, unpacked, where torchvision's class looks for them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for seed, (name, number) in enumerate({"train": train, "t10k": test}.items()):
        images, labels = pictures(number, 28, 1, seed)
        head = struct.pack(">iiii", 0x803, number, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, number) + labels.tobytes())


@maker
def mnist(folder: Path) -> None:
    mnist_of(folder, 640, 200)


@maker
def mnist_small(folder: Path) -> None:
    mnist_of(folder, 200, 100)


@maker
def mnist1000(folder: Path) -> None:
    """Write more pictures, for a script that prints at each hundredth batch of a hundred."""
    mnist_of(folder, 10000, 200)


@maker
def mnist_many(folder: Path) -> None:
    mnist_of(folder, 21000, 100)


@maker
def cifar10(folder: Path) -> None:
    """Write the six batches of CIFAR-10; the preamble "sums" lets torchvision's class read them."""
    cifar(folder / "cifar-10-batches-py", [f"data_batch_{k}" for k in range(1, 6)], "test_batch", "labels")


@maker
def cifar100(folder: Path) -> None:
    cifar(folder / "cifar-100-python", ["train"], "test", "fine_labels")


def cifar(folder: Path, train: list[str], test: str, key: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate([*train, test]):
        images, labels = pictures(600 // len(train) if name != test else 100, 32, 3, seed)
        flat = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        (folder / name).write_bytes(pickle.dumps({"data": flat, key: labels.tolist()}))
    names = {"label_names": list("abcdefghij"), "fine_label_names": list("abcdefghij")}
    for name in ("batches.meta", "meta"):
        (folder / name).write_bytes(pickle.dumps(names))


@maker
def bsds300(folder: Path) -> None:
    """Write pictures of two folders, train and test."""
    from PIL import Image

    for seed, (name, number) in enumerate({"train": 16, "test": 10}.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for k, image in enumerate(pictures(number, 272, 3, seed)[0]):
            Image.fromarray(image).save(folder / name / f"{k}.jpg")


@maker
def folder_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for k, image in enumerate(pictures(12, 16, 3)[0]):
        Image.fromarray(image).save(folder / f"{k}.png")


@maker
def class_pictures(folder: Path) -> None:
    """Write pictures of four classes, each in a folder of its own, to train with and to validate."""
    from PIL import Image

    for seed, (name, number) in enumerate({"train": 32, "validation": 16}.items()):
        for k, image in enumerate(pictures(number, 32, 3, seed)[0]):
            place = folder / name / f"class{k % 4}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{k}.png")


# -- graphs -----------------------------------------------------------------------------------------------


def citations(papers: int, words: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the words of papers, their classes, and who cites whom, mostly within a class."""
    draw = np.random.default_rng(seed)
    classes = np.concatenate([np.arange(7), draw.integers(0, 7, papers - 7)])
    features = (
        draw.random((papers, words)) < 0.05 + 0.3 * (np.arange(words) % 7 == classes[:, None])
    ).astype(int)
    edges = draw.integers(0, papers, (6 * papers, 2))
    near = (classes[edges[:, 0]] == classes[edges[:, 1]]) | (draw.random(len(edges)) < 0.1)
    return features, classes, edges[near & (edges[:, 0] != edges[:, 1])]


@maker
def cora(folder: Path) -> None:
    """Write cora.content and cora.cites, as long as the published ones."""
    cora_of(folder, 2708)


@maker
def cora_small(folder: Path) -> None:
    cora_of(folder, 1700)


def cora_of(folder: Path, papers: int) -> None:
    features, classes, edges = citations(papers)
    lines = [
        "\t".join([str(1000 + k), *map(str, row), f"class_{label}"])
        for k, (row, label) in enumerate(zip(features, classes))
    ]
    write(folder / "cora.content", "\n".join(lines) + "\n")
    write(folder / "cora.cites", "".join(f"{1000 + a}\t{1000 + b}\n" for a, b in edges))


@maker
def planetoid(folder: Path) -> None:
    """Write the eight files of Cora that torch_geometric's Planetoid looks for."""
    from scipy.sparse import csr_matrix

    features, classes, edges = citations(1200)
    graph: dict[int, list[int]] = {k: [] for k in range(len(classes))}
    for a, b in edges.tolist():
        graph[a].append(b)
    # The first 140 have labels to train with, and the last 200 are for the test.
    parts = {"": slice(0, 140), "all": slice(0, 1000), "t": slice(1000, 1200)}
    hot = np.eye(7, dtype=np.int32)[classes]
    files: dict[str, object] = {"graph": graph}
    for name, part in parts.items():
        files[f"{name}x"], files[f"{name}y"] = csr_matrix(features[part].astype(np.float32)), hot[part]
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(value))
    write(folder / "ind.cora.test.index", "".join(f"{k}\n" for k in range(1000, 1200)))


if __name__ == "__main__":
    for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
        MAKERS[name](Path(folder))
