"""Operations of a worker that are not torch operators: settings, random state, and composites that are
recorded here with their backward.

Each is called as an operator is, by its own name, with tensors and constants; what it returns goes into
slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distruntime.errors import UsageError

from ..machine.figures import device_properties, empty_cache, memory_figures, reset_peak
from ..machine.settings import configure, settings
from .step import Operator
from .streams import elapsed_time

# A generator of this worker was set so often.
seedings = [0]


def seed_member(device: torch.device, seed: torch.Tensor) -> None:
    """Seed the generator of one member of a mesh."""
    manual_seed(device, str(int(seed)))


def manual_seed(device: torch.device, seed: str) -> None:
    """Seed the generator of one device."""
    seedings[0] += 1
    if device.type == "cpu":
        torch.default_generator.manual_seed(int(seed))
    else:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int(seed))


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return a snapshot of one device's random state, a byte tensor on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set one device's random state."""
    seedings[0] += 1
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        torch.cuda.set_rng_state(state.cpu(), device)


def exchange_rng_state(device: torch.device, state: torch.Tensor) -> torch.Tensor:
    """Set one device's random state for what follows, and return the one before, a byte tensor on the CPU.

    It does not count as a seeding: the master gives the old state back.
    """
    before = get_rng_state(device)
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        torch.cuda.set_rng_state(state.cpu(), device)
    return before


def resize_storage(tensor: torch.Tensor, nbytes: int) -> None:
    """Give a tensor's memory back, or take it again."""
    tensor.untyped_storage().resize_(nbytes)


class Tape:
    """A recorded composite: what its backward needs. Lives in a slot like any value, freed like any value."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs


def record(name: str, differentiable: list[bool], *args: object) -> list[object]:
    """Run an operator with autograd on; return its results and, last, the tape for `replay_backward`.

    `differentiable` says for each tensor among `args`, lists opened, whether its gradient will be wanted; if
    none, the tape is empty.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    call = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    # `WRITING` names the operators that do.
    if call._schema.is_mutable:
        raise UsageError(f"{name} writes its operands, and only what writes nothing is recorded")
    wanted = iter(differentiable)
    inputs: list[torch.Tensor] = []
    arguments = call._schema.arguments
    fixed = sum(not a.kwarg_only for a in arguments)
    # In the executing thread autograd is off. What is recorded turns it on for one call.
    with torch.set_grad_enabled(any(differentiable)):
        values = [_leaf(a, wanted, inputs) for a in args]
        results = call(
            *values[:fixed], **{a.name: value for a, value in zip(arguments[fixed:], values[fixed:])}
        )
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    # The results are contiguous, as the master expects. A view of a saved output would do no harm, as version
    # counters watch over those there.
    return [*(o.detach().contiguous() for o in outputs), Tape(inputs, outputs)]


def record_autocast(dtype: torch.dtype, name: str, differentiable: list[bool], *args: object) -> list[object]:
    """As `record`, under torch's autocast of this CPU."""
    with torch.autocast("cpu", dtype=dtype):
        return record(name, differentiable, *args)


def _leaf(value: object, wanted: Iterator[bool], inputs: list[torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_leaf(item, wanted, inputs) for item in value]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if next(wanted):
            inputs.append(value.requires_grad_())
    return value


def replay_backward(tape: Tape, *grads: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of a recorded composite's differentiable inputs; zeros where one was not used."""
    pairs = [(o, g) for o, g in zip(tape.outputs, grads) if g is not None and o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], tape.inputs, [g for _, g in pairs], allow_unused=True, retain_graph=True
    )
    return [
        torch.zeros_like(x) if g is None else torch.empty_like(x).copy_(g) for x, g in zip(tape.inputs, found)
    ]


FUNCTIONS: dict[str, Operator] = {
    "distruntime::config": configure,
    "distruntime::device_properties": device_properties,
    "distruntime::elapsed_time": elapsed_time,
    "distruntime::empty_cache": empty_cache,
    "distruntime::memory_figures": memory_figures,
    "distruntime::reset_peak": reset_peak,
    "distruntime::settings": settings,
    "distruntime::manual_seed": manual_seed,
    "distruntime::seed_member": seed_member,
    "distruntime::get_rng_state": get_rng_state,
    "distruntime::set_rng_state": set_rng_state,
    "distruntime::exchange_rng_state": exchange_rng_state,
    "distruntime::resize_storage": resize_storage,
    "distruntime::record": record,
    "distruntime::record_autocast": record_autocast,
    "distruntime::replay_backward": replay_backward,
}

# These write their operands. A session may call any other one, also one of another module, with what it may
# read only.
WRITING = frozenset({"distruntime::resize_storage"})
