"""Take-over: a script that says "cuda" runs on the workers as it is. See `init_master_worker(as_cuda=True)`.

Each of torch's functions that takes a device has a twin here that reads "cuda" as the session's place, and
`torch.cuda`'s own functions answer for it. `x.device` of a remote tensor stays "remote", as code that
launches kernels of its own asks that. What has no meaning on workers either does nothing, and is noted for
`dr.takeover()`, or raises, where an answer would be a lie. The end of the session takes all of it back.

The functions are replaced, not watched by a mode of torch's: a mode costs every call of every function, and
belongs to one thread.
"""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from ..log.handle import next_ref
from ..session.session import Session
from ..session.stalls import stalls
from .cuda.functions import replace_functions
from .cuda.places import every_gpu, shown_places
from .cuda.replaced import give_back, pretended, replaced
from .cuda.torch_cuda import replace_cuda

# This ref was the last one when the take-over began.
_first = [0]


def takeover() -> dict[str, int]:
    """Return how often each function of torch was called that did nothing, by its name.

    Raise `UsageError` outside of a session that was begun with `as_cuda`.
    """
    if not replaced:
        raise ConfigurationError(
            "no take-over is on: dr.takeover() is for sessions of init_master_worker(as_cuda=True)"
        )
    return dict(pretended)


def summary() -> str:
    """Return a line that says what the take-over has come to so far; nothing where none is on."""
    if not replaced:
        return ""
    waits = sum(stall.count for stall in stalls())
    names = ", ".join(f"{name} ({count})" for name, count in sorted(pretended.items()))
    return (
        f'"cuda" meant the workers: {next_ref() - _first[0] - 1} values were made there, and this process '
        f"waited for them {waits} time{'' if waits == 1 else 's'}. "
        + (f"Only pretended: {names}" if names else "Nothing only pretended")
    )


# -- on and off ----------------------------------------------------------------------------------------------


def require_free(as_cuda: bool | str) -> None:
    """Raise `ConfigurationError` if this process has GPUs, and nothing forces the take-over."""
    if as_cuda not in (True, "all", "force", "force all"):
        raise ConfigurationError(f'as_cuda= is True, "all", "force" or "force all", got {as_cuda!r}')
    if torch.cuda.is_available() and not str(as_cuda).startswith("force"):
        force = "force all" if as_cuda == "all" else "force"
        raise ConfigurationError(
            f'as_cuda: this process has {_gpus()} of its own, and "cuda" can mean one thing only. Hide them '
            f'(CUDA_VISIBLE_DEVICES=""), or write as_cuda="{force}": then nothing here reaches them until '
            "the session ends"
        )


def _gpus() -> str:
    count = torch.cuda.device_count()
    return "a GPU" if count == 1 else f"{count} GPUs"


def take_over(session: Session, as_cuda: bool | str) -> str:
    """Let "cuda" mean the session until it ends; return a line that says so."""
    every_gpu[0] = str(as_cuda).endswith("all")
    # Once the functions are replaced, they answer for the workers.
    hidden = f", and nothing here reaches {_gpus()} of this process" if torch.cuda.is_available() else ""
    pretended.clear()
    _first[0] = next_ref()
    session.ending.on_close.append(give_back)
    replace_functions()
    replace_cuda()
    seen = ", ".join(f"cuda:{k} is {home.place}" for k, home in enumerate(shown_places()))
    return (
        f'"cuda" means the workers ({seen}), and torch.cuda answers for them{hidden}. '
        "dr.takeover() lists what only pretended"
    )
