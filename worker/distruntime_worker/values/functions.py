"""Operations of a worker that are not torch operators: settings, random state, and composites that are
recorded here with their backward.

Each is called as an operator is, by its own name, with tensors and constants; what it returns goes into
slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from distruntime.errors import UsageError
from distruntime.wire.shield import Lock

from ..machine import accelerator, random_states
from ..machine.figures import device_properties, empty_cache, memory_figures, reset_peak
from ..machine.ranges import mark, range_pop, range_push
from ..machine.settings import configure, settings
from . import products
from .step import Operator
from .streams import elapsed_time

SEED = "distruntime::manual_seed"
# A generator of this worker was set so often.
seedings = [0]


def seed_member(device: torch.device, seed: torch.Tensor, own: torch.Tensor | None = None) -> None:
    """Seed the generator of one member of a mesh: `seed` and a number of its own, which are on the CPU."""
    manual_seed(device, str(int(seed if own is None else seed + own)))


def manual_seed(device: torch.device, seed: str) -> None:
    """Seed the generator of one device."""
    seedings[0] += 1
    if device.type == "cpu":
        torch.default_generator.manual_seed(int(seed))
    elif device not in accelerator.lost:
        random_states.manual_seed(device, int(seed))


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return a snapshot of one device's random state, a byte tensor on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else random_states.rng_state(device)


def rng_state_bytes(device: torch.device) -> int:
    """Return how many bytes the random state of one device has."""
    return get_rng_state(device).numel()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set one device's random state."""
    seedings[0] += 1
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        random_states.set_rng_state(device, state)


def draw_from(device: torch.device, state: torch.Tensor, *targets: object) -> None:
    """Set one device's random state for what draws next.

    It is no seeding: the master gives the old state back. If it fails, `state` is poisoned, and so are the
    `targets`, so that nothing else is drawn into these.
    """
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        random_states.set_rng_state(device, state)


def exchange_rng_state(
    device: torch.device, state: torch.Tensor, drew_from: object, drawn: list[object]
) -> torch.Tensor:
    """Give one device its random state back, and return the one that it drew from, a byte tensor on the CPU.

    What was drawn is poisoned, as this fails, if `drew_from` is poisoned: it was no state.
    """
    after = get_rng_state(device)
    draw_from(device, state)
    if not isinstance(drew_from, torch.Tensor):
        raise RuntimeError("the state of a generator is poisoned")
    return after


def resize_storage(tensor: torch.Tensor, nbytes: int) -> None:
    """Give a tensor's memory back, or take it again."""
    tensor.untyped_storage().resize_(nbytes)


# Whoever has set the kernels of attention holds it until they are as before.
_choosing = Lock()


class Tape:
    """A recorded composite: what its backward needs. Lives in a slot like any value, freed like any value."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs


def record(
    strides: list[list[int]] | None, name: str, differentiable: list[bool], *args: object
) -> list[object]:
    """Run an operator with autograd on; return its results and, last, the tape for `replay_backward`.

    The results get `strides`, which the master has promised, or keep their own if they are dense.
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
    # A view of a saved output does no harm, as version counters watch over those there.
    wished: Sequence[list[int] | None] = [None] * len(outputs) if strides is None else strides
    return [*(_laid_out(o.detach(), wish) for o, wish in zip(outputs, wished)), Tape(inputs, outputs)]


