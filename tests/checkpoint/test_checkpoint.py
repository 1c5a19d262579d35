"""Checkpoints: what comes back is what was saved, at the point of the program where it was saved.

Plain PyTorch can read it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.session import active_session
from processes import slots

Fresh = Callable[..., Any]


def same(got: Any, expected: Any) -> None:
    """Hold that two trees are equal: classes, keys in their order, bits of tensors, and where they live."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (got.shape, got.dtype, got.requires_grad) == (
            expected.shape,
            expected.dtype,
            expected.requires_grad,
        )
        assert getattr(got, "place", None) == getattr(expected, "place", None)
        one, other = dr.fetch(got).detach(), dr.fetch(expected).detach()
        assert torch.equal(bits(one), bits(other))
    elif isinstance(expected, dict):
        assert type(got) is dict and list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(got) is (tuple if isinstance(expected, tuple) else list) and len(got) == len(expected)
        for one, other in zip(got, expected):
            same(one, other)
    else:
        # repr tells nan from 1.0, and -0.0 from 0.0.
        assert type(got) is type(expected) and repr(got) == repr(expected)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.contiguous().unsqueeze(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- what comes back -----------------------------------------------------------------------------------------


def test_plain_values_come_back_exactly(session: object, tmp_path: Path) -> None:
    tree = {
        "none": None,
        "bools": [True, False],
        "ints": (0, -1, 1 << 63, -(1 << 200)),
        "floats": [0.1, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1.0],
        "complex": (1 + 2j, complex(math.nan, -0.0)),
        "text": ["", "a.b", "é\n\x00", "\ud800", '["list"]'],
        "bytes": [b"", bytes(range(256))],
        "empty": [{}, [], ()],
        7: {0: "int keys", -3: ("list", ["tensor"], ["dict", 1])},
        "a.b": {"": 1, "float": ["float", "nan"]},
    }
    dr.save(tree, tmp_path / "c")
    same(dr.load(tmp_path / "c"), tree)


@pytest.mark.parametrize("tree", [3, None, [], {}, "text", (1,)])
def test_a_tree_may_be_one_value(session: object, tmp_path: Path, tree: Any) -> None:
    dr.save(tree, tmp_path)
    same(dr.load(tmp_path), tree)


def test_a_tree_may_be_one_tensor(session: object, tmp_path: Path) -> None:
    x = torch.randn(3, device=REMOTE)
    dr.save(x, tmp_path)
    same(dr.load(tmp_path), x)


DTYPES = [
    dtype
    for name in sorted(dir(torch))
    if isinstance(dtype := getattr(torch, name), torch.dtype)
    and name == str(dtype)[6:]
    and not name.startswith(("q", "bits", "int1", "int2"))
    if name
    not in {
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint5",
        "uint6",
        "uint7",
    }
]


@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(session: object, tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (5, 2, dtype.itemsize), dtype=torch.uint8)
    here = raw.view(dtype).squeeze(-1)
    tree = {"here": here, "there": there(here, 1), "large": here.repeat(10_000, 1)}
    tree["none"] = tree["there"][:0]
    if dtype.itemsize > 1 or dtype in (torch.bool, torch.uint8, torch.int8):
        tree["one"] = there(here[0, 0].clone())
    dr.save(tree, tmp_path)
    same(dr.load(tmp_path), tree)


def test_strides_of_a_dense_tensor_come_back_and_views_come_back_whole(
    session: object, tmp_path: Path
) -> None:
    x = torch.arange(24.0, device=REMOTE).view(2, 3, 2, 2)
    tree = {
        "last": x.contiguous(memory_format=torch.channels_last),
        "turned": x[0, :, :, 0].t(),
        "every_other": x.flatten()[::2],
        "spread": x[:1, :1].expand(2, 3, 2, 2),
        "conj": torch.randn(3, dtype=torch.complex64, device=REMOTE).conj(),
        "conj128": torch.randn(3, dtype=torch.complex128, device=REMOTE).conj(),
        "imag": torch.randn(3, dtype=torch.complex64, device=REMOTE).conj().imag,
    }
    dr.save(tree, tmp_path)
    found = dr.load(tmp_path)
    assert (
        found["last"].is_contiguous(memory_format=torch.channels_last)
        and found["last"].stride() == tree["last"].stride()
    )
    assert all(torch.equal(found[key].cpu(), tree[key].cpu()) for key in tree)


def test_tied_tensors_come_back_tied_and_are_written_once(session: object, tmp_path: Path) -> None:
    x, local = torch.randn(4, 4, device=REMOTE), torch.randn(3)
    big = torch.randn(100, 200)
    tree = {
        "a": x,
        "b": [x, x.detach()],
        "row": x[0],
        "local": [local, local, local.detach()],
        "big": (big, big),
        "apart": x.clone(),
    }
    dr.save(tree, tmp_path)
    assert sorted(json.loads((tmp_path / "distruntime.json").read_text(encoding="utf-8"))["tensors"]) == [
        "a",
        "apart",
        "big.0",
        "local.0",
        "row",
    ]
    found = dr.load(tmp_path)
    same(found, tree)
    assert found["a"] is found["b"][0] and found["a"] is not found["b"][1]
    assert found["local"][0] is found["local"][1] and found["big"][0] is found["big"][1]
    with torch.no_grad():
        found["b"][1].zero_()
        found["local"][2].zero_()
    assert not found["a"].cpu().any() and not found["local"][0].any()
    assert found["row"].cpu().any() and found["apart"].cpu().any()


def test_tied_weights_of_a_module(session: object, tmp_path: Path) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)).to(REMOTE)
        module[1].weight = module[0].weight
        return module

    module = make()
    dr.save(module, tmp_path)
    found = dr.load(tmp_path)
    assert [key for key in found] == ["0.weight", "1.weight"]
    assert found["0.weight"]._handle.storage is found["1.weight"]._handle.storage
    other = make()
    assert str(other.load_state_dict(found)) == "<All keys matched successfully>"
    same(dict(other.state_dict()), dict(module.state_dict()))


