"""Every spelling of a place, through every function that takes one: the place it means, or its error."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from distruntime.session.session import active_session

FAR = (1, "cuda:1")

# What the table says in two or three letters. Errors stand for their class.
WORDS = {
    "0c": "node 0 cpu", "00": "node 0 cuda:0", "01": "node 0 cuda:1",
    "1c": "node 1 cpu", "10": "node 1 cuda:0", "11": "node 1 cuda:1",
    "mesh": "2 members on nodes 0, 1", "here": "here",
    "P": "PlacementError", "U": "UsageError", "R": "RuntimeError", "T": "TypeError",
}  # fmt: skip


class World:
    """Two nodes with two GPUs each, a tensor on the last of them, a mesh, and two files with a tensor."""

    def __init__(self, folder: Path) -> None:
        dr.init_master_worker(world_size=2, simulate_cuda=2)
        self.x: Any = self.at(FAR)
        self.device = self.x.device
        mesh = dr.init_device_mesh("cpu", (2,))
        with mesh:
            self.on_mesh: Any = torch.ones(2, device="remote")
        self.checkpoint = folder / "checkpoint"
        dr.save(self.at(FAR), self.checkpoint)
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        self.file = file.getvalue()

    def at(self, where: tuple[int, str]) -> Any:
        with dr.on(*where):
            return torch.ones(2, device="remote")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    dr.shutdown()
    yield World(tmp_path_factory.mktemp("spellings"))
    dr.shutdown()


def sent_to(x: Any, to: Any) -> str:
    """Return where a send goes, as its `Work` says."""
    return repr(dr.distributed.isend(x, to)).rpartition(" to ")[2].rstrip(">")


def entered(where: Any) -> Any:
    with torch.remote.device(where):  # type: ignore[attr-defined]
        return active_session().places.current().place


def entered_on(where: Any) -> Any:
    with dr.on(where):
        return active_session().places.current().place


def looked_up(world: World, device: Any) -> Any:
    dr.publish("spelled", {"tensor": world.x, "device": torch.device(device)})
    found = dr.lookup("spelled")["device"]
    return torch.ones(2, device=found) if found.type != "cuda" else "here"


SPELLINGS: dict[str, Callable[[World], Any]] = {
    "None": lambda w: None,
    "0": lambda w: 0,
    "1": lambda w: 1,
    "-1": lambda w: -1,
    "99": lambda w: 99,
    "True": lambda w: True,
    "object()": lambda w: object(),
    "cpu": lambda w: "cpu",
    "cuda": lambda w: "cuda",
    "cuda:1": lambda w: "cuda:1",
    "cuda:9": lambda w: "cuda:9",
    "remote": lambda w: "remote",
    "remote:k": lambda w: f"remote:{w.device.index}",
    "remote:99": lambda w: "remote:99",
    "nonsense": lambda w: "nonsense",
    "device(cpu)": lambda w: torch.device("cpu"),
    "device(cuda:1)": lambda w: torch.device("cuda", 1),
    "device(remote)": lambda w: torch.device("remote"),
    "device(remote:k)": lambda w: w.device,
    "place": lambda w: dr.place(1, "cuda:0"),
    "no place": lambda w: dr.types.Place(1, "cuda:9"),
    "mesh's device": lambda w: w.on_mesh.device,
    "get_device()": lambda w: w.x.get_device(),
}
ENTRIES: dict[str, Callable[[World, Any], Any]] = {
    "FloatTensor(device=)": lambda w, s: dr.factories.FloatTensor(2, device=s),
    "torch.remote.device()": lambda w, s: entered(s),
    "Stream()": lambda w, s: dr.Stream(s).place,
    "Stream(device=)": lambda w, s: dr.Stream(device=s).place,
    "Stream(1, device=)": lambda w, s: dr.Stream(1, s).place,
    "dr.load(place=)": lambda w, s: dr.load(w.checkpoint, place=s),
    "x.to()": lambda w, s: w.x.to(s),
    "x.to(node=)": lambda w, s: w.x.to(node=s),
    "x.to(node=0, device=)": lambda w, s: w.x.to(node=0, device=s),
    "module.to()": lambda w, s: nn.Linear(1, 1).to(dr.place(*FAR)).to(s).weight,
    "module.to(node=)": lambda w, s: nn.Linear(1, 1).to(dr.place(*FAR)).to(node=s).weight,
    "local module.to(node=)": lambda w, s: nn.Linear(1, 1).to(node=s).weight,
    "local module.to(node=0, device=)": lambda w, s: nn.Linear(1, 1).to(node=0, device=s).weight,
    "isend(dst=)": lambda w, s: sent_to(w.x, s),
    "torch.load(map_location=)": lambda w, s: torch.load(io.BytesIO(w.file), map_location=s),
    "dr.on()": lambda w, s: entered_on(s),
    "publish": lambda w, s: looked_up(w, s),
    "new_group()": lambda w, s: dr.distributed.new_group([s]).places[0],
}


def meaning(world: World, entry: str, spelling: str) -> str:
    """Return the place that a spelling means, or the name of the error's class."""
    try:
        found = ENTRIES[entry](world, SPELLINGS[spelling](world))
    except Exception as error:
        return type(error).__name__
    if isinstance(found, torch.Tensor):
        found = getattr(found, "place", "here")
    return str(found)


