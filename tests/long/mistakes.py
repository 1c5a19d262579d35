"""A catalogue of mistakes that people make: what torch says of each here, beside what we say of it. A minute.

    PYTHONPATH=.:worker:tests/help python tests/long/mistakes.py [--all]

A mistake that can be made locally is `equal` if class and first line are torch's, `better` if the class is
and the text says more, and else `worse`. One that needs workers is `better` if its text has what the user
needs, which stands beside it. Either must be told at its own line: there, or at the read by that line's name.
The exit code says whether at least 120 of 130 are equal or better, and none is told at another line. Without
`--all` only those are printed that are not equal.
"""

from __future__ import annotations

import argparse
import collections
import copy
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from agree import REMOTE, quietly

REQUIRED = 120 / 130
Make = Callable[[str], object]


@dataclass(frozen=True)
class Verdict:
    """What was told of a mistake."""

    word: str
    when: str
    local: str
    ours: str


def x(device: str, *shape: int) -> torch.Tensor:
    sizes = shape or (4, 4)
    return torch.arange(float(torch.Size(sizes).numel()), device=device).view(sizes)


def whole(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values or (0, 1, 2, 3), device=device)


def leaf(device: str) -> torch.Tensor:
    return x(device).requires_grad_()


def image(device: str, channels: int = 3) -> torch.Tensor:
    return torch.ones(2, channels, 8, 8, device=device)


