"""The worker's settings from a file and from the environment, as the arguments that they stand for."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from distruntime.errors import ConfigurationError
from distruntime.wire.keys import require_own

# The variable of `--max-memory` is this with MAX_MEMORY behind it.
_VARIABLE = "DISTRUNTIME_WORKER_"
# These exclude each other. The one that was said last counts.
_WHERE = ("listen", "master")
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# These are no settings of a worker.
_NOT_SETTINGS = frozenset({"help", "version", "config", "print-systemd", "local", "once"})


def complete(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the arguments with those of the file and of the environment before them.

    The command line wins over a variable, and a variable wins over the file.

    Args:
        parser: knows which settings there are.
        arguments: those of the command line.

    Raises:
        ConfigurationError: the file cannot be read, or has what is no setting.
    """
    # A master says all that a worker of its own needs. The other settings are for daemons.
    if {"--local", "--once"} & set(arguments):
        return list(arguments)
    file = _config_file(arguments, environment)
    flags = _settings(parser)
    from_file = _from_file(file, flags) if file is not None else {}
    from_variables = {
        name: environment[_variable(name)] for name in flags if environment.get(_variable(name), "") != ""
    }
    said = {word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")}
    for later, earlier in ((said, from_variables), (said | set(from_variables), from_file)):
        if set(later) & set(_WHERE):
            for name in _WHERE:
                earlier.pop(name, None)
    words: list[str] = []
    for values, source in ((from_file, str(file)), (from_variables, "")):
        for name, value in values.items():
            words += _words(name, value, flags[name], source or f"${_variable(name)}")
    return [*words, *arguments]


def _variable(name: str) -> str:
    return _VARIABLE + name.upper().replace("-", "_")


def _settings(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Return the names of all settings, and whether each is a switch."""
    return {
        option[2:]: action.nargs == 0
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option[2:] not in _NOT_SETTINGS
    }


def _config_file(arguments: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        named: Path | None = finder.parse_known_args(list(arguments))[0].config
    except argparse.ArgumentError:
        # The whole parser says what is wrong.
        return None
    variable = environment.get(f"{_VARIABLE}CONFIG")
    return named or (Path(variable) if variable else None)


def _from_file(file: Path, flags: Mapping[str, bool]) -> dict[str, object]:
    parser = _toml()
    try:
        require_own(file, "the settings of a worker")
        with file.open("rb") as opened:
            found: dict[str, object] = parser.load(opened)
    except OSError as error:
        raise ConfigurationError(
            f"got --config {file}, which cannot be read: {error.strerror}. Name a file of TOML, with lines "
            'such as  listen = "tcp://0.0.0.0:29400"'
        ) from error
    except ValueError as error:
        # TOML's own error is one, too.
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{file} is no TOML: {error}") from error
    for name in found:
        if name not in flags:
            alike = difflib.get_close_matches(name, flags, n=1)
            hint = f"Did you mean {alike[0]!r}?" if alike else f"There are {', '.join(sorted(flags))}"
            raise ConfigurationError(
                f"{file}: got the setting {name!r}, which a worker does not have. {hint}"
            )
    return found


def _toml() -> ModuleType:
    for name in ("tomllib", "tomli"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ConfigurationError(
        "got --config, and this Python (3.10) has nothing that reads TOML: pip install tomli, or use Python "
        "3.11 or later"
    )


def _words(name: str, value: object, switch: bool, source: str) -> list[str]:
    """Return the arguments that a setting stands for."""
    if switch:
        text = str(value).lower()
        if text not in (*_YES, *_NO):
            raise ConfigurationError(f"{source}: {name} is true or false, got {value!r}")
        return [f"--{name}"] if text in _YES else []
    if isinstance(value, list) and all(isinstance(item, (str, int)) for item in value):
        value = ",".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigurationError(f"{source}: {name} is a text or a number, got {value!r}")
    return [f"--{name}={value}"]
