"""The settings of distruntime that a user has in the environment: the suite runs without them."""

from __future__ import annotations

from collections.abc import MutableMapping

# Lanes of the suite pass these to its tests.
_OF_THE_SUITE = (
    "DISTRUNTIME_TEST_",
    "DISTRUNTIME_SIMULATED",
    "DISTRUNTIME_PROGRAMS",
    "DISTRUNTIME_OP_DB_EVERY",
)


def take_out(environment: MutableMapping[str, str]) -> list[str]:
    """Remove the settings of the product from an environment, and return their names.

    The key stays where `DISTRUNTIME_TEST_GPUS` names a worker, which may ask for it.
    """
    kept = [*_OF_THE_SUITE, *(["DISTRUNTIME_KEY"] if environment.get("DISTRUNTIME_TEST_GPUS") else [])]
    found = sorted(name for name in environment if name.startswith("DISTRUNTIME_"))
    taken = [name for name in found if not name.startswith(tuple(kept))]
    for name in taken:
        del environment[name]
    return taken