def model(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def lstm(device: str) -> nn.Module:
    return nn.LSTM(4, 8).to(device)


def twice_backward(device: str) -> object:
    loss = leaf(device).exp().sum()
    loss.backward()
    return loss.backward()


def changed_in_place(device: str) -> object:
    y = leaf(device).exp()
    y.add_(1)
    return y.sum().backward()


def step_of_closed(device: str) -> object:
    return torch.optim.LBFGS([leaf(device)]).step()


def other_state(device: str) -> object:
    return model(device).load_state_dict({"0.weight": x(device)})


def wrong_shapes_in_state(device: str) -> object:
    return nn.Linear(4, 4).to(device).load_state_dict({"weight": x(device, 2, 4), "bias": x(device, 4)})


# Torch says these of tensors here, too.
BOTH: dict[str, Make] = {
    # shapes
    "x @ y": lambda d: x(d) @ x(d, 3, 3),
    "x @ v": lambda d: x(d) @ x(d, 3),
    "a batch @ a batch": lambda d: x(d, 2, 3, 4) @ x(d, 3, 4, 5),
    "bmm": lambda d: torch.bmm(x(d, 2, 3, 4), x(d, 2, 3, 4)),
    "bmm of matrices": lambda d: torch.bmm(x(d), x(d)),
    "dot": lambda d: torch.dot(x(d, 3), x(d, 4)),
    "dot of matrices": lambda d: torch.dot(x(d), x(d)),
    "x + y": lambda d: x(d) + x(d, 3),
    "x += larger": lambda d: x(d, 4).add_(x(d)),
    "x * y of images": lambda d: image(d) * image(d, 5),
    "where": lambda d: torch.where(x(d) > 0, x(d, 3), x(d)),
    "view": lambda d: x(d).view(3, 5),
    "view of a transposed": lambda d: x(d).t().view(-1),
    "reshape": lambda d: x(d).reshape(7, -1),
    "two unknown sizes": lambda d: x(d).reshape(-1, -1),
    "expand": lambda d: x(d).expand(3, 4),
    "squeeze": lambda d: x(d).squeeze(5),
    "transpose": lambda d: x(d).transpose(0, 2),
    "permute": lambda d: x(d).permute(0, 1, 2),
    "cat of unequal": lambda d: torch.cat([x(d), x(d, 2, 3)]),
    "cat of other dimensions": lambda d: torch.cat([x(d), x(d, 4)]),
    "cat of nothing": lambda d: torch.cat([]),
    "stack": lambda d: torch.stack([x(d), x(d, 3, 3)]),
    "split": lambda d: x(d).split([1, 1]),
    "chunk": lambda d: x(d).chunk(0),
    "einsum": lambda d: torch.einsum("ij,jk->ik", x(d), x(d, 3, 3)),
    "einsum's letters": lambda d: torch.einsum("ijk->i", x(d)),
    "sum over what is not there": lambda d: x(d).sum(dim=3),
    "max of nothing": lambda d: x(d)[:0].max(),
    "mean over it twice": lambda d: x(d).mean(dim=(0, 0)),
    "linear": lambda d: F.linear(x(d), x(d, 2, 3)),
    "a layer's width": lambda d: model(d)(x(d, 5, 3)),
    "conv2d's channels": lambda d: nn.Conv2d(4, 2, 3).to(d)(image(d)),
    "conv2d of a matrix": lambda d: nn.Conv2d(4, 2, 3).to(d)(x(d)),
    "conv2d's kernel": lambda d: nn.Conv2d(3, 2, 9).to(d)(image(d)),
    "conv1d": lambda d: F.conv1d(x(d, 2, 3, 8), x(d, 4, 5, 3)),
    "batch norm's features": lambda d: nn.BatchNorm2d(5).to(d)(image(d)),
    "batch norm of one value": lambda d: nn.BatchNorm1d(4).to(d)(x(d, 1, 4)),
    "layer norm's shape": lambda d: nn.LayerNorm(5).to(d)(x(d)),
    "group norm": lambda d: F.group_norm(image(d), 2),
    "pooling too much": lambda d: F.max_pool2d(image(d), 9),
    "lstm's width": lambda d: lstm(d)(x(d, 3, 2, 5)),
    "attention": lambda d: F.scaled_dot_product_attention(x(d, 2, 3, 4), x(d, 2, 3, 5), x(d, 2, 3, 5)),
    "multi-head's width": lambda d: nn.MultiheadAttention(4, 2).to(d)(*(x(d, 2, 3, 5),) * 3),
    "pad": lambda d: F.pad(x(d), (1, 1, 1)),
    "interpolate": lambda d: F.interpolate(x(d), scale_factor=2),
    "grid_sample": lambda d: F.grid_sample(x(d), x(d)),
    "pixel_shuffle": lambda d: F.pixel_shuffle(image(d), 2),
    "cdist": lambda d: torch.cdist(x(d), x(d, 4, 3)),
    "a negative size": lambda d: torch.zeros(-1, device=d),
    "eye": lambda d: torch.eye(-1, device=d),
    "linspace": lambda d: torch.linspace(0, 1, -3, device=d),
    "x.copy_": lambda d: x(d).copy_(x(d, 3)),
    # dtypes
    "float @ double": lambda d: x(d) @ x(d).double(),
    "linear in half": lambda d: model(d).half()(x(d)),
    "addmm": lambda d: torch.addmm(x(d, 4).double(), x(d), x(d)),
    "conv2d of doubles": lambda d: F.conv2d(image(d).double(), torch.ones(2, 3, 3, 3, device=d)),
    "float & float": lambda d: x(d) & x(d),
    "~float": lambda d: ~x(d),
    "bool - bool": lambda d: (x(d) > 1) - (x(d) > 2),
    "-bool": lambda d: -(x(d) > 1),
    "mean of whole numbers": lambda d: whole(d).mean(),
    "std of whole numbers": lambda d: whole(d).std(),
    "softmax of whole numbers": lambda d: F.softmax(whole(d), 0),
    "argmax of truth": lambda d: (x(d) > 3).argmax(),
    "whole += float": lambda d: whole(d).add_(0.5),
    "x[i] = doubles": lambda d: x(d).index_put_((whole(d),), x(d).double()),
    "index_add": lambda d: x(d).index_add_(0, whole(d), x(d).double()),
    "complex of whole": lambda d: torch.complex(whole(d), whole(d)),
    "lerp": lambda d: torch.lerp(x(d), x(d).double(), 0.5),
    "a gradient of whole numbers": lambda d: whole(d).requires_grad_(),
    "embedding of floats": lambda d: nn.Embedding(4, 2).to(d)(x(d)),
    "gather by floats": lambda d: x(d).gather(0, x(d)),
    "cross_entropy of whole": lambda d: F.cross_entropy(whole(d)[None], whole(d, 1)),
    # indices
    "x[8]": lambda d: x(d)[8],
    "x[:, 20]": lambda d: x(d)[:, 20],
    "x[0, 0, 0]": lambda d: x(d)[0, 0, 0],
    "x[[9]]": lambda d: x(d)[whole(d, 9)],
    "x[floats]": lambda d: x(d)[x(d, 4)],
    "x[a mask of another shape]": lambda d: x(d)[x(d, 3) > 1],
    "x[False, ...]": lambda d: x(d)[False, [0, 1], [0, 1, 2]],
    "x['a']": lambda d: x(d)["a"],  # type: ignore[index]
    "embedding": lambda d: nn.Embedding(4, 2).to(d)(whole(d, 7)),
    "index_select": lambda d: x(d).index_select(0, whole(d, 4)),
    "gather": lambda d: x(d).gather(1, whole(d, 9)[None]),
    "scatter": lambda d: torch.zeros(2, 2, device=d).scatter_(1, whole(d, 5)[None], 1.0),
    "one_hot": lambda d: F.one_hot(whole(d), 2),
    "narrow": lambda d: x(d).narrow(0, 3, 5),
    "select": lambda d: x(d).select(3, 0),
    "topk": lambda d: x(d, 4).topk(9),
    "x[0] = too many": lambda d: x(d).__setitem__(0, x(d, 7)),
    # losses and training
    "cross_entropy's classes": lambda d: F.cross_entropy(x(d), whole(d, 0, 1, 2, 9)),
    "cross_entropy's batch": lambda d: F.cross_entropy(x(d), whole(d, 0, 1)),
    "nll_loss's weights": lambda d: F.nll_loss(x(d), whole(d), weight=x(d, 2)),
    "mse_loss": lambda d: F.mse_loss(x(d), x(d, 4, 3)),
    "bce's range": lambda d: F.binary_cross_entropy(x(d), x(d)),
    "bce's shape": lambda d: F.binary_cross_entropy(x(d), x(d, 3)),
    "kl_div": lambda d: F.kl_div(x(d), x(d, 3), reduction="sum"),
    "backward of a matrix": lambda d: (leaf(d) * 2).backward(),
    "backward without a gradient": lambda d: x(d).sum().backward(),
    "backward twice": twice_backward,
    "changed in place": changed_in_place,
    "in place on a leaf": lambda d: leaf(d).add_(1),
    "a gradient of another shape": lambda d: (leaf(d) * 2).backward(x(d, 3)),
    "unused": lambda d: torch.autograd.grad(x(d).requires_grad_().sum(), leaf(d)),
    "no parameters": lambda d: torch.optim.SGD([], lr=0.1),
    "not a leaf": lambda d: torch.optim.SGD([leaf(d) * 2], lr=0.1),
    "without a closure": step_of_closed,
    "dropout's share": lambda d: F.dropout(x(d), 1.5),
    "keys that are missing": other_state,
    "sizes that differ": wrong_shapes_in_state,
    "a layer that is not there": lambda d: model(d)[7],
    "an unknown method": lambda d: x(d).softmaxx(),  # type: ignore[attr-defined]
    "an unknown argument": lambda d: x(d).sum(dimm=1),  # type: ignore[call-overload]
    "a word for a tensor": lambda d: torch.add(x(d), "a"),  # type: ignore[call-overload]
    "deepcopy of a result": lambda d: copy.deepcopy(leaf(d) * 2),
    # reading
    "item of several": lambda d: x(d).item(),
    "if x": lambda d: bool(x(d)),
    "float(x)": lambda d: float(x(d)),
    "range(x)": lambda d: range(x(d, 1)),  # type: ignore[call-overload]
    "len of a number": lambda d: len(x(d).sum()),
    "for v in a number": lambda d: list(x(d).sum()),
    # linear algebra and random numbers
    "inverse of a singular": lambda d: torch.linalg.inv(torch.zeros(3, 3, device=d)),
    "inverse of a tall": lambda d: torch.linalg.inv(x(d, 4, 3)),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(3, device=d)),
    "solve": lambda d: torch.linalg.solve(x(d), x(d, 3)),
    "slogdet": lambda d: torch.linalg.slogdet(x(d).sum()),
    "multinomial": lambda d: torch.multinomial(-torch.ones(3, device=d), 1),
    "randint": lambda d: torch.randint(5, 2, (3,), device=d),
    "normal": lambda d: torch.normal(x(d), -torch.ones(4, 4, device=d)),
    "bernoulli": lambda d: torch.bernoulli(x(d)),
    "clamp": lambda d: x(d).clamp(),
    "integer // 0": lambda d: whole(d) // 0,
    "integer ** -1": lambda d: whole(d) ** -1,
    "more than there is": lambda d: torch.empty(1 << 46, device=d).sum(),
}


