"""One model in memory, many readers: only its owner can write what a session shares."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.backend.whole import _record
from distruntime.log.storage import Storage
from distruntime.publishing import adoption
from distruntime.session.session import active_session
from distruntime.tensors.worker_functions import issue_function
from distruntime.wire.messages import (
    ADOPT,
    PUBLISH,
    DropOlder,
    DropPublished,
    FindPublished,
    ListPublished,
    ListVersions,
)
from keeping import Keeping, enter, keeping
from processes import Child, until

READ_ONLY = "cannot be written: another session has published it"


@pytest.fixture(autouse=True)
def _own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_SIGNING_KEY", str(tmp_path / "signing-key"))
    monkeypatch.setenv("DISTRUNTIME_TRUSTED_KEYS", str(tmp_path / "trusted-keys"))


def network() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )


@pytest.fixture
def daemon(tmp_path: Path, fresh_session: Callable[..., Any]) -> Iterator[Keeping]:
    """A worker on which alice has published, and on which a session of bob's is open."""
    with keeping(tmp_path) as (found,):
        enter(fresh_session, [found], "alice")
        dr.publish("x", torch.arange(12.0, device=REMOTE).reshape(3, 4), shared=True)
        dr.publish("model", network().to(REMOTE), shared=True)
        dr.publish("private", torch.ones(2, device=REMOTE))
        enter(fresh_session, [found], "bob")
        yield found


def test_names_shows_what_others_share(daemon: Keeping) -> None:
    dr.publish("mine", torch.ones(1, device=REMOTE))
    assert [(one.name, one.owner, one.shared) for one in dr.names()] == [
        ("mine", "bob", False),
        ("alice/model", "alice", True),
        ("alice/x", "alice", True),
    ]
    for name in ("alice/private", "private", "x"):
        with pytest.raises(dr.errors.UsageError, match=f"nothing is published as '{name}'"):
            dr.lookup(name)


def test_a_reader_computes_with_it(daemon: Keeping) -> None:
    model = dr.lookup("alice/model").eval()
    with torch.no_grad():
        out = model(torch.ones(3, 4, device=REMOTE))
    assert out.shape == (3, 2)
    # A result of it belongs to the reader.
    out += 1
    loss = model(torch.ones(3, 4, device=REMOTE)).sum()
    loss.backward()
    assert model[0].weight.grad.abs().sum().item() > 0
    x = dr.lookup("alice/x")
    assert x.T[1].tolist() == [1.0, 5.0, 9.0] and x.sum().item() == 66.0 and dr.lookup("alice/x") is x
    with dr.stream(dr.Stream(0)):
        assert (x * 2).sum().item() == 132.0


def test_a_part_on_a_worker_that_is_not_connected_is_named_and_what_may_be_in_its_place(
    tmp_path: Path, fresh_session: Callable[..., Any]
) -> None:
    with keeping(tmp_path, 3) as (one, two, other):
        enter(fresh_session, [one, two], "alice")
        dr.publish("pair", [torch.ones(1, device=dr.place(node)) for node in (0, 1)], shared=True)
        missing = r"some of 'alice/pair' is on node 1 .*connect to that worker too"
        enter(fresh_session, [one], "bob")
        with pytest.raises(dr.errors.UsageError, match=f"{missing}$"):
            dr.lookup("alice/pair")
        enter(fresh_session, [one, other], "carol")
        with pytest.raises(
            dr.errors.UsageError, match=rf"{missing}\. Node 1 here is process \d+ of that host"
        ):
            dr.lookup("alice/pair")


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda x: x.add_(1),
    "by an operator": lambda x: x.__imul__(2),
    "through a view": lambda x: x[0].zero_(),
    "through a view of a view": lambda x: x.t()[1:].detach().fill_(1),
    "by index": lambda x: x.__setitem__(0, 5.0),
    "out=": lambda x: torch.add(x, 1, out=x),
    "a copy into it": lambda x: x.copy_(torch.zeros(3, 4)),
    "a remote copy into it": lambda x: x.copy_(torch.zeros(3, 4, device=REMOTE)),
    "foreach": lambda x: torch._foreach_add_([torch.ones(1, device=REMOTE), x], 1.0),
    "resize_": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.ones(1, device=REMOTE)),
    "as what set_ gives": lambda x: torch.ones(1, device=REMOTE).set_(x).zero_(),
    "random numbers": lambda x: x.normal_(),
    "data": lambda x: x.data.zero_(),
    "what its worker must describe": lambda x: torch.masked_select(x, x > 3, out=x),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_refused_here(daemon: Keeping, how: str) -> None:
    x = dr.lookup("alice/x")
    with pytest.raises(
        dr.errors.UsageError,
        match=rf"a tensor of 'alice/x' {READ_ONLY}(.|\n)*test_publish_shared.py(.|\n)*x.clone\(\)",
    ):
        WRITES[how](x)
    assert x.tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    dr.synchronize()


