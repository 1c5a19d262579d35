"""What operators write without their schemas saying so.

The running statistics of normalizations, by the names of arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_TRAINING = ("training", "train", "use_input_stats")
# The last stands for "_no_update" and "_no_training".
_PURE = ("backward", "functional", "_no_")


def undeclared_writes(name: str, arguments: Sequence[str], given: Mapping[str, object]) -> set[str]:
    """Return the names of the arguments that an operator writes besides those that its schema marks.

    `given` are its arguments by name.
    """
    running = {argument for argument in arguments if argument.startswith("running_")}
    if not running or any(part in name for part in _PURE):
        return set()
    training = next((given[argument] for argument in _TRAINING if argument in given), True)
    return set() if training is False else running
