"""Gives PyTorch's own wrong inputs to its operators and modules, here and on a worker.

Shared by `test_error_inputs.py` and `long/error_inputs.py`.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import distruntime as dr
from agree import REMOTE, Copier, outcome, quietly

# It warns about packages that it would like and does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import ModuleErrorEnum, module_db


@dataclass(frozen=True)
class Mistake:
    """One wrong input: `call(device)` makes it there, and `words` is the regular expression of the database
    for what torch says.
    """

    name: str
    call: Callable[[str], object]
    words: str


@dataclass(frozen=True)
class Verdict:
    """What a worker's user is told of a mistake, beside what a local one is told."""

    mistake: Mistake
    local: Exception
    remote: Exception | None
    at_once: bool

    @property
    def same_class(self) -> bool:
        """Whether every `except` that catches the local error catches this one."""
        return isinstance(self.remote, type(self.local))

    @property
    def same_words(self) -> bool:
        """Whether the database finds its words in the text, or does not find them in torch's own either."""
        return _says(self.remote, self.mistake.words) or (
            not _says(self.local, self.mistake.words) and _says(self.remote, re.escape(str(self.local)))
        )


def _says(error: Exception | None, words: str) -> bool:
    # Some of the database's expressions mean their brackets, and the compiler warns of them.
    return error is not None and quietly(lambda: re.search(words, str(error))) is not None


def reason(verdict: Verdict) -> str | None:
    """Return why a mistake is told in another way than here, if that is known."""
    return next((why for words, why in _DIFFER.items() if _says(verdict.remote, words)), None)


# What a worker's user is told instead, and why.
_DIFFER = {
    "storage that is not resizable": "an uploaded tensor's memory cannot grow, so `out=` fails earlier",
}


def operators() -> Iterator[Mistake]:
    """The wrong inputs of the operator database."""
    for op in op_db:
        if op.error_inputs_func is None:
            continue
        # `op.error_inputs` would also look at the whole stack for each of them, 0.1 s under pytest.
        for wrong in quietly(lambda op=op: list(op.error_inputs_func(op, "cpu"))):
            call = functools.partial(_run_operator, op, wrong.sample_input)
            yield Mistake(op.full_name, call, wrong.error_regex)


def _run_operator(op: Any, sample: Any, device: str) -> object:
    inputs, args, kwargs = Copier(device)((sample.input, sample.args, sample.kwargs))
    return op(inputs, *args, **kwargs)


def modules() -> Iterator[Mistake]:
    """The wrong inputs of the module database: arguments of constructors, and inputs of modules."""
    for info in module_db:
        if info.module_error_inputs_func is None:
            continue
        for training in (True, False) if info.train_and_eval_differ else (True,):
            given = functools.partial(
                info.module_error_inputs_func,
                *(info, "cpu", torch.float32),
                requires_grad=False,
                training=training,
            )
            for wrong in quietly(lambda given=given: list(given())):
                call = functools.partial(_run_module, info, wrong, training)
                yield Mistake(info.formatted_name, call, wrong.error_regex)


def _run_module(info: Any, wrong: Any, training: bool, device: str) -> object:
    made_of, inputs = wrong.module_error_input.constructor_input, wrong.module_error_input.forward_input
    args, kwargs = Copier(device)((made_of.args, made_of.kwargs))
    module = info.module_cls(*args, **kwargs).to(device).train(training)
    if wrong.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
        return None
    args, kwargs = Copier(device)((inputs.args, inputs.kwargs))
    return module(*args, **kwargs)


def judge(mistake: Mistake) -> Verdict | None:
    """Make a mistake here and on a worker; return None if torch takes it here."""
    _, local = quietly(lambda: outcome(lambda: mistake.call("cpu")))
    if local is None:
        return None
    late: list[bool] = []

    def remotely() -> object:
        result = mistake.call(REMOTE)
        late.append(True)
        return result

    _, remote = quietly(lambda: outcome(remotely))
    # A failure that nobody reads belongs to this mistake, not to the next one.
    _, unread = outcome(dr.synchronize)
    return Verdict(mistake, local, remote or unread, not late)