def test_a_write_is_refused_though_the_same_was_done_to_ones_own_before(daemon: Keeping) -> None:
    x, own = dr.lookup("alice/x"), torch.zeros(3, 4, device=REMOTE)
    for _ in range(3):
        own.add_(1)
    with pytest.raises(dr.errors.UsageError, match=READ_ONLY):
        x.add_(1)
    own.add_(1)
    assert own.sum().item() == 48.0


def test_training_needs_a_copy_of_ones_own(daemon: Keeping) -> None:
    theirs = dr.lookup("alice/model")
    batch = torch.ones(3, 4, device=REMOTE)
    # torch's schema says nothing of the running statistics.
    with pytest.raises(dr.errors.UsageError, match=READ_ONLY):
        theirs(batch)
    theirs.eval()
    for cls in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = cls(theirs.parameters(), lr=0.1)
        theirs(batch).sum().backward()
        with pytest.raises(dr.errors.UsageError, match=READ_ONLY):
            optimizer.step()
    own = copy.deepcopy(theirs).train()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    own(batch).sum().backward()
    optimizer.step()
    assert not torch.equal(own[3].bias.cpu(), theirs[3].bias.cpu())
    assert theirs[1].num_batches_tracked.item() == 0


def test_it_cannot_be_published_again_but_a_copy_can(
    daemon: Keeping, fresh_session: Callable[..., Any]
) -> None:
    x = dr.lookup("alice/x")
    with pytest.raises(
        dr.errors.UsageError,
        match="'mine' would hold a tensor of 'alice/x', which is another session's: publish a copy, copy",
    ):
        dr.publish("mine", [x[0]])
    dr.publish("mine", copy.deepcopy(x))
    enter(fresh_session, [daemon], "bob")
    dr.lookup("mine").zero_()
    assert dr.lookup("alice/x").sum().item() == 66.0


def test_it_lives_as_long_as_somebody_reads_it(daemon: Keeping) -> None:
    x = dr.lookup("alice/x")
    assert daemon.kept["alice"].drop("x", lambda _: True)
    with pytest.raises(dr.errors.UsageError, match="nothing is published as 'alice/x'"):
        dr.lookup("alice/x")
    del daemon.kept["alice"]
    gc.collect()
    assert x.sum().item() == 66.0
    with pytest.raises(dr.errors.UsageError, match=READ_ONLY):
        x.zero_()


def test_the_owner_gets_what_can_be_written(daemon: Keeping, fresh_session: Callable[..., Any]) -> None:
    enter(fresh_session, [daemon], "alice")
    x = dr.lookup("alice/x")
    assert dr.lookup("x") is x
    x += 1
    enter(fresh_session, [daemon], "bob")
    assert dr.lookup("alice/x").sum().item() == 78.0  # live


# -- masters that do not check: the worker does --------------------------------------------------------------


def lawless(proxy: Any) -> Any:
    """Make this process forget that it may only read a tensor."""
    proxy._handle.storage = Storage(proxy._handle.spec)
    return proxy