def _node(k: int) -> torch.Tensor:
    with dr.on(k):
        return torch.ones(4, 4)


# These need workers. Each has what its text must have: what to do, or what there is.
OURS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "x + local": (lambda d: x(d) + x("cpu"), ("`other` (4, 4) is a local tensor", ".to(")),
    "local + x": (lambda d: x("cpu") + x(d), ("`self` (4, 4) is a local tensor", ".to(")),
    "x @ node 1's": (lambda d: x(d) @ _node(1), ("different nodes", "copies 64 B", "mat2.to(self.device)")),
    "cat of two nodes": (lambda d: torch.cat([x(d), _node(1)]), ("tensors[1]", "different nodes")),
    "x == node 1's": (lambda d: x(d) == _node(1), ("different nodes", "other.to(self.device)")),
    "allclose": (lambda d: torch.allclose(x(d), _node(1)), ("different nodes", ".to(")),
    "model(local)": (lambda d: model(d)(x("cpu")), ("`mat1` (4, 4) is a local tensor", ".to(")),
    "local model(x)": (lambda d: model("cpu")(x(d)), ("the module is still local", ".0.bias", ".to(")),
    "local parameter": (lambda d: x(d) @ nn.Parameter(x("cpu")), ("a parameter of a module", "module.to(")),
    "out= here": (lambda d: torch.add(x(d), x(d), out=x("cpu")), ("local", ".to(")),
    "x.data = local": (lambda d: setattr(x(d), "data", x("cpu")), ("x.data = y.to(x.device)",)),
    "x + an array": (lambda d: x(d) + np.ones((4, 4)), ("can't convert|unsupported operand|numpy|local",)),
    "x.numpy()": (lambda d: x(d).numpy(), ("x.detach().cpu().numpy()",)),
    "np.array(x)": (lambda d: np.array(x(d)), ("x.detach().cpu().numpy()",)),
    "pickle": (lambda d: pickle.dumps(x(d)), ("dr.fetch(",)),
    "share_memory_": (lambda d: x(d).share_memory_(), ("x.cpu().share_memory_()",)),
    "dlpack": (lambda d: torch.from_dlpack(x(d)), ("x.cpu()",)),
    "a generator": (
        lambda d: torch.randn(3, device=d, generator=torch.Generator()),
        ("torch.manual_seed", "Generator"),
    ),
    "sparse": (lambda d: x(d).to_sparse(), ("strided",)),
    "remote:99": (lambda d: torch.zeros(2, device="remote:99"), ("remote:99", "dr.nodes()|there is|places")),
    "node 7": (lambda d: x(d).to(node=7), ("there is no node 7", "nodes 0, 1")),
    "cuda:3": (lambda d: x(d).cuda(3), ("has no device 'cuda:3'", "it has cpu")),
    "on(1, gpu)": (lambda d: dr.on(1, "gpu"), ("gpu", "cpu|cuda")),
    "init again": (
        lambda d: dr.init_master_worker(world_size=3),
        ("shutdown()|differ|called before",),
    ),
    "workers as a text": (lambda d: dr.init_master_worker(workers="tcp://h:1"), ("list|before|shutdown",)),
    "lookup": (lambda d: dr.lookup("nothing"), ("nothing",)),
    "publish a function": (lambda d: dr.publish("f", lambda: 1), ("f",)),
    "load nothing": (lambda d: dr.load(os.path.join(tempfile.gettempdir(), "no-such")), ("no-such",)),
    "config": (lambda d: dr.config(num_threads=-1), ("num_threads|threads",)),
    "member of one": (lambda d: x(d).member(0), ("mesh",)),
}


