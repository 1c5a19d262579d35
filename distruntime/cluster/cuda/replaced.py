"""What the take-over has put in place of torch's, and how often a call only pretended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import NotSupportedError, without_our_frames

Function = Callable[..., Any]  # type: ignore[explicit-any]
ABSENT = object()

# What was replaced, and what stood there.
replaced: list[tuple[object, str, object]] = []

# How often each function was called that only pretends.
pretended: Counter[str] = Counter()


def replace(owner: object, name: str, new: object) -> None:
    old = owner.__dict__.get(name, ABSENT) if isinstance(owner, type) else getattr(owner, name, ABSENT)
    replaced.append((owner, name, old))
    setattr(owner, name, new)


def note(name: str) -> None:
    pretended[name] += 1


def pretending(name: str) -> Function:
    def call(*args: object, **kwargs: object) -> None:
        note(name)

    return call


def refusal(name: str, instead: str) -> NotSupportedError:
    return NotSupportedError(
        f"{name} is about a GPU of this process, and the workers own the GPUs: {instead}"
    )


def refusing(name: str, instead: str) -> Function:
    @without_our_frames
    def call(*args: object, **kwargs: object) -> NoReturn:
        raise refusal(name, instead)

    return call


def no_class(name: str, instead: str) -> type:
    """Return what stands for a class of `torch.cuda` that cannot be made; annotations go on naming it."""
    return type(name, (), {"__new__": refusing(f"torch.cuda.{name}", instead), "__module__": "torch.cuda"})


def give_back() -> None:
    """Put all that was replaced back."""
    while replaced:
        owner, name, old = replaced.pop()
        if old is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