def stays(daemon: Keeping, how: Callable[[Any], object]) -> None:
    """Hold that a worker refuses to write the value that `how` is given."""
    x = lawless(dr.lookup("alice/x"))
    how(x)
    with pytest.raises(
        dr.errors.UsageError, match="would write what another session has published"
    ) as caught:
        dr.synchronize()
    assert isinstance(caught.value, dr.errors.RemoteError)
    assert torch.equal(kept(daemon), torch.arange(12.0).reshape(3, 4))
    dr.synchronize()


def kept(daemon: Keeping) -> Any:
    """Return the tensor itself."""
    (record,) = daemon.kept["alice"].versions("x")
    return record.tensors[0]


# The others replace the value under the reader's own ref, or raise where they stand.
LAWLESS = {
    name: act
    for name, act in WRITES.items()
    if name not in ("what its worker must describe", "a copy into it")
}


@pytest.mark.parametrize("how", LAWLESS)
def test_a_worker_refuses_too(daemon: Keeping, how: str) -> None:
    stays(daemon, LAWLESS[how])


def test_a_worker_refuses_by_templates_that_it_had_before(daemon: Keeping) -> None:
    own = torch.zeros(3, 4, device=REMOTE)
    for _ in range(3):
        own.add_(1)
    assert own.sum().item() == 36.0
    stays(daemon, lambda x: x.add_(1))
    own.add_(1)
    assert own.sum().item() == 48.0


def test_a_worker_refuses_running_statistics(daemon: Keeping) -> None:
    model = dr.lookup("alice/model")
    for tensor in (*model.parameters(), *model.buffers()):
        lawless(tensor)
    model[1].num_batches_tracked = None
    with pytest.raises(dr.errors.UsageError, match=r"would write(.|\n)*native_batch_norm"):
        model[1](torch.ones(3, 4, device=REMOTE)).sum().item()
    dr.synchronize()
    assert model[1].running_mean.tolist() == [0.0] * 4


def test_a_worker_refuses_its_own_functions(daemon: Keeping) -> None:
    node = dr.lookup("alice/x")._handle.place.node
    stays(daemon, lambda x: issue_function(node, "resize_storage", [x, 0]))


def test_a_worker_records_nothing_that_writes(daemon: Keeping) -> None:
    x = lawless(dr.lookup("alice/x"))
    _record(torch.ops.aten.add_.Tensor, (x, x), {}, x._handle.place, [False, False], None)
    with pytest.raises(dr.errors.UsageError, match="only what writes nothing is recorded"):
        dr.synchronize()
    assert x.sum().item() == 66.0


def test_a_worker_refuses_collectives_that_write(daemon: Keeping) -> None:
    with dr.on(0, "cuda:1"):
        other = torch.ones(3, 4)
    x = lawless(dr.lookup("alice/x"))
    group = dr.distributed.new_group([x.place, other.place])
    dr.distributed.all_reduce([x, other], group=group)
    with pytest.raises(dr.errors.UsageError, match="would write"):
        other.tolist()
    del x
    gc.collect()
    assert dr.lookup("alice/x").sum().item() == 66.0


def test_a_worker_does_not_keep_what_its_reader_lets_go(daemon: Keeping) -> None:
    x = dr.lookup("alice/x")
    held = len(daemon.state.slots)
    del x
    dr.names()
    dr.lookup("alice/model")
    until(lambda: (gc.collect(), dr.lookup("alice/model"), len(daemon.state.slots) <= held + 20)[2])
    daemon.kept["alice"].drop("x", lambda _: True)


FIELDS = ["z", 1, False, "", [], b""]

NONSENSE: dict[str, list[Any]] = {
    "a publication that is none": [PUBLISH, 1, 5, []],
    "a publication without a version": [PUBLISH, 1, ["z", 0, False, "", [], b""], []],
    "a publication cut short": [PUBLISH, 1, FIELDS],
    "of refs that are none": [PUBLISH, 1, FIELDS, 7],
    "of refs that nothing can be": [PUBLISH, 1, FIELDS, [[]]],
    "an adoption cut short": [ADOPT, 1],
    "an adoption by no refs": [ADOPT, 1, 1, 5],
    "an adoption by what no ref can be": [ADOPT, 1, 1, [[1]]],
}


