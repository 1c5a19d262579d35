"""What goes wrong on meshes: members that fail one by one, streams that are cancelled, workers that stand
still.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest
import torch

import distruntime as dr
from distruntime.session.session import active_session
from fewer import fewer
from meshes import two_workers
from processes import blocked, stopped

__all__ = ["two_workers"]
Mesh = dr.mesh.DeviceMesh


@pytest.fixture(params=["cpu", "cuda"])
def mesh(request: pytest.FixtureRequest, two_workers: None) -> Mesh:
    """Two members, one a worker, and four, two a worker."""
    return dr.init_device_mesh(
        request.param, (2, 1 if request.param == "cpu" else 2), mesh_dim_names=("dp", "tp")
    )


def of(mesh: Mesh, *values: float) -> torch.Tensor:
    """A tensor of each member's own number, the last ones' where they are not said."""
    return dr.from_shards(
        [torch.tensor([float(values[min(k, len(values) - 1)])]) for k in range(mesh.size())], mesh
    )


def spoilt(mesh: Mesh, *members: int) -> torch.Tensor:
    """A one on each member, but on some an `IndexError` that names the member."""
    index = dr.from_shards([torch.tensor([100 + k if k in members else 0]) for k in range(mesh.size())], mesh)
    return torch.ones(1, device=mesh.device).take(index)


def found(t: torch.Tensor) -> list[list[float] | str]:
    """What each member has: its values, or the first line of what it was poisoned by."""
    values: list[list[float] | str] = []
    for k in range(len(t.place.members)):  # type: ignore[attr-defined]
        try:
            values.append(t.member(k).tolist())  # type: ignore[attr-defined]
        except (IndexError, dr.errors.StreamCancelled) as error:
            values.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return values


def settle() -> None:
    """Read the failures that a test has made on purpose."""
    for _ in range(20):
        with suppress(dr.errors.RemoteError):
            dr.synchronize()
            return


def said(k: int) -> str:
    return f"IndexError: out of range: tried to access index {100 + k} on a tensor of 1 elements."


# Poison, member by member


def test_each_member_says_how_it_failed_itself(mesh: Mesh) -> None:
    """Two of one worker fail in one instruction: the second one's failure was told as the first one's."""
    bad = [k for k in range(mesh.size()) if k]
    assert found(spoilt(mesh, *bad) * 2) == [[2.0], *map(said, bad)]
    settle()


def test_a_collective_is_spoilt_in_the_lines_of_who_failed(mesh: Mesh) -> None:
    last = mesh.size() - 1
    x = spoilt(mesh, last)
    for name in ("dp", "tp"):
        lines = mesh.lines(name)
        hit = {k for row in lines.rows if last in row for k in row}
        wanted = [said(last) if k in hit else [float(lines.size)] for k in range(mesh.size())]
        assert found(dr.lines.all_reduce(lines, x)) == wanted
        assert found(dr.lines.all_gather(lines, x)) == [
            w if isinstance(w, str) else [1.0] * lines.size for w in wanted
        ]
        assert found(dr.lines.all_reduce(lines, of(mesh, 2))) == [[2.0 * lines.size]] * mesh.size()
    settle()


def test_a_broadcast_needs_its_root_only(mesh: Mesh) -> None:
    """What the others have is not looked at: a failure there once went to the whole line."""
    lines, last = mesh.lines(), mesh.size() - 1
    assert found(dr.lines.broadcast(lines, spoilt(mesh, last), 0)) == [[1.0]] * mesh.size()
    assert found(dr.lines.broadcast(lines, spoilt(mesh, 0), 0)) == [said(0)] * mesh.size()
    written = spoilt(mesh, last)
    torch.distributed.broadcast(written, 0, group=mesh.get_group("dp"))
    rows = mesh.lines("dp").rows
    assert found(written) == [said(last) if k == last else [1.0] for k in range(mesh.size())], rows
    settle()


def test_threads_that_meet_along_two_dimensions_at_once(mesh: Mesh) -> None:
    """Both got one number, and the second one's groups stood for the first one's, too."""
    turned = dr.init_device_mesh(
        list(reversed(mesh.places)), (mesh.size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    with ThreadPoolExecutor(2) as pool:
        found_lines = list(pool.map(turned.lines, ("dp", "tp")))
    x = dr.from_shards([torch.tensor([10.0**k]) for k in range(turned.size())], turned)
    for lines in found_lines:
        sums = {k: [sum(10.0**m for m in row)] for row in lines.rows for k in row}
        assert found(dr.lines.all_reduce(lines, x)) == [sums[k] for k in range(turned.size())]


# Cancelled streams


def test_what_a_cancelled_stream_would_have_written_is_spoilt_under_all_its_names(mesh: Mesh) -> None:
    stream = dr.Stream(mesh.device)
    x, y, kept = of(mesh, 1, 2), of(mesh, 1, 2), of(mesh, 5)
    name, member = x.view(1, 1), x.member(1)  # type: ignore[attr-defined]
    with blocked(stream):
        with dr.stream(stream):
            x.add_(1)
            late = y.view(1)
            more = kept + 1
        stream.cancel()
    late.add_(1)  # not written, so that neither is what it would be a view of
    for t in (x, name, late, y, more):
        assert all(isinstance(value, str) and "StreamCancelled" in value for value in found(t)), found(t)
    with pytest.raises(dr.errors.StreamCancelled):
        member.tolist()
    assert found(kept) == [[5.0]] * mesh.size()
    with dr.stream(stream):
        assert found(kept * 2) == [[10.0]] * mesh.size()
    settle()


def test_shards_that_one_stream_puts_together_and_another_takes(mesh: Mesh) -> None:
    """The names of a mesh's value are no instructions of its own log: on a worker nothing kept the second
    after the first.
    """
    with dr.on(mesh.places[0]):
        first = torch.full((1,), 3.0)
    rest = [of(mesh, 4).member(k) + 0 for k in range(1, mesh.size())]  # type: ignore[attr-defined]
    stream = dr.Stream(mesh.places[0])
    with blocked(stream):
        with dr.stream(stream):
            whole = dr.from_shards([first, *rest], mesh)
        member = whole.member(0)  # type: ignore[attr-defined]
        with pytest.raises(dr.errors.WaitTimeout):
            dr.fetch(member, 0.1)
    assert member.tolist() == [3.0] and found(whole) == [[3.0], *[[4.0]] * (mesh.size() - 1)]


@pytest.mark.parametrize(
    "where", fewer([(None, 0, 1), (0, None, 1), (None, None, 0)], 3, "a write, 1 s"), ids=str
)
def test_a_write_that_fails_spoils_names_that_other_streams_have_made(
    mesh: Mesh, where: tuple[int | None, ...]
) -> None:
    """A name that came while the failure was spread kept its value, in one of ten."""
    place = mesh.places[0]
    streams = [dr.Stream(place), dr.Stream(place)]

    def on(k: int | None) -> AbstractContextManager[object]:
        return nullcontext() if k is None else dr.stream(streams[k])

    for _ in range(60):
        whole = torch.ones(5, device=mesh.device)
        with on(where[0]):
            one = whole.member(0)  # type: ignore[attr-defined]
        with on(where[1]):
            other = whole.member(0)  # type: ignore[attr-defined]
        with on(where[2]):
            one.index_fill_(0, torch.tensor([8], device=place), 1)
        for name in (one, other, whole.member(0)):  # type: ignore[attr-defined]
            with pytest.raises(IndexError):
                name.cpu()


def test_a_collective_of_a_cancelled_stream_is_spoilt_everywhere(mesh: Mesh) -> None:
    stream, lines = dr.Stream(mesh.device), mesh.lines()
    x = of(mesh, 1)
    with blocked(stream):
        with dr.stream(stream):
            total = dr.lines.all_reduce(lines, x)
        stream.cancel()
    assert all(isinstance(value, str) and "StreamCancelled" in value for value in found(total))
    assert found(dr.lines.all_reduce(lines, x)) == [[float(mesh.size())]] * mesh.size()
    settle()


def test_a_shard_that_a_cancelled_stream_takes(mesh: Mesh) -> None:
    """It is a name, which costs nothing: there all the same, once what it names is, for which the stream does
    not wait any more.
    """
    shards = [of(mesh, 4).member(k) + 0 for k in range(mesh.size())]  # type: ignore[attr-defined]
    one, two = dr.Stream(mesh.places[0]), dr.Stream(mesh.places[0])
    with blocked(one):
        with dr.stream(one):
            whole = dr.from_shards(shards, mesh)
        with dr.stream(two):
            member = whole.member(0)  # type: ignore[attr-defined]
            two.cancel()
            with pytest.raises(dr.errors.WaitTimeout):
                dr.fetch(torch.ones(1, device="remote"), 0.3)
    assert member.tolist() == [4.0] and found(whole) == [[4.0]] * mesh.size()
    settle()


# Workers that stand still


def test_whoever_waits_for_a_member_that_stands_still_has_a_deadline(mesh: Mesh) -> None:
    lines, stream = mesh.lines("dp"), dr.Stream(mesh.device)
    x = of(mesh, 1, 2)
    settle()
    with stopped(active_session().workers[1].pid):
        total = dr.lines.all_reduce(lines, x)
        with dr.stream(stream):
            event = (total + 1, stream.record_event())[1]
        for wait in (
            lambda: dr.fetch(total, 0.2),
            lambda: event.synchronize(0.2),
            lambda: dr.synchronize(timeout=0.2),
        ):
            with pytest.raises(dr.errors.WaitTimeout):
                wait()
        with pytest.raises(dr.errors.WaitTimeout):
            dr.fetch([total.member(k) for k in range(mesh.size())], 0.2)  # type: ignore[attr-defined]
        assert "no answer" in repr(x.member(mesh.size() - 1)) or "computing" in repr(total)  # type: ignore[attr-defined]
        assert x.member(0).shape == (1,)  # type: ignore[attr-defined]
    sums = [sum(2.0 if k else 1.0 for k in row) for row in lines.rows]
    assert found(total) == [
        [sums[next(n for n, row in enumerate(lines.rows) if k in row)]] for k in range(mesh.size())
    ]
    event.synchronize(60)