def test_parameters_and_the_flag_of_gradients(session: object, tmp_path: Path) -> None:
    w = nn.Parameter(torch.randn(2, device=REMOTE))
    tree = [
        w,
        w.detach(),
        nn.Parameter(torch.randn(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        w * 2,
    ]
    dr.save(tree, tmp_path)
    found = dr.load(tmp_path)
    assert [isinstance(t, nn.Parameter) for t in found] == [True, False, True, False, False]
    assert [t.requires_grad for t in found] == [True, False, False, True, True]
    assert all(t.is_leaf for t in found)


def test_names_that_meet(session: object, tmp_path: Path) -> None:
    tree = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((1,), 2.0),
        1: torch.full((1,), 3.0),
    }
    tree["1"] = there(torch.full((1,), 4.0))
    dr.save(tree, tmp_path)
    same(dr.load(tmp_path), tree)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "groups": lambda p: torch.optim.RMSprop(
        [{"params": p[:1], "lr": 1e-3}, {"params": p[1:], "name": "rest"}], centered=True
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been(session: object, tmp_path: Path, kind: str) -> None:
    x, y = torch.randn(8, 4, device=REMOTE), torch.randn(8, 3, device=REMOTE)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(REMOTE)
        optimizer = OPTIMIZERS[kind](list(module.parameters()))
        return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        (module(x) - y).square().mean().backward()
        optimizer.step()
        scheduler.step()

    first = make(1)
    for _ in range(3):
        step(*first)
    dr.save(first, tmp_path)
    found = dr.load(tmp_path)
    same(found[1], first[1].state_dict())
    same(found[2], first[2].state_dict())
    second = make(2)
    for thing, state in zip(second, found):
        thing.load_state_dict(state)
    for _ in range(3):
        step(*first)
        step(*second)
    same(dict(second[0].state_dict()), dict(first[0].state_dict()))
    same(second[1].state_dict(), first[1].state_dict())


def test_local_tensors_come_back_local_whatever_their_size(session: object, tmp_path: Path) -> None:
    tree = {
        "small": torch.randn(16384),
        "large": torch.randn(16385),
        "turned": torch.randn(3, 4).t(),
        "zero": torch.tensor(3),
    }
    tree["large_turned"] = torch.randn(200, 300).t()
    tree["none"] = torch.empty(0, 3)
    tree["conj"] = torch.randn(3, dtype=torch.complex64).conj()
    dr.save(tree, tmp_path)
    found = dr.load(tmp_path, place=1)
    same(
        {key: t.resolve_conj() for key, t in found.items()},
        {key: t.resolve_conj() for key, t in tree.items()},
    )
    assert all(t.device.type == "cpu" for t in found.values())
    found["small"].resize_(3)  # it owns its memory
    found["large"].resize_(3)


# -- where it comes back -------------------------------------------------------------------------------------


def test_places(fresh_session: Fresh, tmp_path: Path) -> None:
    fresh_session(simulate_cuda=2)
    tree = {
        "cpu": torch.randn(3).to(dr.place(0)),
        "gpu": there(torch.randn(3), 1).cuda(1),
        "here": torch.randn(2),
    }
    dr.save(tree, tmp_path)
    same(dr.load(tmp_path), tree)
    for place, cpu, gpu in (
        (dr.place(1), (1, "cpu"), (1, "cpu")),
        (dr.place(0, "cuda:1"), (0, "cuda:1"), (0, "cuda:1")),
        (0, (0, "cpu"), (0, "cuda:1")),
        (tree["gpu"].device, (1, "cuda:1"), (1, "cuda:1")),
        (str(tree["gpu"].device), (1, "cuda:1"), (1, "cuda:1")),
    ):
        found = dr.load(tmp_path, place=place)
        assert (found["cpu"].place, found["gpu"].place) == (dr.types.Place(*cpu), dr.types.Place(*gpu)), place
        assert torch.equal(found["gpu"].cpu(), tree["gpu"].cpu()) and found["here"].device.type == "cpu"
    for here in ("cpu", torch.device("cpu")):
        same(dr.load(tmp_path, place=here), dr.fetch(tree))
    dr.save(tree, tmp_path)
    dr.shutdown()
    fresh_session(world_size=1)
    with dr.on(0):
        # That node and that GPU are not there.
        found = dr.load(tmp_path)
    assert found["gpu"].place == dr.place(0) and found["cpu"].place == dr.place(0)


@pytest.mark.parametrize("place", ["cuda:0", "mps", 1.5, True, object()])
def test_places_that_are_none(session: object, tmp_path: Path, place: Any) -> None:
    dr.save({"x": torch.ones(1, device=REMOTE)}, tmp_path)
    with pytest.raises(dr.errors.PlacementError, match=r"the place of a load is a Place, .* got"):
        dr.load(tmp_path, place=place)
    with pytest.raises(dr.errors.PlacementError, match="there is no node 7"):
        dr.load(tmp_path, place=7)


def test_a_mesh(fresh_session: Fresh, tmp_path: Path) -> None:
    fresh_session(world_size=2, simulate_cuda=2)
    mesh = dr.init_device_mesh("cuda", (2, 2))
    parts = [torch.randn(2, 3) for _ in range(4)]
    x = dr.from_shards([there(part, k // 2).cuda(k % 2) for k, part in enumerate(parts)], mesh)
    alone = torch.ones(2, device=REMOTE)
    dr.save({"x": x, "tied": x, "alone": alone}, tmp_path)
    x.add_(1)
    found = dr.load(tmp_path, place=mesh)
    assert found["x"] is found["tied"] and found["x"].place == x.place and found["alone"].place == alone.place
    for k in range(4):
        assert (
            torch.equal(found["x"].member(k).cpu(), parts[k]) and found["x"].member(k).place == mesh.places[k]
        )
    other = dr.init_device_mesh("cpu", (2,))
    with pytest.raises(dr.errors.UsageError, match=r"was on a mesh of 4 members, .* got one of 2"):
        dr.load(tmp_path, place=other)
    with pytest.raises(
        dr.errors.UsageError,
        match=r"was on a mesh of 4 members, and needs a mesh of as many: dr.load\(path, place=mesh\)",
    ):
        dr.load(tmp_path)
    again = dr.init_device_mesh("cuda", (4,))
    assert torch.equal(dr.load(tmp_path, place=again)["x"].member(3).cpu(), parts[3])


# -- when ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_the_values_are_those_at_this_point_of_the_program(
    session: object, tmp_path: Path, async_op: bool
) -> None:
    x, local = torch.zeros(300_000, device=REMOTE), torch.zeros(3)
    for _ in range(50):
        x += 1
    saving = dr.save([x, local], tmp_path, async_op=async_op)
    for _ in range(50):
        x += 1
    local += 1
    if saving is not None:
        saving.wait()
    found = dr.load(tmp_path)
    assert found[0].unique().tolist() == [50.0] and found[1].tolist() == [0.0] * 3
    assert x[0].item() == 100.0


@pytest.mark.parametrize("async_op", [False, True])
def test_streams_are_waited_for_and_wait(fresh_session: Fresh, tmp_path: Path, async_op: bool) -> None:
    fresh_session(world_size=1)
    side = dr.Stream(0, "cpu")
    a = torch.ones(400, 400, device=REMOTE)
    with dr.stream(side):
        for _ in range(40):
            a = a @ a / 400
        b = a + 1
    dr.save([a, b], tmp_path, async_op=async_op)
    with dr.stream(side):
        a.zero_()
        b.zero_()
    dr.synchronize()
    # This waits for the save that is under way.
    found = dr.load(tmp_path)
    assert found[0].unique().tolist() == [1.0] and found[1].unique().tolist() == [2.0]


def test_a_save_in_the_background_tells_when_it_is_over(session: object, tmp_path: Path) -> None:
    first = dr.save({"n": 1, "x": torch.ones(1000, device=REMOTE)}, tmp_path, async_op=True)
    second = dr.save({"n": 2, "x": torch.ones(1000, device=REMOTE)}, tmp_path, async_op=True)
    assert first is not None and second is not None
    # The second had to wait for it.
    assert first.done() and first.is_completed()
    second.wait()
    second.wait(0)
    assert second.done() and "complete" in repr(second)
    assert dr.load(tmp_path)["n"] == 2


def test_threads_that_save_into_one_folder(session: object, tmp_path: Path) -> None:
    def saves(k: int) -> None:
        for n in range(4):
            value = 10.0 * k + n
            dr.save(
                {
                    "n": value,
                    "x": [torch.full((100,), value, device=REMOTE), there(torch.full((100,), value), 1)],
                },
                tmp_path,
            )

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(saves, k) for k in range(4)]:
            future.result(90)
    found = dr.load(tmp_path)
    assert all(x.unique().tolist() == [found["n"]] for x in found["x"])
    assert (
        len(files(tmp_path)) == 4
        and json.loads((tmp_path / "distruntime.json").read_text(encoding="utf-8"))["number"] == 16
    )


def test_a_session_ends_after_its_saves(fresh_session: Fresh, tmp_path: Path) -> None:
    fresh_session()
    x = there(torch.randn(3_000_000), 1)
    dr.save(x, tmp_path, async_op=True)
    dr.shutdown()
    fresh_session()
    assert dr.load(tmp_path).shape == (3_000_000,)


# -- what is on the disk -------------------------------------------------------------------------------------

_READER = """
import json, sys, torch
from safetensors.torch import load_file
folder, expected = sys.argv[1:]
index = json.load(open(folder + "/model.safetensors.index.json"))
found = {}
for file in set(index["weight_map"].values()):
    part = load_file(folder + "/" + file)
    assert all(index["weight_map"][key] == file for key in part)
    found.update(part)
assert set(found) == set(index["weight_map"])
for key, value in torch.load(expected).items():
    assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    del found[key]
assert not found, found
module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
assert not any(name.split(".")[0].startswith("distruntime") for name in sys.modules)
print("read")
"""


@pytest.mark.slow(reason="starts a program that imports torch, 3 s")
def test_plain_pytorch_reads_it(session: object, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8).to(dr.place(0)), nn.Linear(8, 2).to(dr.place(1)))
    optimizer = torch.optim.Adam(module.parameters())
    sum((p * p).sum().cpu() for p in module.parameters()).backward()
    optimizer.step()
    rest = {
        "mask": there(torch.tensor([True, False])),
        "n": torch.arange(3),
        "half": there(torch.randn(3).bfloat16(), 1),
        "lr": 0.1,
    }
    dr.save({"model": module, "optimizer": optimizer, **rest}, tmp_path / "c")
    expected = {f"model.{key}": value for key, value in module.state_dict().items()}
    for k, state in optimizer.state_dict()["state"].items():
        expected.update({f"optimizer.state.{k}.{name}": value for name, value in state.items()})
    expected.update({key: value for key, value in rest.items() if isinstance(value, torch.Tensor)})
    torch.save(dr.fetch(expected), tmp_path / "expected.pt")
    run = [sys.executable, "-c", _READER, str(tmp_path / "c"), str(tmp_path / "expected.pt")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=90, env=environment)
    assert done.stdout == "read\n", done.stderr


def test_transformers_reads_a_model(session: object, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=20,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).to(REMOTE)
    dr.save(model, tmp_path)
    config.save_pretrained(tmp_path)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    same(dict(found.state_dict()), dict(dr.fetch(dict(model.state_dict()))))


def test_a_new_checkpoint_takes_the_place_of_the_old_one_and_leaves_other_files_alone(
    session: object, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"mine too")
    dr.save([there(torch.ones(2), node) for node in (0, 1)], tmp_path)
    old = files(tmp_path)
    dr.save([there(torch.zeros(2), node) for node in (0, 1)], tmp_path)
    new = files(tmp_path)
    assert len(old) == len(new) == 6
    assert set(old) & set(new) == {
        "notes.txt",
        "model.safetensors",
        "distruntime.json",
        "model.safetensors.index.json",
    }
    dr.save({"nothing": "remote"}, tmp_path)
    assert len(files(tmp_path)) == 5 and dr.load(tmp_path) == {"nothing": "remote"}


def test_a_model_of_others_keeps_its_table(session: object, tmp_path: Path) -> None:
    table = tmp_path / "model.safetensors.index.json"
    text = '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'
    table.write_text(text, encoding="utf-8")
    for n in (1, 2):
        dr.save({"w": torch.full((2,), float(n), device=REMOTE)}, tmp_path)
    assert table.read_text(encoding="utf-8") == text and dr.load(tmp_path)["w"].tolist() == [2.0, 2.0]


def test_the_tensors_bytes_do_not_pass_this_process(
    session: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = [torch.randn(500_000, device=REMOTE), there(torch.randn(500_000), 1)]
    dr.synchronize()
    passed = [0, 0]
    channel = active_session().channel
    send, receive = channel.send, channel.receive

    def sending(peer: bytes, frames: Any, **options: Any) -> Any:
        passed[0] += sum(len(frame) for frame in frames)
        return send(peer, frames, **options)

    def receiving(*args: Any) -> Any:
        arrived = receive(*args)
        passed[1] += sum(len(bytes(f)) for _, frames in arrived or () for f in frames)
        return arrived

    monkeypatch.setattr(channel, "send", sending)
    monkeypatch.setattr(channel, "receive", receiving)
    dr.save(x, tmp_path)
    found = dr.load(tmp_path)
    dr.synchronize()
    assert sum(passed) < 30_000
    monkeypatch.undo()
    same(found, x)


# -- what it leaves ------------------------------------------------------------------------------------------


def test_saves_and_loads_leave_nothing_on_the_workers(session: object, tmp_path: Path) -> None:
    module = nn.Linear(20, 20).to(REMOTE)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 20, device=REMOTE)).sum().backward()
    optimizer.step()

    def once() -> None:
        dr.save([module, optimizer], tmp_path)
        saving = dr.save({"m": module, "l": torch.ones(100_000)}, tmp_path / "b", async_op=True)
        assert saving is not None
        saving.wait()
        dr.load(tmp_path)
        dr.load(tmp_path / "b", place="cpu")
        with pytest.raises(dr.errors.CheckpointError):
            dr.load(tmp_path / "not")
        dr.save(torch.ones(2), tmp_path / "b")

    once()
    gc.collect()
    before, templates = slots(), len(active_session().nodes[0].templates)
    gc.disable()
    try:
        for _ in range(3):
            once()
        assert slots() == before
    finally:
        gc.enable()
    # A value that changes from save to save is no constant.
    assert len(active_session().nodes[0].templates) == templates


@pytest.mark.slow(reason="starts a program that imports torch, 4 s")
def test_this_process_needs_no_safetensors() -> None:
    code = "import sys, distruntime as dr; "
    code += "print(callable(dr.load) and callable(dr.save), 'safetensors' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
        ).stdout
        == "True False\n"
    )


def test_load_is_the_function_and_torchs_load_knows_places(session: object, tmp_path: Path) -> None:
    assert (
        dr.load.__module__ == "distruntime.checkpoint.load"
        and dr.save.__module__ == "distruntime.checkpoint.save"
    )
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location=REMOTE)["x"].tolist() == [1.0, 1.0]