def _when(error: BaseException, make: Make) -> str:
    """Return where a mistake is told: "at once", "when read", by its own line's name, or "another line"."""
    code = make.__code__
    lines = {line for *_, line in code.co_lines() if line}
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == code.co_filename and frame.name == code.co_name and frame.lineno in lines:
            return "at once"
    named = {
        int(found) for found in re.findall(rf"{re.escape(os.path.basename(__file__))}:(\d+)", str(error))
    }
    return "when read" if named & lines else "another line"


def _first(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {(str(error).splitlines() or [''])[0]}"


def _caught(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:  # any: its class is compared
        return error
    return None


def _remotely(make: Make) -> Exception | None:
    def act() -> None:
        result = make(REMOTE)
        dr.fetch(result)
        dr.synchronize()

    error = _caught(act)
    # What the mistake leaves behind belongs to no other one.
    _caught(dr.synchronize)
    return error


def judge(name: str) -> Verdict:
    """Make a mistake, here too if that can be, and compare."""
    make, needed = (BOTH[name], None) if name in BOTH else OURS[name]
    remote = quietly(lambda: _remotely(make))
    local = quietly(lambda: _caught(lambda: make("cpu"))) if needed is None else None
    if remote is None:
        return Verdict("worse", "never", _first(local) if local else "", "nothing")
    when = _when(remote, make)
    if needed is not None:
        good = isinstance(remote, (dr.DistruntimeError, TypeError)) and all(
            re.search(words.replace("(", r"\(").replace(")", r"\)").replace("[", r"\["), str(remote))
            for words in needed
        )
        return Verdict("better" if good else "worse", when, "", _first(remote))
    assert local is not None, f"{name} is no mistake here"
    if not isinstance(remote, type(local)):
        word = "worse"
    elif str(remote) == str(local) or _first(remote) == _first(local):
        word = "equal"
    else:
        word = "better" if str(local).splitlines()[0] in str(remote) else "worse"
    return Verdict(word, when, _first(local), _first(remote))


def main() -> int:
    """Print the table and the counts."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="print those that are equal, too")
    everything = parser.parse_args().all
    words: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    with dr.init_master_worker(world_size=2):
        for name in (*BOTH, *OURS):
            verdict = judge(name)
            words[verdict.word] += 1
            times[verdict.when] += 1
            if everything or verdict.word == "worse" or verdict.when == "another line":
                print(f"{verdict.word:6} {verdict.when:12} {name}", flush=True)
                if verdict.local:
                    print(f"         torch: {verdict.local[:150]}")
                print(f"         ours:  {verdict.ours[:150]}", flush=True)
    count = words.total()
    fine = words["equal"] + words["better"]
    print(
        f"{count} mistakes: {words['equal']} equal, {words['better']} better, {words['worse']} worse; "
        f"told at once {times['at once']}, when read {times['when read']}, "
        f"at another line {times['another line']}, never {times['never']}"
    )
    return int(fine < REQUIRED * count or times["another line"] > 0)


if __name__ == "__main__":
    sys.exit(main())
