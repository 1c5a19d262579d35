"""Data loaders on workers: batches ahead of need, epochs, parts for a mesh, and where they go on."""

from __future__ import annotations

import os
import signal
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
)

import distruntime as dr


class Numbers(Dataset[Any]):
    """Its items are their own numbers, with a tensor and the process that made them."""

    def __init__(self, count: int = 10, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, Any]:
        if k == self.broken:
            raise ValueError(f"item {k} is broken")
        return {"x": torch.full((2,), float(k)), "rest": (k, os.getpid())}


class Ending(Numbers):
    """The process that makes its sixth item ends."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self.end = end

    def __getitem__(self, k: int) -> dict[str, Any]:
        if k == 5:
            self.end()
        return super().__getitem__(k)


class Held(Numbers):
    """Its items come when there is a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __getitem__(self, k: int) -> dict[str, Any]:
        # A worker has no helpers of the tests'.
        while not self.file.exists():
            time.sleep(0.005)
        return super().__getitem__(k)


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in range(5):
            yield torch.tensor(k)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["rest"][0].tolist() for batch in batches]


def test_batches_are_remote_tensors_and_the_last_is_smaller(session: object) -> None:
    loader = dr.data.data_loader(Numbers(), node=1, batch_size=4)
    assert isinstance(loader, dr.data.DataLoader) and len(loader) == 3
    batches = list(loader)
    assert [batch["x"].shape for batch in batches] == [(4, 2), (4, 2), (2, 2)]
    assert {batch["x"].place for batch in batches} == {dr.place(1, "cpu")}
    assert numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["rest"][1].tolist() != [os.getpid()] * 4


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict[str, torch.Tensor]


class Pairs(Dataset[Pair]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> Pair:
        return Pair(torch.tensor(float(k)), {"k": torch.tensor(k)})


def pairs(items: list[Pair]) -> UserDict[str, Pair]:
    return UserDict({"pair": default_collate(items)})


def test_named_tuples_keep_their_class_and_unknown_dicts_become_plain(session: object) -> None:
    for batch in dr.data.data_loader(Pairs(), node=1, batch_size=2):
        assert type(batch) is Pair and batch.x.place == batch.rest["k"].place == dr.place(1, "cpu")
    batches = list(dr.data.data_loader(Pairs(), node=1, batch_size=2, collate_fn=pairs))
    assert [type(batch) for batch in batches] == [dict, dict] and batches[1]["pair"].x.tolist() == [2.0, 3.0]


def test_named_tuples_of_a_mesh_are_of_its_tensors(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batches = list(dr.data.data_loader(Pairs(), node=mesh, batch_size=1))
    assert [type(batch) for batch in batches] == [Pair, Pair]
    assert [batch.rest["k"].member(1).item() for batch in batches] == [1, 3]


def test_processes_of_the_worker_make_the_batches(session: object) -> None:
    alone = numbers(dr.data.data_loader(Numbers, node=1, batch_size=2, shuffle=True, seed=3))
    loader = dr.data.data_loader(Numbers, node=1, batch_size=2, shuffle=True, seed=3, num_workers=2)
    batches = list(loader)
    assert numbers(batches) == alone
    pids = {int(pid) for batch in batches for pid in batch["rest"][1].tolist()}
    own = dr.fetch(dr.remote(os.getpid)(node=1))
    assert len(pids) == 2 and own not in pids


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed \(SIGKILL\), as what takes too much"),
        (lambda: os._exit(3), "exited with code 3: num_workers=0"),
    ],
)
def test_a_process_that_ends_is_told_of(session: object, end: Callable[[], object], how: str) -> None:
    loader = dr.data.data_loader(Ending(end), node=1, batch_size=2, num_workers=1)
    with pytest.raises(RuntimeError, match=rf"pid\(s\) \d+\) exited unexpectedly: .*{how}"):
        list(loader)


def test_each_epoch_has_its_order_and_the_seed_decides_about_it(session: object) -> None:
    loader = dr.data.data_loader(Numbers(), node=1, batch_size=4, shuffle=True, seed=1)
    first, second = numbers(loader), numbers(loader)
    assert first != second and all(sorted(chain(*e)) == [*range(10)] for e in (first, second))
    again = dr.data.data_loader(Numbers(), node=0, batch_size=4, shuffle=True, seed=1)
    assert [numbers(again), numbers(again)] == [first, second]
    torch.manual_seed(0)
    drawn = dr.data.data_loader(Numbers(), node=0, shuffle=True).state_dict()["seed"]
    torch.manual_seed(0)
    assert dr.data.data_loader(Numbers(), node=0, shuffle=True).state_dict()["seed"] == drawn


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_goes_on_in_the_middle_of_an_epoch(session: object, tmp_path: Path, workers: int) -> None:
    options = {"batch_size": 3, "shuffle": True, "seed": 4, "num_workers": workers}
    loader = dr.data.data_loader(Numbers(), node=1, **options)
    numbers(loader)
    epoch = iter(loader)
    numbers([next(epoch), next(epoch)])
    assert loader.state_dict() == {"epoch": 1, "batch": 2, "seed": 4}
    dr.save({"loader": loader}, tmp_path / "saved")
    rest, following = numbers(epoch), numbers(loader)
    assert len(rest) == 2 and len(following) == 4
    later = dr.data.data_loader(Numbers(), node=1, **options)
    later.load_state_dict(dr.load(tmp_path / "saved")["loader"])
    assert [numbers(later), numbers(later)] == [rest, following]
    with pytest.raises(dr.errors.UsageError, match="make it with that seed"):
        later.load_state_dict({"epoch": 0, "batch": 0, "seed": 5})


