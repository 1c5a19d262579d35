"""The worker's settings from the environment, as the arguments that they stand for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from distruntime.errors import ConfigurationError

# The variable of `--max-memory` is this with MAX_MEMORY behind it.
_VARIABLE = "DISTRUNTIME_WORKER_"
# These exclude each other, and the command line counts.
_WHERE = frozenset({"listen", "master"})
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# These are no settings of a worker.
_NOT_SETTINGS = frozenset({"help", "version", "local", "once"})


def complete(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the arguments with those of the environment before them. The command line wins.

    Args:
        parser: knows which settings there are.
        arguments: those of the command line.

    Raises:
        ConfigurationError: a variable has what is no value of its setting.
    """
    # A master says all that a worker of its own needs. The other settings are for daemons.
    if {"--local", "--once"} & set(arguments):
        return list(arguments)
    said = {word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")}
    left_out = _NOT_SETTINGS | (_WHERE if said & _WHERE else set())
    words: list[str] = []
    for action in parser._actions:
        for option in action.option_strings:
            name = option.removeprefix("--")
            variable = _VARIABLE + name.upper().replace("-", "_")
            value = environment.get(variable, "")
            if value and option.startswith("--") and name not in left_out:
                words += _words(option, value, action.nargs == 0, variable)
    return [*words, *arguments]


def _words(option: str, value: str, switch: bool, variable: str) -> list[str]:
    """Return the arguments that a setting stands for."""
    if not switch:
        return [f"{option}={value}"]
    if value.lower() not in (*_YES, *_NO):
        raise ConfigurationError(f"${variable}: {option} is true or false, got {value!r}")
    return [option] if value.lower() in _YES else []
