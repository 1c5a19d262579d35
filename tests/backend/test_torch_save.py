"""`torch.save` as scripts and trainers call it: remote tensors are local ones in the file."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from processes import slots, until


def saved(value: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) - self.mean)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied().to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=REMOTE)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_checkpoint_is_fetched_at_once_and_loads_without_a_session(session: object) -> None:
    model, optimizer = trained()
    dr.profiler.stalls(reset=True)
    loaded = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2})
    assert [(row.why, row.count) for row in dr.profiler.stalls()] == [("explicit fetch", 1)]
    expected = dr.fetch([model.state_dict(), optimizer.state_dict()])
    torch.testing.assert_close([loaded["model"], loaded["optimizer"]], expected, rtol=0, atol=0)
    assert {t.device.type for t in loaded["model"].values()} == {"cpu"} and loaded["step"] == 2
    # And what was saved goes on.
    again = Tied().to(REMOTE)
    twin = torch.optim.AdamW(again.parameters(), lr=0.1)
    again.load_state_dict(loaded["model"])
    twin.load_state_dict(loaded["optimizer"])
    for net, opt in ((model, optimizer), (again, twin)):
        opt.zero_grad()
        net(torch.ones(2, 4, device=REMOTE)).square().mean().backward()
        opt.step()
    torch.testing.assert_close(dr.fetch(again.state_dict()), dr.fetch(model.state_dict()), rtol=0, atol=0)


def test_a_whole_module_stays_one(session: object) -> None:
    model, _ = trained()
    model.first.weight.tag = "kept"  # type: ignore[assignment]
    loaded = saved(model)
    assert loaded.first.weight is loaded.last.weight and type(loaded.first.weight) is nn.Parameter
    assert loaded.first.weight.tag == "kept"
    x = torch.ones(2, 4)
    assert torch.equal(loaded(x), model(x.to(REMOTE)).cpu())
    # The session's own model has stayed where it was.
    assert {p.device.type for p in model.parameters()} == {"remote"}


def test_what_tensors_are_survives(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    frozen, leaf = nn.Parameter(x, requires_grad=False), x.clone().requires_grad_()
    one, other, part, frozen, leaf = saved([x, x, x[1:], frozen, leaf])
    assert one is other and torch.equal(part, torch.ones(2))
    assert type(frozen) is nn.Parameter and not frozen.requires_grad
    assert type(leaf) is torch.Tensor and leaf.requires_grad
    old_form = saved({"x": x}, _use_new_zipfile_serialization=False)
    assert torch.equal(old_form["x"], torch.ones(3))


def test_what_cannot_be_saved_is_told_in_torchs_words(session: object) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        saved([torch.ones(1, device=REMOTE), lambda: 1])


def test_a_tensor_that_is_poisoned_is_not_saved(session: object) -> None:
    bad = torch.linalg.inv(torch.zeros(2, 2, device=REMOTE))
    with pytest.raises(RuntimeError, match="singular"):
        saved({"bad": bad})


def test_a_part_of_a_mesh_is_not_saved_for_the_whole(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = dr.from_shards([torch.zeros(2, device="remote:0"), torch.ones(2, device="remote:1")], mesh)
    with pytest.raises(dr.errors.NotSupportedError, match=r"has a part on each member.*x\.member\(k\)"):
        saved({"x": x})
    assert [t.tolist() for t in saved([x.member(k) for k in range(2)])] == [[0.0, 0.0], [1.0, 1.0]]


def test_other_pickles_refuse_even_while_a_file_is_saved(session: object) -> None:
    """A queue between processes pickles in another thread, and must not fetch."""
    x = torch.ones(1, device=REMOTE)
    refused: list[bool] = []

    def pickles_beside() -> None:
        try:
            pickle.dumps(x)
        except dr.errors.NotSupportedError as error:
            refused.append("dr.fetch" in str(error))

    class Meanwhile:
        def __reduce__(self) -> tuple[object, ...]:
            thread = threading.Thread(target=pickles_beside)
            thread.start()
            thread.join()
            return int, ()

    saved([Meanwhile(), x])
    assert refused and all(refused)
    with pytest.raises(dr.errors.NotSupportedError, match=r"torch\.save\(state, path\) fetches"):
        pickle.dumps(x)


def test_a_storage_tells_who_shares_memory(session: object) -> None:
    x = torch.zeros(4, 6, dtype=torch.float64, device=REMOTE)
    other, storage = torch.zeros(4, 6, device=REMOTE), x.untyped_storage()
    assert (storage.nbytes(), storage.size(), len(storage), storage.device) == (192, 192, 192, x.device)
    assert x[1:].untyped_storage() == storage and x.T.untyped_storage().data_ptr() == storage.data_ptr()
    assert other.untyped_storage() != storage and other.data_ptr() != x.data_ptr()
    assert x.data_ptr() == storage.data_ptr() and x[1, 2:].data_ptr() - x.data_ptr() == 8 * 8
    first, last = sorted((x, other), key=lambda t: t.data_ptr())
    assert first.data_ptr() + first.untyped_storage().nbytes() <= last.data_ptr()
    assert x[:0].data_ptr() == torch.zeros(0, device=REMOTE).data_ptr() == 0
    assert not hasattr(storage, "anything") and len({storage, x.untyped_storage()}) == 1
    with pytest.raises(AttributeError, match=r"no 'tolist'; dr\.fetch\(x\)\.untyped_storage\(\)"):
        storage.tolist()
    with pytest.raises(dr.errors.NotSupportedError, match=r"x\.resize_"):
        storage.resize_(0)
    # No C integer holds the number, so no C code follows it.
    assert x.data_ptr() >= 1 << 64
    # What cuts it off gets an address that no program has.
    assert ctypes.c_void_p(x.data_ptr()).value >= 1 << 63  # type: ignore[operator]


def test_a_module_is_exported(session: object) -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(REMOTE), torch.ones(2, 3, device=REMOTE)
    program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x).cpu(), module(x).cpu())


class Saved:
    """Says how often it was asked, and writes when it is."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.times = x, 0

    def __getstate__(self) -> dict[str, object]:
        self.times += 1
        self.x.add_(1)
        return dict(self.__dict__)


