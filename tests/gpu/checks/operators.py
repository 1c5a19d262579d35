"""Checks 9 and 10: operators whose results a GPU lays out in its own way, and the whole operator database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from box import Box, first_line
from here import NoReference, Request, torch_is_wrong
from listing import check

Case = Callable[[str], list[torch.Tensor]]
# So many sample inputs of an entry of the database, and so many that its other forms run on too.
SAMPLES, FORMS = 2, 1


def _input(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return values.to(dtype).to(device).requires_grad_()


def _logsigmoid(device: str) -> list[torch.Tensor]:
    x = _input(device, 5, 7)
    y = F.logsigmoid(x)
    y.sum().backward()
    assert x.grad is not None
    return [y, x.grad]


def _module(make: Callable[[], nn.Module], dtype: torch.dtype, *shape: int, last: bool = False) -> Case:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = make().to(dtype)
        x = _input("cpu", *shape, dtype=dtype).detach()
        if last:
            module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        module, x = module.to(device), x.to(device).requires_grad_()
        y = module(x)
        # The sum of squares behind a norm is constant, so its gradients would be nothing but rounding.
        wanted = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(device)
        (y.float() * wanted).sum().backward()
        gradients = [p.grad for p in module.parameters()]
        return [y, *(g for g in [x.grad, *gradients] if g is not None)]

    return run


CASES: dict[str, Case] = {
    "logsigmoid": _logsigmoid,
    "RMSNorm": _module(lambda: nn.RMSNorm(64), torch.float32, 8, 64),
    "RMSNorm, bfloat16": _module(lambda: nn.RMSNorm(64), torch.bfloat16, 8, 64),
    "LayerNorm, bfloat16": _module(lambda: nn.LayerNorm(64), torch.bfloat16, 8, 64),
    "BatchNorm2d": _module(lambda: nn.BatchNorm2d(8), torch.float32, 4, 8, 6, 6),
    "Conv2d, channels_last": _module(lambda: nn.Conv2d(8, 16, 3), torch.float32, 2, 8, 12, 12, last=True),
    "Conv2d, bfloat16": _module(lambda: nn.Conv2d(8, 16, 3), torch.bfloat16, 2, 8, 12, 12),
}


def _case_here(name: str, device: str) -> list[tuple[torch.Tensor, list[int]]]:
    """Return what a case gives in this process, and how the device has laid it out."""
    return [(tensor.detach(), _steps(tensor)) for tensor in CASES[name](device)]


def _steps(tensor: torch.Tensor) -> list[int]:
    # A dimension of one element has no stride that anybody could see.
    return [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1]


@check(
    9,
    "operators that a GPU lays out in its own way",
    does="runs logsigmoid, norms and convolutions forward and backward, twice, there and here",
    failure=(
        "what the meta kernel promises is not what the GPU's kernel returns (finding C7). At the first call "
        "the worker says so and at the second the master knows: if both fail, look at "
        "distruntime/operators/propagate.py (LIARS). If values differ, look at "
        "distruntime/backend/fused.py."
    ),
    seconds=60,
)
def layouts(box: Box) -> None:
    wrong = []
    for name, case in CASES.items():
        here = box.here(_case_here, name, box.local)
        # A kernel that fails takes the device along, and the next case has a worker of its own.
        with box.session():
            for turn in ("first", "second"):
                try:
                    there = case("remote")
                    values = dr.fetch([t.detach() for t in there])
                except NotImplementedError as error:
                    if box.cuda or box.simulate_cuda:
                        raise
                    box.leave_out(name, f"has no kernel there: {first_line(str(error))}")
                    break
                except (dr.DistruntimeError, RuntimeError) as error:
                    wrong.append(f"{name}, {turn} call: {first_line(f'{type(error).__name__}: {error}')}")
                    continue
                bound = 3e-2 if there[0].dtype == torch.bfloat16 else 1e-3
                apart = [
                    ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
                    for (a, _), b in zip(here, values, strict=True)
                ]
                if max(apart) > bound:
                    wrong.append(f"{name}, {turn} call: values differ by {max(apart):.1e} of the largest")
                # The kernels of another kind of device may lay results out in another way.
                strides = [_steps(t) for t in there], [steps for _, steps in here]
                if box.cuda and strides[0] != strides[1]:
                    text = f"{name}, {turn} call: strides {strides[0]}, here {strides[1]}"
                    # At the first call the master does not know yet what the worker will say.
                    box.saw(text) if turn == "first" else wrong.append(text)
            else:
                box.saw(f"{name}: differs by {max(apart):.1e} of the largest number")
    box.require(not wrong, f"{len(wrong)} differ: " + "\n".join(wrong))


@check(
    10,
    "PyTorch's operator database",
    does=(
        "runs every entry in float32 and bfloat16 on a worker's GPU and without a worker, as far as 50 s go"
    ),
    failure=(
        "an operator gives another dtype, shape, stride or value on a worker than on the same GPU here. 98 % "
        "must agree, as some kernels add in an order that changes. The names are listed; look at the "
        "operator's special case in distruntime/operators/, or at its meta kernel."
    ),
    seconds=80,
    needs=("expecttest",),
)
def operator_database(box: Box) -> None:
    # It takes seconds, and the other process imports the database beside this one.
    ready = box.here.ask(_ready, box.local)
    from agree import some
    from op_samples import entries

    box.here.answer(ready)
    limit = 15 if box.quick else 50
    deadline, tally = time.monotonic() + limit, Tally()
    if not box.cuda:
        box.leave_out("the comparison with local CUDA", "needs CUDA in this process: compared with this CPU")
    for dtype in (torch.float32, torch.bfloat16):
        # The jiterator compiles a kernel for the CUDA context of its own process. No worker can be asked for
        # that.
        named = [op for op in entries(dtype, box.local) if not op.name.startswith("jiterator_")]
        before = tally.done
        # Few of all entries are better than all of the first letters.
        order = [op for first in range(7) for op in named[first::7]]
        ops = _asked(box, [*some(order, 14)] if box.quick else order, dtype)
        until = deadline - limit / 2 if dtype == torch.float32 else deadline
        # A kernel that fails takes the device along, and what follows needs another worker.
        while _some_entries(box, ops, dtype, until, tally):
            box.require(
                tally.lost < 6, f"{tally.lost} entries made the worker lose its device: {tally.text()}"
            )
        box.saw(f"{str(dtype).removeprefix('torch.')}: {tally.done - before} of {len(named)} entries")
    box.saw(f"{tally.agreed} agree, {len(tally.wrong)} do not, {tally.raising} raise on both sides")
    for name, text in tally.wrong.items():
        box.saw(f"  {name}: {first_line(text)}")
    # Some entries raise on both sides, and some make no sample on a GPU. More of them are a fault of its own.
    box.require(tally.raising < 0.1 * tally.done, f"{tally.raising} of {tally.done} could not be compared")
    compared = tally.agreed + len(tally.wrong)
    box.require(
        tally.agreed >= 0.98 * compared, f"{len(tally.wrong)} of {compared} entries differ: {tally.text()}"
    )


@dataclass
class Tally:
    """How many entries were tried, and how they ended.

    `lost` counts those that took the device along, and `without` those with nothing to compare with.
    """

    done: int = 0
    agreed: int = 0
    raising: int = 0
    lost: int = 0
    without: int = 0
    wrong: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the names of those that differ."""
        return ", ".join(self.wrong)[:300]