def _laid_out(result: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
    if strides is None:
        # Like a tensor without gaps and overlaps, torch makes one with its strides.
        dense = torch.empty_like(result, device="meta").stride() == result.stride()
        return result if dense else result.contiguous()
    if list(result.stride()) == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def record_autocast(
    dtype: torch.dtype, strides: list[list[int]] | None, name: str, differentiable: list[bool], *args: object
) -> list[object]:
    """As `record`, under torch's autocast of this CPU."""
    with torch.autocast("cpu", dtype=dtype):
        return record(strides, name, differentiable, *args)


def record_attention(
    kernels: list[int], strides: list[list[int]] | None, name: str, differentiable: list[bool], *args: object
) -> list[object]:
    """As `record`, by one of the kernels of `SDPBackend` with these numbers, the first one first.

    They are the process's choice while it runs. Another stream that computes attention in these microseconds
    may take such a kernel too.
    """
    with _choosing, sdpa_kernel([SDPBackend(k) for k in kernels], set_priority=True):
        return record(strides, name, differentiable, *args)


def _leaf(value: object, wanted: Iterator[bool], inputs: list[torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_leaf(item, wanted, inputs) for item in value]
    if isinstance(value, torch.Tensor):
        # The master counts the writes of an operand, and leaves out those through `x.data`, as torch does. So
        # the tape's twin has a counter of its own.
        value = value.data
        if next(wanted):
            inputs.append(value.requires_grad_())
    return value


def replay_backward(tape: Tape, *grads: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of a recorded composite's differentiable inputs; zeros where one was not used."""
    pairs = [(o, g) for o, g in zip(tape.outputs, grads) if g is not None and o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], tape.inputs, [g for _, g in pairs], allow_unused=True, retain_graph=True
    )
    for g in found:
        # Autograd runs a backward on the stream of its forward, and the memory of the results belongs there.
        if g is not None and accelerator.asynchronous(g.device):
            accelerator.used_on(g, accelerator.current_stream(g.device))
    known = [*tape.inputs, *tape.outputs, *(g for g in (*grads, *found) if g is not None)]
    held = Counter(one.untyped_storage()._cdata for one in known)
    return [
        torch.zeros_like(x) if g is None else g if _is_own(x, g, held) else torch.empty_like(x).copy_(g)
        for x, g in zip(tape.inputs, found)
    ]


def _is_own(x: torch.Tensor, found: torch.Tensor, held: Counter[int]) -> bool:
    """Whether a gradient has the strides that `x` gives, and memory that nobody else sees.

    `held` counts the known tensors in each memory. What autograd has saved is not among them. But it holds
    the tensor or its memory, besides Python's one hold on each.
    """
    if torch.empty_like(x, device="meta").stride() != found.stride() or found.is_conj() or found.is_neg():
        return False
    storage = found.untyped_storage()
    return (
        held[storage._cdata] == 1
        and storage.nbytes() == found.nbytes
        and found._use_count() == 1  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) == 2
    )


FUNCTIONS: dict[str, Operator] = {
    "distruntime::config": configure,
    "distruntime::device_properties": device_properties,
    "distruntime::elapsed_time": elapsed_time,
    "distruntime::empty_cache": empty_cache,
    # torch's library names its operators so.
    "distruntime::linear_backward.default": products.linear_backward,
    "distruntime::mark": mark,
    "distruntime::matmul_backward.default": products.matmul_backward,
    "distruntime::memory_figures": memory_figures,
    "distruntime::range_pop": range_pop,
    "distruntime::range_push": range_push,
    "distruntime::reset_peak": reset_peak,
    "distruntime::settings": settings,
    SEED: manual_seed,
    "distruntime::seed_member": seed_member,
    "distruntime::get_rng_state": get_rng_state,
    "distruntime::rng_state_bytes": rng_state_bytes,
    "distruntime::set_rng_state": set_rng_state,
    "distruntime::draw_from": draw_from,
    "distruntime::exchange_rng_state": exchange_rng_state,
    "distruntime::resize_storage": resize_storage,
    "distruntime::record": record,
    "distruntime::record_autocast": record_autocast,
    "distruntime::record_attention": record_attention,
    "distruntime::replay_backward": replay_backward,
}

# These read the random state of a device, or set it.
RANDOM_STATES = frozenset(
    {
        SEED,
        "distruntime::seed_member",
        "distruntime::get_rng_state",
        "distruntime::set_rng_state",
        "distruntime::draw_from",
        "distruntime::exchange_rng_state",
    }
)
# If one of these fails, its operands are poisoned from this one on.
POISONING = {"distruntime::draw_from": 0, "distruntime::exchange_rng_state": 2}

# These write their operands. A session may call any other one, also one of another module, with what it may
# read only.
WRITING = frozenset({"distruntime::resize_storage"})