def of_everything(device: str) -> list[object]:
    """Views, tied parameters, lazy bits, and local tensors among them."""
    x = torch.arange(12.0).to(device)
    z = torch.tensor([1 + 2j, 3 - 1j]).to(device)
    here, tied = torch.arange(3), nn.Parameter(x[:4])
    labelled = x[2:6].view(2, 2)
    labelled.label = ["kept"]  # type: ignore[attr-defined]
    state = Saved(torch.zeros(2, device=device))
    negative = z.clone().conj().imag
    return [
        x,
        x[:2],
        x[3::4],
        here,
        here[1:],
        z,
        z.conj(),
        negative,
        tied,
        [tied],
        labelled,
        state,
    ]


@pytest.mark.parametrize(
    "options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_module": cloudpickle}]
)
def test_a_file_is_what_torch_would_have_written(session: object, options: Any, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for device in ("cpu", REMOTE):
        path = tmp_path / device / "file.pt"
        path.parent.mkdir()
        value = of_everything(device)
        torch.save(value, path, **options)
        assert value[11].times == 1  # type: ignore[attr-defined]
        sizes[device], found[device] = path.stat().st_size, torch.load(path, weights_only=False)
    # The older format names each memory by its address, whose digits are more or fewer by chance.
    by_address = options.get("_use_new_zipfile_serialization") is False
    assert abs(sizes[REMOTE] - sizes["cpu"]) <= (100 if by_address else 0)
    for ours, theirs in zip(found[REMOTE][:11], found["cpu"][:11]):
        if isinstance(ours, torch.Tensor):
            assert type(ours) is type(theirs) and torch.equal(ours, theirs)
            assert (ours.stride(), ours.storage_offset()) == (theirs.stride(), theirs.storage_offset())
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    x, view, *_, tied, listed, labelled, state = found[REMOTE]
    x[0], labelled[0, 0] = 50, 60
    assert view[0] == 50 and x[2] == 60 and tied[0] == 50 and listed[0] is tied and labelled.label == ["kept"]
    assert state.x.tolist() == [1.0, 1.0]


def test_a_save_that_fails_leaves_the_older_file(session: object, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"x": torch.ones(1, device=REMOTE)}, path)
    older = path.read_bytes()
    with pytest.raises(RuntimeError, match="singular"):
        torch.save({"x": torch.linalg.inv(torch.zeros(2, 2, device=REMOTE))}, path)
    assert path.read_bytes() == older


def test_nothing_stays_behind_a_save(session: object) -> None:
    gc.collect()
    gc.disable()
    try:
        before = slots(0)
        local = torch.ones(3)
        held = weakref.ref(local.untyped_storage())
        x = torch.ones(40, device=REMOTE)
        saved([x, x[1:], local])
        del x, local
        assert held() is None
        until(lambda: slots(0) == before)
    finally:
        gc.enable()


