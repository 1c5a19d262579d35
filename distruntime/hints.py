"""What a prompt says behind an error that torch or Python words, where one more line helps.

torch's C++ reads the name of a device, and nothing of this package can run there. A session teaches torch the
name "remote". At import that would change what `torch.accelerator` says to programs without a session. So the
line stands behind the error: at Python's prompt, at IPython's and Jupyter's, and where a script ends by it.
"""

from __future__ import annotations

import difflib
import re
import sys
from types import TracebackType
from typing import Protocol

from .compiled.one_accelerator import ONE_ACCELERATOR

_DEVICE = re.compile(r"device type at start of device string: (\w+)")
# torch's autograd engine asserts it where gradients are on a GPU of this process.
_TWO_ACCELERATORS = "opt_ready_stream && opt_parent_stream"


class _Events(Protocol):
    def register(self, event: str, function: object) -> None: ...


class _Shell(Protocol):
    events: _Events


class _Result(Protocol):
    error_in_exec: BaseException | None


def hint(error: BaseException | None, ipython: bool = False) -> str:
    """Return one more line about an error; an empty text if there is nothing to say."""
    if isinstance(error, RuntimeError) and (found := _DEVICE.search(str(error))):
        name = found[1]
        if name == "remote":
            return (
                'distruntime: torch knows the device "remote" while a session is open, and none was begun: '
                "call distruntime.init_master_worker() first"
            )
        if difflib.get_close_matches(name, ["remote"]):
            return f'distruntime: did you mean device="remote"? Got {name!r}'
    if isinstance(error, RuntimeError) and _TWO_ACCELERATORS in str(error):
        return f"distruntime: {ONE_ACCELERATOR}"
    # Python's own prompt suggests a name by itself.
    if ipython and isinstance(error, AttributeError) and error.name:
        if any(_is_ours(base) for base in type(error.obj).__mro__):
            alike = difflib.get_close_matches(error.name, dir(error.obj), n=1)
            return f"distruntime: did you mean {alike[0]!r}?" if alike else ""
    return ""


def _is_ours(cls: type) -> bool:
    # The class of remote tensors says that it is torch's, since messages name it.
    return cls.__module__.partition(".")[0] == __package__ or cls.__name__ == "DistributedTensor"


def install() -> None:
    """Let prompts say it, from now on. Python's own hooks do their work first."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if text := hint(error):
            print(text, file=sys.stderr)

    sys.excepthook = told
    module = sys.modules.get("IPython")
    shell: _Shell | None = module.get_ipython() if module is not None else None
    if shell is not None:
        watch_shell(shell)


def watch_shell(shell: _Shell) -> None:
    """Let a shell of IPython say it, which began after this package was imported."""
    shell.events.register("post_run_cell", _after_cell)


def _after_cell(result: _Result) -> None:
    if text := hint(result.error_in_exec, ipython=True):
        print(text, file=sys.stderr)