def test_a_mesh_gets_the_parts_of_a_distributed_sampler(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    data = Numbers(9)
    loader = dr.data.data_loader(data, node=mesh, batch_size=2, shuffle=True, seed=6)
    assert len(loader) == 3
    for epoch in range(2):
        expected = []
        for rank in range(2):
            sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=6)
            sampler.set_epoch(epoch)
            expected.append(numbers(DataLoader(data, batch_size=2, sampler=sampler)))
        found = [[s.tolist() for s in dr.shards(batch["rest"][0])] for batch in loader]
        assert found == [list(pair) for pair in zip(*expected)]


def test_one_dimension_of_a_mesh_shares_the_data(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    loader = dr.data.data_loader(Numbers(4), node=mesh, batch_size=2, mesh_dim="tp")
    assert [[s.tolist() for s in dr.shards(batch["rest"][0])] for batch in loader] == [
        [[0, 1], [0, 1]],
        [[2, 3], [2, 3]],
    ]


def test_an_iterable_has_no_length_and_goes_on_all_the_same(session: object) -> None:
    loader = dr.data.data_loader(Counting, node=1, batch_size=2)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]
    loader.load_state_dict({**loader.state_dict(), "batch": 2})
    assert [b.tolist() for b in loader] == [[4]]
    with pytest.raises(TypeError, match="does not say how many batches"):
        len(loader)
    items = dr.data.data_loader(lambda: iter(range(3)), node=1, batch_size=None)
    assert dr.fetch(list(items)) == [0, 1, 2]


def test_what_is_there_already_is_a_dataset(session: object) -> None:
    x = torch.arange(6.0, device=dr.place(1, "cpu"))
    loader = dr.data.data_loader(TensorDataset(x), node=1, batch_size=4)
    assert [b[0].tolist() for b in loader] == [[0, 1, 2, 3], [4, 5]]
    made = dr.remote(Numbers)(3, node=1)
    assert numbers(dr.data.data_loader(made, node=1, batch_size=2)) == [[0, 1], [2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_item_is_told_when_its_batch_is_due(session: object, workers: int) -> None:
    loader = dr.data.data_loader(Numbers(broken=5), node=1, batch_size=2, num_workers=workers)
    found = []
    with pytest.raises(ValueError, match="item 5 is broken"):
        for batch in loader:
            found.append(batch)
    assert numbers(found) == [[0, 1], [2, 3]]
    # What was asked ahead and is never used is nobody's failure.
    for _ in range(2):
        assert numbers([next(iter(loader))]) == [[0, 1]]
    loader.close()


def test_a_wait_that_is_interrupted_loses_no_batch(
    session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = dr.data.data_loader(Held(tmp_path / "go"), node=1, batch_size=4)
    epoch = iter(loader)

    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.undo()
        (tmp_path / "go").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(session.requests, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    assert numbers(epoch) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(numbers(loader)) == 3


class Remote(Numbers):
    """Its items are made at a worker, wherever it is asked for them."""

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.ones(2, device="remote:0")}


def test_a_process_of_torchs_loader_says_who_can_load(session: object) -> None:
    loader = DataLoader(Remote(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(dr.errors.SessionClosed, match=r"num_workers=0 lets .* dr\.data\.data_loader"):
        next(iter(loader))


def test_what_does_not_fit_is_refused(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("expected seed=", {"generator": torch.Generator()}),
        ("ahead=-1: expected a number of batches", {"ahead": -1}),
        ("expected node=mesh with it", {"mesh_dim": 0}),
    ]
    for why, options in wrong:
        with pytest.raises(dr.errors.UsageError, match=why):
            dr.data.data_loader(Numbers(), node=1, **options)
    for given, options, why in [
        (Numbers(), {"sampler": [1, 2]}, "leave sampler= and batch_sampler= out"),
        (Counting(), {}, "an IterableDataset has no parts"),
    ]:
        with pytest.raises(dr.errors.UsageError, match=why):
            list(dr.data.data_loader(given, node=mesh, **options))
    with pytest.raises(dr.errors.UsageError, match="got int: expected a dataset of torch"):
        list(dr.data.data_loader(3, node=1))
