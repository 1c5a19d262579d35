"""`?setup=auto`: an environment on the other machine that a worker runs in.

It is made with `uv` where that is there, else with Python's own `venv` and pip. If a Python there has a good
torch, the environment uses that one. A wheel of this very package travels through ssh.
"""

from __future__ import annotations

import base64
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ..errors import ConfigurationError
from .ssh_address import SshAddress
from .ssh_connection import Broken, SshConnection
from .ssh_probe import ENVIRONMENT, MARK, Interpreter, best, interpreters, lacking, script
from .wheel import requirements, wheel

# To install torch over a slow network takes a while. If nothing is said for so many seconds, it hangs.
_SILENCE = 600.0
# An error quotes the last of so many lines.
_KEPT = 40
# A line of pip's or uv's tells of a download so: "Downloading torch-2.13.0-cp311-....whl (191.8 MB)".
_DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?(\S+) \(([\d.]+) ?([MG])i?B\)")
# A download of so many megabytes takes long.
_LARGE = 10.0
_INSTALL = "Installing collected packages: "

# The shell's E is the environment, B the Python that makes it, S the folder with the torch that it uses.
_MAKE = r"""
PATH="$PATH:$HOME/.local/bin:$HOME/.cargo/bin"; export PATH
E="$HOME/ENVIRONMENT"; B=BASE; S=SITE; W=$(mktemp -d) || exit 1
said() { while IFS= read -r line; do printf 'MARKout %s\n' "$line"; done; }
step() {
  printf 'MARKstep %s\n' "$1"; shift
  { "$@" </dev/null 2>&1; echo "$?" >"$W/code"; } | said
  [ "$(cat "$W/code")" = 0 ] || { printf 'MARKexit %s\n' "$(cat "$W/code")"; rm -r "$W"; exit 1; }
}
if command -v uv >/dev/null 2>&1; then
  [ -x "$E/bin/python" ] || step "making an environment in $E with uv" uv venv --python "${B:-3.12}" "$E"
  add="uv pip install --python $E/bin/python"
else
  [ -n "$B" ] || { printf 'MARKexit no-python\n'; rm -r "$W"; exit 1; }
  [ -x "$E/bin/python" ] || step "making an environment in $E" "$B" -m venv "$E"
  add="$E/bin/python -m pip install --disable-pip-version-check --no-input"
fi
for site in "$E"/lib/python*/site-packages; do
  [ -z "$S" ] || printf '%s\n' "$S" >"$site/distruntime-torch.pth"
done
base64 -d >"$W/NAME" <<'DISTRUNTIME'
WHEEL
DISTRUNTIME
step "installing WHAT" $add NEEDS
case "$add" in uv*) force=--reinstall ;; *) force=--force-reinstall ;; esac
step "installing distruntime VERSION" $add --no-deps $force "$W/NAME"
rm -r "$W"
printf 'MARKmade\n'
"""


def set_up(
    connection: SshConnection,
    address: SshAddress,
    found: Sequence[Interpreter],
    tell: Callable[[str], None],
    still: Callable[[], bool],
) -> str:
    """Make the environment; return its Python.

    Block for as long as that takes. Raise `ConfigurationError` for what does not work, `Broken` where the
    connection ends.
    """
    usable = [one for one in found if one.is_new_enough]
    base = best(usable)
    # The shell there ends at the step that fails, perhaps before it has read the whole wheel. What it has
    # said until then tells why, and comes all the same.
    with suppress(Broken):
        connection.send(_script(base))
    last: deque[str] = deque(maxlen=_KEPT)
    doing = "making an environment"
    while True:
        for line in connection.lines(time.monotonic() + _SILENCE, still):
            word, _, rest = line.partition(" ")
            if word == "step":
                doing = rest
                tell(rest)
            elif word == "out":
                last.append(rest)
                if step := long_step(rest):
                    tell(step)
            elif word == "exit":
                raise _failed(address, doing, rest, list(last), base)
            if word in ("step", "out"):
                # What is said next has its own time.
                break
            if word == "made":
                return _made(connection, address, still)
        else:
            raise ConfigurationError(
                f"{address.shown}: nothing was heard for {_SILENCE:.0f} s while {doing}; its last line: "
                + (last[-1] if last else "none")
            )


def long_step(line: str) -> str:
    """Return what takes long by a line of pip's or uv's; "" where that does not."""
    found = _DOWNLOAD.match(line)
    if found is not None:
        name, size, unit = found.groups()
        # The rest of a wheel's name says for which machines it is.
        short = "-".join(name.split("-")[:2]) if name.endswith(".whl") else name
        return f"downloading {short} ({size} {unit}B)" if unit == "G" or float(size) >= _LARGE else ""
    count = line.count(",") + 1
    return f"installing {count} packages" if line.startswith(_INSTALL) and count > 1 else ""


def _script(base: Interpreter | None) -> str:
    name, data = wheel()
    needs = requirements()
    # A torch that is there need not come over the network once more.
    has_torch = base is not None and base.has_torch
    others = [one for one in needs if not re.match(r"torch\b", one)]
    # The meta kernels of one version say here what its kernels do there.
    minor = ".".join(torch.__version__.split(".")[:2])
    wanted = others if has_torch else [f"torch=={minor}.*", *others]
    lines = "\n".join(re.findall(".{1,76}", base64.b64encode(data).decode("ascii")))
    return (
        _MAKE.replace("MARK", MARK)
        .replace("ENVIRONMENT", ENVIRONMENT)
        .replace("BASE", shlex.quote(base.executable) if base is not None else "''")
        # An environment of an environment would not see the first one's packages.
        .replace("SITE", shlex.quote(base.site) if base is not None and has_torch else "''")
        .replace(
            "WHAT", "what distruntime needs" if has_torch else f"torch {minor} and what distruntime needs"
        )
        .replace("NEEDS", " ".join(map(shlex.quote, wanted)))
        .replace("VERSION", name.split("-")[1])
        .replace("NAME", name)
        .replace("WHEEL", lines)
    )


def _made(connection: SshConnection, address: SshAddress, still: Callable[[], bool]) -> str:
    """Return the Python of the environment, after a look that it is complete."""
    made = SshAddress(
        address.text, address.user, address.host, address.port, {"python": f"~/{ENVIRONMENT}/bin/python"}
    )
    connection.send(script(made))
    said: list[str] = []
    for line in connection.lines(time.monotonic() + 60.0, still):
        if line == "done":
            break
        said.append(line)
    chosen = best(interpreters(said)[0])
    if chosen is None or not chosen.is_complete:
        raise lacking(address, chosen)
    return chosen.executable


def _failed(
    address: SshAddress, doing: str, code: str, last: Sequence[str], base: Interpreter | None
) -> ConfigurationError:
    if code == "no-python":
        return ConfigurationError(
            f"{address.shown}: it has neither Python 3.10 or newer nor uv, so no environment can be made. "
            "Install one of the two there: curl -LsSf https://astral.sh/uv/install.sh | sh"
        )
    said = "\n".join(last)
    if "ensurepip" in said:
        return ConfigurationError(
            f"{address.shown}: Python's venv is not whole there: {base.executable if base else 'it'} has no "
            "ensurepip. Do there: apt install python3-venv, or install uv"
        )
    errors = [line for line in last if line.lower().startswith(("error", "  ×", "×"))]
    line = next(iter(errors), next((line for line in reversed(last) if line.strip()), "it said nothing"))
    return ConfigurationError(
        f"{address.shown}: {doing} failed (exit code {code}): {line.strip()}. Make the environment by hand, "
        f"and name its Python: {address.changed('python', '/path/to/python')}"
    )
