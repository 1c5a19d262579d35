"""Random programs of two threads, with a publisher beside them, give what the same programs give here, one
operation after the other.

A few here; `tests/long/programs.py` runs thousands, and runs one alone, by the seed that a failure names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distruntime as dr
from fewer import fewer
from processes import STARTING
from random_programs import FAILED, Program, Run, World

# One operation asks for memory that an object holds, and is told so, by whichever thread waits next.
pytestmark = pytest.mark.filterwarnings("ignore:Keeper.add_and_give returned a tensor in memory")


@pytest.fixture(
    scope="module",
    params=[(2, 2, 0), (4, 0, 0), (1, 0, 2)],
    ids=["two nodes, four GPUs", "four nodes", "a node, and two that came later"],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    dr.shutdown()
    nodes, gpus, more = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        dr.init_master_worker(world_size=nodes, simulate_cuda=gpus, timeout=STARTING),
    ):
        assert [dr.workers.add_worker() for _ in range(more)] == [*range(nodes, nodes + more)]
        patch.setenv("DISTRUNTIME_SIGNING_KEY", str(tmp_path_factory.mktemp("keys") / "signing-key"))
        yield World(tmp_path_factory.mktemp("checkpoints"))
        failures_are_known()


def failures_are_known() -> None:
    """Have what failed and was never read raised here: the end of a session would raise it."""
    while True:
        try:
            return dr.synchronize(timeout=60)
        except FAILED:
            pass


@pytest.mark.parametrize("seed", fewer([1, 2], 3, "another seed, 17 s"))
def test_programs_side_by_side_give_the_serial_result(seed: int, world: World) -> None:
    run = Run(world, seed, threads=2, programs=14, publish=True, most_wrong=1, patience=60)
    tally = run.go()
    assert not run.stuck, run.stuck
    assert not tally.wrong, "\n".join(map(str, tally.wrong))
    assert tally.counts["programs"] == 14 and tally.counts["published"] > 0


def test_programs_under_a_trace_give_the_serial_result(world: World) -> None:
    run = Run(world, 4, threads=1, programs=5, most_wrong=1, patience=60, traced=True)
    tally = run.go()
    assert not run.stuck, run.stuck
    assert not tally.wrong, "\n".join(map(str, tally.wrong))
    assert tally.counts["traced"] == 5


def test_a_program_follows_from_its_seed(world: World) -> None:
    said = []
    for _ in range(2):
        program = Program(7, world)
        program.run()
        assert not program.wrong, str(program.wrong[0])
        said.append(program.said)
    assert said[0] == said[1]


def test_what_is_wrong_is_told_with_its_seed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(program: Program) -> None:
        program.any().local.add_(1)

    lies.weight = 1000  # type: ignore[attr-defined]
    monkeypatch.setattr(Program, "lies", lies, raising=False)
    tally = Run(world, 3, threads=2, programs=4, most_wrong=1).go()
    assert tally.wrong
    assert str(tally.wrong[0]).startswith(f"seed {tally.wrong[0].seed}: ") and " lies" in str(tally.wrong[0])