@pytest.mark.parametrize("what", NONSENSE)
def test_instructions_that_make_no_sense_end_the_session_and_nothing_else(
    daemon: Keeping, fresh_session: Callable[..., Any], what: str
) -> None:
    node = active_session().nodes[0]
    node.append(NONSENSE[what], (0, None, 0))
    until(lambda: node.failed is not None)
    assert "makes no sense" in str(node.failed) or "is no publication" in str(node.failed)
    enter(fresh_session, [daemon], "bob")
    assert dr.lookup("alice/x").sum().item() == 66.0


@pytest.mark.parametrize(
    "question, field",
    [
        (FindPublished(1, None, "x", 1), "owner"),
        (FindPublished(1, "alice", ["x"], 1), "name"),
        (FindPublished(1, "alice", "x", "1"), "token"),
        (DropPublished(1, "x", None), "version"),
        (DropOlder(1, 5, 5), "name"),
        (ListVersions(1, {}), "name"),
        (ListPublished([1]), "request"),
    ],
    ids=repr,
)
def test_questions_that_make_no_sense_too(daemon: Keeping, question: Any, field: str) -> None:
    session = active_session()
    session.post(session.nodes[0], question)
    until(lambda: session.nodes[0].failed is not None)
    assert f"{type(question).__name__}.{field} must be" in str(session.nodes[0].failed)


def test_what_is_not_there_is_poisoned(daemon: Keeping) -> None:
    session = active_session()
    request = session.requests.new(session.nodes[0], "published")
    session.nodes[0].append([PUBLISH, request.number, FIELDS, [999_999]], (0, None, 0))
    with pytest.raises(dr.errors.InternalError, match="no tensor, or not here"):
        session.value(request)
    x = lawless(torch.ones(1, device=REMOTE))
    session.nodes[0].append([ADOPT, 77, 1, [x._handle.ref]], (0, None, 0))
    x._handle.born = (session.nodes[0].base + len(session.nodes[0].words), None, 0)
    with pytest.raises(dr.errors.InternalError, match="what was looked up is not here"):
        x.tolist()


def publish_when_told(first: str, second: str) -> None:
    """Publish pairs on two nodes, the next one for each line that is read."""
    dr.init_master_worker(workers=[first, second], timeout=90, session="alice")
    for k in itertools.count():
        with dr.node(1):
            far = torch.full((2,), k, device=REMOTE)
        dr.publish("pair", [torch.full((2,), k, device=REMOTE), far], shared=True)
        print("published", flush=True)
        input()


@pytest.mark.parametrize("times", [1, 3])
def test_a_lookup_that_meets_two_versions_looks_again(
    tmp_path: Path, fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real, crossed = adoption.ask, []

    def ask(session: Any, *detail: Any) -> Any:
        """The first worker answers before a pair is published anew, the second afterwards."""
        answers = real(session, *detail)
        if detail[0] is not FindPublished or len(crossed) == times:
            return answers
        crossed.append(detail)
        child.tell()
        child.expect("published")
        (first, early), (second, _) = answers.items()
        return {first: early, second: real(session, *detail)[second]}

    with (
        keeping(tmp_path, 2) as daemons,
        Child(publish_when_told, *(daemon.address for daemon in daemons)) as child,
    ):
        child.expect("published")
        enter(fresh_session, daemons, "bob")
        monkeypatch.setattr(adoption, "ask", ask)
        assert [t.tolist() for t in dr.lookup("alice/pair")] == [[times, times]] * 2
        assert len(crossed) == times
        del crossed[:]
        times = 1 << 30
        monkeypatch.setattr(sys.modules["distruntime.publishing.publish"], "_PATIENCE", 0.3)
        with pytest.raises(
            dr.errors.UsageError,
            match=r"'alice/pair' is incomplete. Another process publishes it again and again",
        ):
            dr.lookup("alice/pair")
