"""Whatever order workers get to it, a program gives its serial result and ends: random programs of groups, copies and streams.

Forty here; `tests/long/hostile_order.py` runs 500.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distruntime as dr
from hostile import check
from processes import STARTING


@pytest.fixture(scope="module", autouse=True)
def four_workers() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=4, timeout=STARTING):
        yield


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("seeds", [range(0, 5), range(5, 10), range(10, 14)], ids=str)
def test_random_programs_give_the_serial_result(nodes: int, seeds: range) -> None:
    for seed in seeds:
        check(1000 * nodes + seed, nodes)