class PicklesInside:
    """It is pickled as the bytes that somebody else's pickle makes of a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __reduce__(self) -> tuple[object, ...]:
        return pickle.loads, (pickle.dumps(self.x),)


def test_a_pickle_within_the_pickle_has_the_values(session: object) -> None:
    x = torch.arange(3.0).to(REMOTE)
    assert [t.tolist() for t in saved([PicklesInside(x), x])] == [[0.0, 1.0, 2.0]] * 2


def test_a_storage_is_saved_with_what_it_has(session: object) -> None:
    x = torch.arange(4, dtype=torch.uint8).to(REMOTE)
    loaded, memory = saved([x[2:], x.untyped_storage()])
    loaded[1] = 9
    assert loaded.tolist() == [2, 9] and bytes(memory._untyped_storage) == bytes([0, 1, 2, 9])


def test_a_memory_that_has_grown_has_numbers_of_its_own(session: object) -> None:
    x, y = torch.ones(2, device=REMOTE), torch.ones(2, device=REMOTE)
    memory = x.untyped_storage()
    before = x.data_ptr(), y.data_ptr()
    x.resize_(5000).fill_(3)
    assert memory.nbytes() == 20000 and x[4999:].data_ptr() - x.data_ptr() == 4999 * 4
    taken = range(x.data_ptr(), x.data_ptr() + 20000)
    assert y.data_ptr() == before[1] and y.data_ptr() not in taken and before[0] not in taken
    view = x[:2]
    del x
    assert view.untyped_storage().nbytes() == 20000 and view.data_ptr() == taken.start
    assert saved(view).untyped_storage().nbytes() == 20000
    view.resize_(1)
    assert view.untyped_storage().nbytes() == 20000


class Held:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


def moved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    return storage.to(device="remote:1") if location == "cpu" else None


@pytest.mark.parametrize(
    "where",
    ["remote:1", "device", {"cpu": "remote:1"}, moved],
    ids=["text", "device", "dict", "call"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_goes_to_a_place_in_each_form_that_torch_knows(
    session: object, where: Any, zipped: bool
) -> None:
    where = torch.device("remote:1") if where == "device" else where
    x, z = torch.arange(6.0), torch.tensor([1 + 2j, 3 - 1j])
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    given = (
        Held(x, x[2:].view(2, 2), z.conj(), x.clone().requires_grad_(), x.new_empty(2, 0)),
        model,
        optimizer,
        {"x": x[:]},
    )
    torch.save(given, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    held, net, opt, named = torch.load(file, map_location=where, weights_only=False)
    every = [
        *held.tensors,
        *net.parameters(),
        *net.buffers(),
        named["x"],
        *opt.state[net.last.weight].values(),
    ]
    local = [
        *given[0].tensors,
        *model.parameters(),
        *model.buffers(),
        x,
        *optimizer.state[model.last.weight].values(),
    ]
    assert all(t.place == dr.place(1, "cpu") for t in every)
    torch.testing.assert_close(
        dr.fetch([t.detach() for t in every]), [t.detach() for t in local], rtol=0, atol=0
    )
    assert [t.requires_grad for t in every] == [t.requires_grad for t in local]
    assert all(t.is_leaf and not t._is_view() for t in every) and net.first.weight is net.last.weight
    assert type(net.first.bias.data) is type(named["x"]) and isinstance(net.first.bias, nn.Parameter)
    held.tensors[0].add_(1)
    assert held.tensors[1].tolist() == [[3.0, 4.0], [5.0, 6.0]] and named["x"] is not held.tensors[0]
    assert named["x"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_a_dict_or_a_function_does_not_name_stays(session: object) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    for where in (
        {"cuda:0": "remote:1"},
        lambda storage, location: storage,
        lambda storage, location: None,
        None,
    ):
        file.seek(0)
        assert torch.load(file, map_location=where).device.type == "cpu"
    with pytest.raises(dr.errors.PlacementError, match="remote:77"):
        file.seek(0)
        torch.load(file, map_location={"cpu": "remote:77"})


def test_a_mapped_file_goes_to_a_place(session: object, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0), "b": torch.ones(4)}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=REMOTE, mmap=True)
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0] and loaded["b"].tolist() == [1.0] * 4
    assert {t.device.type for t in loaded.values()} == {"remote"}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", [REMOTE, {"cpu": REMOTE}])
def test_what_was_loaded_to_a_place_goes_with_its_last_name(
    session: object, zipped: bool, where: Any
) -> None:
    file = io.BytesIO()
    torch.save([torch.ones(1000), torch.ones(3)], file, _use_new_zipfile_serialization=zipped)
    before = slots()
    for _ in range(3):
        file.seek(0)
        found = torch.load(file, map_location=where, weights_only=False)
        assert slots() > before and sum(x.sum().item() for x in found) == 1003
        del found
        until(lambda: slots() == before)
