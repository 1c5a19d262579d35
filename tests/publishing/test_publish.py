"""Publishing: what is looked up is what was published, whoever asks.

It stays so, whatever becomes of the master.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from distruntime.wire.messages import AWAIT
from keeping import Keeping, enter, keeping
from processes import Child, blocked, slots, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_SIGNING_KEY", str(tmp_path / "signing-key"))
    monkeypatch.setenv("DISTRUNTIME_TRUSTED_KEYS", str(tmp_path / "trusted-keys"))


@pytest.fixture
def clean(session: object) -> Iterator[object]:
    """The shared session, in which nothing stays published."""
    yield session
    for one in dr.names():
        dr.unpublish(one.name)


@pytest.fixture
def daemons(tmp_path: Path, fresh_session: Callable[..., Any]) -> Iterator[list[Keeping]]:
    with keeping(tmp_path, 1) as found:
        yield found


class Tied(torch.nn.Module):
    """Tied weights, a buffer, one parameter without gradient, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 10, bias=True)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 3.0]), persistent=False)
        self.title = "tied"

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(tokens)) * self.scale)


def tokens() -> torch.Tensor:
    return torch.arange(8, device=REMOTE)


def same_values(a: Any, b: Any) -> bool:
    one, two = dr.fetch(dict(a.state_dict())), dr.fetch(dict(b.state_dict()))
    return list(one) == list(two) and all(torch.equal(one[k], two[k]) for k in one)


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(tokens()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- what comes back -----------------------------------------------------------------------------------------


def test_a_module_comes_back_as_a_module(clean: object) -> None:
    model = Tied().to(REMOTE)
    values = dr.fetch(dict(model.state_dict()))
    dr.publish("model", model)
    del model
    again = dr.lookup("model")
    assert type(again) is Tied and again.title == "tied" and again.training
    assert again.head.weight is again.embed.weight
    assert all(isinstance(p, torch.nn.Parameter) for p in again.parameters())
    assert [p.requires_grad for p in again.parameters()] == [True, True, True, False]
    assert "scale" in dict(again.named_buffers()) and "scale" not in again.state_dict()
    found = dr.fetch(dict(again.state_dict()))
    assert list(found) == list(values) and all(torch.equal(found[k], values[k]) for k in values)
    again.load_state_dict({k: v.to(REMOTE) for k, v in values.items()})


def test_training_goes_on_as_if_nothing_had_been(clean: object) -> None:
    model = Tied().to(REMOTE)
    twin = copy.deepcopy(model)
    optimizer, undisturbed = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    expected = steps(twin, undisturbed, 6)
    losses = steps(model, optimizer, 3)
    dr.publish("model", model)
    dr.publish("opt", optimizer)
    del model, optimizer
    model, optimizer = dr.lookup("model"), dr.lookup("opt")
    ours = optimizer.param_groups[0]["params"]
    assert [p is q for p, q in zip(ours, model.parameters())] == [True] * len(ours)
    assert optimizer.state[model.norm.weight]["step"].item() == 3
    assert losses + steps(model, optimizer, 3) == expected
    assert same_values(model, twin)


def test_a_tree_comes_back_with_its_ties_and_its_views(clean: object) -> None:
    base = torch.arange(12.0, device=REMOTE).reshape(3, 4)
    tree = {
        "base": base,
        "row": base[1],
        "turned": base.t(),
        "again": [base, (base, 5)],
        "on": base.device,
        "local": torch.tensor(7),
    }
    dr.publish("tree", tree)
    del tree, base
    found = dr.lookup("tree")
    assert found["again"][0] is found["base"] is found["again"][1][0] and found["again"][1][1] == 5
    assert (
        found["on"] == found["base"].device
        and found["local"].item() == 7
        and found["local"].device.type == "cpu"
    )
    found["base"].zero_()
    assert found["row"].tolist() == [0.0] * 4 and found["turned"].sum().item() == 0
    found["row"].fill_(2.0)
    assert found["base"].sum().item() == 8.0 and found["turned"].stride() == (1, 4)


def test_views_under_two_names_share_their_memory(clean: object) -> None:
    base = torch.zeros(4, device=REMOTE)
    dr.publish("base", base)
    dr.publish("view", base[1:3])
    del base
    view = dr.lookup("view")
    base = dr.lookup("base")
    view += 1
    assert base.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_one_tensor_is_one_object_however_it_is_looked_up(clean: object) -> None:
    model = torch.nn.Linear(2, 2).to(REMOTE)
    dr.publish("model", model)
    dr.publish("weight", {"w": model.weight})
    assert dr.lookup("model").weight is model.weight is dr.lookup("weight")["w"]
    del model
    first = dr.lookup("weight")["w"]
    assert dr.lookup("model").weight is first is dr.lookup("weight")["w"]


def test_a_tensor_that_was_made_another_is_not_taken_for_the_published_one(clean: object) -> None:
    x = torch.ones(2, device=REMOTE)
    dr.publish("x", x)
    x.data = torch.zeros(2, device=REMOTE)
    assert dr.lookup("x").tolist() == [1.0, 1.0] and x.tolist() == [0.0, 0.0]


def test_what_is_published_is_alive(clean: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.publish("x", x)
    x += 1
    # This is a local tensor. It must not become another value on the worker.
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    del x
    assert dr.lookup("x").tolist() == [1.0, 2.0, 3.0]
    y = dr.lookup("x")
    y.copy_(torch.tensor([4.0, 5.0, 6.0]))
    del y
    assert dr.lookup("x").tolist() == [4.0, 5.0, 6.0]


def test_a_copy_is_not(clean: object) -> None:
    base = torch.arange(6.0, device=REMOTE)
    weight = torch.nn.Parameter(torch.ones(2, device=REMOTE))
    dr.publish("x", copy.deepcopy([base, base[2:4], weight]))
    base += 1
    with torch.no_grad():
        weight.zero_()
    again, view, copied = dr.lookup("x")
    assert again is not base and again.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert isinstance(copied, torch.nn.Parameter) and copied.requires_grad and copied.tolist() == [1.0, 1.0]
    again.zero_()
    assert view.tolist() == [0.0, 0.0] and view.shape == (2,)


def test_what_has_a_history_comes_back_as_a_leaf(clean: object) -> None:
    w = torch.ones(2, device=REMOTE, requires_grad=True)
    y = w * 2
    dr.publish("y", [y, y.detach()])
    found, flat = dr.lookup("y")
    assert found.is_leaf and found.requires_grad and not flat.requires_grad
    assert found.tolist() == [2.0, 2.0]
    found.sum().backward()
    assert w.grad is None and found.grad is not None


def test_attributes_and_functions_travel(clean: object) -> None:
    x = torch.ones(2, device=REMOTE)
    x.note = ["kept", x * 3]
    dr.publish("x", {"x": x, "f": partial(lambda y: lambda: y + 1, x)()})
    del x
    found = dr.lookup("x")
    assert found["x"].note[0] == "kept" and found["x"].note[1].tolist() == [3.0, 3.0]
    assert found["f"]().tolist() == [2.0, 2.0]


def test_on_two_nodes_and_their_gpus(fresh_session: Callable[..., Any]) -> None:
    fresh_session(simulate_cuda=2)
    with dr.on(0, "cuda:1"):
        a = torch.full((2,), 1.0)
    with dr.on(1, "cpu"):
        b = torch.full((3,), 2.0)
    dr.publish("pair", (a, b))
    (row,) = dr.names()
    assert (row.name, row.nbytes, row.places, row.shared) == (
        "pair",
        20,
        (dr.types.Place(0, "cuda:1"), dr.types.Place(1, "cpu")),
        False,
    )
    assert repr(dr.names()).splitlines()[1].split()[:3] == ["pair", "tuple", "of"]
    places = a.place, b.place
    del a, b
    a, b = dr.lookup("pair")
    assert (a.place, b.place) == places and a.tolist() == [1.0, 1.0] and b.tolist() == [2.0] * 3


def test_streams_keep_the_order(clean: object) -> None:
    x = torch.zeros(300, 300, device=REMOTE)
    stream = dr.Stream(0)
    with dr.stream(stream):
        for _ in range(50):
            x += 1
        dr.publish("x", x)
    del x
    with dr.stream(stream):
        found = dr.lookup("x")
        found += 1
    assert found.mean().item() == 51.0


# -- names ---------------------------------------------------------------------------------------------------


def test_names_are_a_table(clean: object) -> None:
    assert repr(dr.names()) == "nothing is published"
    model = torch.nn.Linear(1000, 1200, bias=False).to(REMOTE)
    dr.publish("model", model, shared=True)
    dr.publish("both", {"model": model, "opt": torch.optim.SGD(model.parameters())})
    head, first, second = (line.split("  ") for line in repr(dr.names()).splitlines())
    assert [cell.strip() for cell in head if cell] == ["name", "what", "bytes", "places", "shared", "owner"]
    owner = second[-1].strip()
    assert "dict of 2 (model: Linear, 1.2 M parameters; opt: SGD)" in "  ".join(first)
    assert [cell.strip() for cell in second if cell] == [
        "model",
        "Linear, 1.2 M parameters",
        "4.6 MiB",
        "node 0 cpu",
        "yes",
        owner,
    ]
    assert "<table>" in dr.names()._repr_html_()


def test_a_name_that_is_not_there(clean: object) -> None:
    with pytest.raises(
        dr.errors.UsageError,
        match=r"nothing is published as 'model', nor under any other name: dr.publish\(name, model\)",
    ):
        dr.lookup("model")
    for name in ("optimizer", "model-2"):
        dr.publish(name, torch.ones(1, device=REMOTE))
    with pytest.raises(
        dr.errors.UsageError, match="nothing is published as 'modl-2': there are model-2, optimizer"
    ):
        dr.lookup("modl-2")
    with pytest.raises(
        dr.errors.UsageError, match="nothing is published as 'nobody/model-2': there are model-2, optimizer"
    ):
        dr.lookup("nobody/model-2")
    with pytest.raises(dr.errors.UsageError, match="nothing is published as 'model'"):
        dr.unpublish("model")


@pytest.mark.parametrize("name", ["", "a/b", "x" * 201, 5, None, "two\nlines"])
def test_what_is_no_name(clean: object, name: Any) -> None:
    for act in (lambda: dr.publish(name, torch.ones(1, device=REMOTE)), lambda: dr.unpublish(name)):
        with pytest.raises(dr.errors.UsageError, match="a name"):
            act()


def test_a_name_is_given_anew(clean: object) -> None:
    x, y = torch.ones(2, device=REMOTE), torch.zeros(2, device=REMOTE)
    dr.publish("x", x)
    dr.publish("x", y)
    assert dr.lookup("x") is y and len(dr.names()) == 1
    del x, y
    gc.collect()
    before = slots()
    dr.publish("x", torch.zeros(3, device=REMOTE))
    dr.unpublish("x")
    assert slots() <= before
    with pytest.raises(dr.errors.UsageError, match="nothing is published"):
        dr.lookup("x")


def test_nothing_is_left_when_nobody_holds_it(clean: object) -> None:
    gc.collect()
    gc.disable()
    try:
        before = slots()
        for _ in range(3):
            model = Tied().to(REMOTE)
            dr.publish("model", model)
            model(tokens()).sum().backward()
            del model
            dr.lookup("model")
        dr.unpublish("model")
        assert slots() == before
    finally:
        gc.enable()


# -- what cannot be published --------------------------------------------------------------------------------


def test_local_tensors_are_refused_by_where_they_are(clean: object) -> None:
    remote = torch.ones(2, device=REMOTE)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(
        dr.errors.UsageError,
        match=r"a Sequential cannot be published: its 0.weight is a local tensor, \(2, 2\) float32 on cpu",
    ):
        dr.publish("model", model)
    model[0].to(REMOTE)
    with pytest.raises(
        dr.errors.UsageError, match=r'its 1.weight is a local tensor.* Send it first: .to\("remote"\)'
    ):
        dr.publish("model", model)
    with pytest.raises(
        dr.errors.UsageError, match=r"a dict cannot be published: its \['a'\]\[1\]\['b'\] is a local tensor"
    ):
        dr.publish("tree", {"a": [remote, {"b": torch.zeros(3)}]})
    with pytest.raises(dr.errors.UsageError, match="it is a local tensor"):
        dr.publish("tensor", torch.zeros(3))
    with pytest.raises(
        dr.errors.UsageError, match="there is no remote tensor in what is to be published as 'number'"
    ):
        dr.publish("number", {"x": torch.zeros(()), "y": 5})
    assert len(dr.names()) == 0


def test_what_cannot_be_pickled_is_refused(clean: object) -> None:
    with pytest.raises(
        dr.errors.UsageError,
        match=r"a dict cannot be published: TypeError: cannot pickle '_thread.lock' object",
    ):
        dr.publish("x", {"x": torch.ones(2, device=REMOTE), "lock": threading.Lock()})


def test_what_is_on_a_mesh_is_refused_with_what_to_do(clean: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.ones(4, device=mesh.device)
    with pytest.raises(dr.errors.NotSupportedError, match=r"publish its members' shards.*dr.from_shards"):
        dr.publish("x", x)
    dr.publish("x", [x.member(k) for k in range(mesh.size())])
    x += 1
    del x
    x = dr.from_shards(dr.lookup("x"), mesh)
    assert [shard.tolist() for shard in dr.shards(x)] == [[2.0] * 4] * 2
    x += 1
    assert dr.lookup("x")[1].tolist() == [3.0] * 4
    sharded = distribute_tensor(torch.arange(4.0, device=mesh.device), mesh, [Shard(0)])
    with pytest.raises(
        dr.errors.NotSupportedError,
        match=r"a DTensor cannot be published as one.*dr.from_shards and DTensor.from_local",
    ):
        dr.publish("sharded", {"w": sharded})
    dr.publish("sharded", [sharded.to_local().member(k) for k in range(mesh.size())])
    again = DTensor.from_local(dr.from_shards(dr.lookup("sharded"), mesh), mesh, [Shard(0)])
    assert again.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_poisoned_tensor_raises_its_first_cause_and_leaves_what_was_there(clean: object) -> None:
    dr.publish("x", torch.ones(2, device=REMOTE))
    bad = torch.ones(3, device=REMOTE)[torch.tensor([7], device=REMOTE)]
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        dr.publish("x", {"good": torch.zeros(2, device=REMOTE), "bad": bad + 1})
    assert dr.lookup("x").tolist() == [1.0, 1.0] and len(dr.names()) == 1


def test_what_changed_its_shape_since_must_be_published_again(clean: object) -> None:
    x = torch.ones(4, device=REMOTE)
    dr.publish("x", x)
    x.resize_(2)
    assert dr.lookup("x") is x
    dr.synchronize()
    del x
    with pytest.raises(
        dr.errors.UsageError,
        match=r"a tensor has become float32 \(2,\) since it was published, as float32 \(4,\): "
        "publish it again",
    ):
        dr.lookup("x")


def test_what_changes_its_shape_while_it_is_looked_up_is_not_taken_for_what_it_was(clean: object) -> None:
    x = torch.ones(4, device=REMOTE)
    dr.publish("x", x)
    with blocked(dr.default_stream()):
        x.resize_(2)
        del x
        found = dr.lookup("x")
    with pytest.raises(dr.errors.UsageError, match="has changed its shape since it was published"):
        found.tolist()


def test_a_lost_node_is_named(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session()
    with dr.node(1):
        dr.publish("far", torch.ones(2, device=REMOTE))
    dr.publish("near", torch.ones(2, device=REMOTE))
    os.kill(session.workers[1].pid, signal.SIGKILL)
    until(lambda: session.nodes[1].failed is not None)
    with pytest.raises(dr.errors.NodeFailed, match="node 1"):
        dr.lookup("far")
    assert dr.lookup("near").tolist() == [1.0, 1.0]
    with pytest.raises(dr.errors.UsageError, match=r"there is near; node 1 .* is lost, with what was there"):
        dr.lookup("other")


# -- beyond the master ---------------------------------------------------------------------------------------

_FIRST = """
import os, signal, torch, distruntime as dr
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
session = dr.init_master_worker(workers=[ADDRESS], timeout=90, session="alice")
torch.manual_seed(0)
model = Net().to("remote")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.ones(4, 8, device="remote")
kept = [torch.ones(5, device="remote") for _ in range(100)]
for _ in range(2):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
dr.publish("run", {"model": model, "opt": optimizer})
print("sum", model(x).sum().item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

_SECOND = """
import torch, distruntime as dr
session = dr.init_master_worker(workers=[ADDRESS], timeout=90, session="alice", resume=True)
run = dr.lookup("run")
model, optimizer = run["model"], run["opt"]
assert type(model).__name__ == "Net" and type(model).__module__ == "__main__"
assert model.layers[2].weight is model.layers[0].weight is optimizer.param_groups[0]["params"][0]
x = torch.ones(4, 8, device="remote")
print("sum", model(x).sum().item(), flush=True)
optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
assert optimizer.state[model.layers[0].weight]["step"].item() == 3
"""


def run(source: str, address: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")]),
        "OMP_NUM_THREADS": "1",
    }
    code = source.replace("ADDRESS", repr(address))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow(reason="starts two masters, one after the other, with two daemons: 12.1 s in the suite")
def test_a_killed_kernel_costs_nothing_that_was_published(daemons: list[Keeping]) -> None:
    (daemon,) = daemons
    first = run(_FIRST, daemon.address)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = run(_SECOND, daemon.address)
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout and first.stdout.startswith("sum")


def test_the_next_master_gets_what_was_published_and_nothing_else(
    daemons: list[Keeping], fresh_session: Callable[..., Any]
) -> None:
    (daemon,) = daemons
    enter(fresh_session, daemons, "alice")
    x, lost = torch.ones(3, device=REMOTE), torch.zeros(3, device=REMOTE)
    dr.publish("x", x)
    x += 1
    dr.synchronize()
    published, unpublished = (weakref.ref(daemon.state.slots[t._handle.ref]) for t in (x, lost))
    session = enter(fresh_session, daemons, "alice")
    assert dr.lookup("x").tolist() == [2.0, 2.0, 2.0]
    assert published() is not None
    until(lambda: (gc.collect(), unpublished() is None)[1])
    assert [one.owner for one in dr.names()] == ["alice"] and session.name == "alice"
    with pytest.raises(dr.errors.SessionClosed):
        x.sum()


def test_a_write_that_failed_is_not_forgotten_with_its_master(
    daemons: list[Keeping], fresh_session: Callable[..., Any]
) -> None:
    enter(fresh_session, daemons, "alice")
    x = torch.ones(3, device=REMOTE)
    dr.publish("x", [x, torch.zeros(1, device=REMOTE)])
    x.index_copy_(0, torch.tensor([9], device=REMOTE), torch.zeros(1, device=REMOTE))
    with pytest.raises(IndexError):
        dr.synchronize()
    enter(fresh_session, daemons, "alice")
    x, zero = dr.lookup("x")
    assert zero.item() == 0.0
    with pytest.raises(IndexError):
        x.tolist()


def half_way(first: str, second: str) -> None:
    """Publish on two nodes; then anew, where the second one gets no further than before."""
    dr.init_master_worker(workers=[first, second], timeout=90, session="alice")
    with dr.node(1):
        far = torch.zeros(2, device=REMOTE)
    dr.publish("pair", [torch.zeros(2, device=REMOTE), far])
    active_session().nodes[1].append([AWAIT, 1, None, ""], (0, None, 0))
    print("half-way", flush=True)
    dr.publish("pair", [torch.ones(2, device=REMOTE), far + 1])


def test_a_master_that_dies_half_way_leaves_the_version_before(
    tmp_path: Path, fresh_session: Callable[..., Any]
) -> None:
    with keeping(tmp_path, 2) as daemons:
        with Child(half_way, *(daemon.address for daemon in daemons)) as child:
            child.expect("half-way")
            until(lambda: len(daemons[0].kept["alice"].versions("pair")) == 2)
            os.kill(child.pid, signal.SIGKILL)
        enter(fresh_session, daemons, "alice")
        assert [t.tolist() for t in dr.lookup("pair")] == [[0.0, 0.0], [0.0, 0.0]]
        dr.publish("pair", dr.lookup("pair"))
        assert [len(daemon.kept["alice"].versions("pair")) for daemon in daemons] == [1, 1]


def test_a_session_with_fewer_nodes_says_which_one_is_missing(
    tmp_path: Path, fresh_session: Callable[..., Any]
) -> None:
    with keeping(tmp_path, 2) as daemons:
        enter(fresh_session, daemons, "alice")
        with dr.node(1):
            far = torch.zeros(2, device=REMOTE)
        dr.publish("pair", [torch.zeros(2, device=REMOTE), far])
        enter(fresh_session, daemons[:1], "alice")
        with pytest.raises(
            dr.errors.UsageError,
            match=r"some of 'pair' is on node 1 of the session .* connect to that worker too",
        ):
            dr.lookup("pair")
        # This session numbers them otherwise.
        enter(fresh_session, daemons[::-1], "alice")
        assert [t.get_node() for t in dr.lookup("pair")] == [1, 0]


def test_a_misspelt_argument_is_told_which_is_meant(session: object) -> None:
    with pytest.raises(TypeError, match=r"publish\(\) got .* 'share'\. Did you mean 'shared'\?"):
        dr.publish("m", torch.ones(1), share=True)  # type: ignore[call-arg]