# A row for each spelling and a column for each entry, in the order of ENTRIES. Torch alone decides about "-":
# whether a file comes to a GPU of this machine.
TABLE = """
None              0c   00   00   00   10   11   11   11   01   11   11   here 0c   U    here P    T    U
0                 00   00   00   00   10   01   10   01   00   00   01   0c   00   01   T    00   00   00
1                 01   01   10   01   11   11   11   11   01   01   11   1c   01   U    T    10   01   10
-1                0c   P    P    0c   1c   P    1c   P    0c   R    P    P    0c   P    T    P    R    P
99                P    P    P    P    P    P    P    P    P    P    P    P    P    P    T    P    P    P
True              P    P    P    P    P    P    P    P    P    T    P    P    P    U    T    P    T    P
object()          P    P    P    P    P    P    T    P    P    T    P    P    P    U    T    P    T    U
cpu               0c   P    P    0c   1c   here here P    0c   here P    P    0c   U    here P    here U
cuda              00   P    P    00   10   P    10   P    00   10   P    P    00   U    -    P    here U
cuda:1            01   P    P    01   11   P    11   P    01   11   P    P    01   U    -    P    here U
cuda:9            P    P    P    P    P    P    P    P    P    P    P    P    P    U    -    P    here U
remote            00   00   00   00   P    00   00   P    P    00   P    P    P    U    00   P    00   U
remote:k          11   11   11   11   P    11   11   P    P    11   P    P    P    U    11   P    11   U
remote:99         P    P    P    P    P    P    P    P    P    P    P    P    P    U    P    P    P    U
nonsense          P    P    P    P    P    P    R    P    P    R    P    P    P    U    R    P    R    U
device(cpu)       0c   P    P    0c   1c   here here P    0c   here P    P    0c   U    here P    here U
device(cuda:1)    01   P    P    01   11   P    11   P    01   11   P    P    01   U    -    P    here U
device(remote)    00   00   00   00   P    00   00   P    P    00   P    P    P    U    00   P    00   U
device(remote:k)  11   11   11   11   P    11   11   P    P    11   P    P    P    U    11   P    11   U
place             10   10   10   10   P    10   10   P    P    10   P    P    P    10   10   10   10   10
no place          P    P    P    P    P    P    P    P    P    P    P    P    P    P    P    P    P    P
mesh's device     mesh mesh mesh mesh P    mesh mesh P    P    mesh P    P    P    U    mesh P    mesh U
get_device()      01   11   10   01   11   11   11   11   01   01   11   1c   01   U    T    10   01   10
"""
ROWS = {line[:18].rstrip(): line[18:].split() for line in TABLE.strip().splitlines()}


def test_the_table_has_every_pair() -> None:
    assert list(ROWS) == list(SPELLINGS)
    assert {len(row) for row in ROWS.values()} == {len(ENTRIES)}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_means_the_same_place_wherever_it_is_given(world: World, spelling: str) -> None:
    expected = dict(zip(ENTRIES, ROWS[spelling]))
    found = {entry: meaning(world, entry, spelling) for entry, word in expected.items() if word != "-"}
    assert found == {entry: WORDS[word] for entry, word in expected.items() if word != "-"}
