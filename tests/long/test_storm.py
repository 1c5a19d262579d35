"""A storm of Ctrl-C, two thousand a second, at every moment of an operation's way.

Longer and harsher than `make test` has it.
"""

from __future__ import annotations

import pytest

from tests.session.test_threads import survives_interrupts


@pytest.mark.parametrize("seed", range(10))
def test_a_storm_of_interrupts(seed: int) -> None:
    survives_interrupts(seed, rounds=1_500, rate=2_000.0, least=100)