def _ready(device: str) -> None:
    """Import what `_here` needs, and wake the device."""
    import op_samples

    assert op_samples.entries
    torch.ones(1, device=device).item()


def _here(name: str, dtype: torch.dtype, device: str) -> list[Any]:
    """Return what an entry gives in this process: outputs, gradients and errors for all its samples."""
    from op_samples import local_outcomes

    return local_outcomes(name, dtype, SAMPLES, device, FORMS)


def _asked(box: Box, ops: Iterable[Any], dtype: torch.dtype) -> Iterator[tuple[Any, Request]]:
    """Give each entry, and the request for what it gives without a worker.

    The next entry runs there while this one is compared.
    """
    before: tuple[Any, Request] | None = None
    for op in ops:
        request = box.here.ask(_here, op.full_name, dtype, box.local)
        if before is not None:
            yield before
        before = op, request
    if before is not None:
        yield before


def _some_entries(
    box: Box, ops: Iterator[tuple[Any, Request]], dtype: torch.dtype, until: float, tally: Tally
) -> bool:
    """Run entries in one session; return whether it ended because a device was lost."""
    from agree import Disagreement
    from op_samples import run_entry

    with box.session():
        for op, request in ops:
            if time.monotonic() > until:
                return False
            tally.done += 1
            name = f"{op.full_name} {str(dtype).removeprefix('torch.')}"
            try:
                given = box.here.answer(request)
                errors = [outcome.expected.error for outcome in given]
                asserts = [error.text for error in errors if error and torch_is_wrong(error.text)]
                if asserts:
                    raise NoReference(f"without a session it fails: {asserts[0]}")
                if run_entry(op, dtype, SAMPLES, local=box.local, forms=FORMS, given=given):
                    tally.agreed += 1
                else:
                    tally.raising += 1
            except NoReference as why:
                tally.wrong[name] = str(why)
                tally.without += 1
                box.require(tally.without < 6, f"{tally.without} entries have no reference: {why}")
            except Disagreement as difference:
                text = str(difference)
                tally.wrong[name] = text
                if "AcceleratorError" in text:
                    tally.lost += 1
                    return True
            # The database cannot make this sample here.
            except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
                tally.raising += 1
                box.saw(f"no sample of {op.full_name}: {first_line(f'{type(error).__name__}: {error}')}")
    return False
