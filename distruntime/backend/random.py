"""Random numbers of the workers: seeds and states, per place, without waiting for anyone.

A worker's CPU draws exactly what this process's CPU would draw after the same seed. Every place has a
generator of its own, so after one `manual_seed` all CPUs of the session draw the same sequence.
`manual_seed(seed, distinct=True)` gives each node another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ..errors import ProtocolError, without_our_frames
from ..log.handle import Place, Residence, new_value
from ..log.spec import spec
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.session import active, active_session, session_of_log
from ..tensors.tensor import DistributedTensor
from ..tensors.worker_functions import issue_function, read_function

# torch's own `fork_rng` looks at its arguments itself; its parameters are not repeated here.
_fork_rng: Callable[..., AbstractContextManager[None]] = torch.random.fork_rng  # type: ignore[explicit-any]


@without_our_frames
def manual_seed(seed: int, distinct: bool = False) -> None:
    """Seed every place of the session. Return at once; also called by `torch.manual_seed`.

    Args:
        seed: as for `torch.manual_seed`; negative seeds count from 2**64.
        distinct: add the node's number, so that nodes draw different numbers.
    """
    session = active_session()
    # Two threads that seed at the same time come to every node in one order.
    with session.lock:
        for node in session.nodes:
            if node.failed is None:
                own = (int(seed) + (node.index if distinct else 0)) % (1 << 64)
                for name in session.places.devices(node.index):
                    issue_function(node, "manual_seed", [Place(node.index, name), str(own)])


def follow_seed() -> None:
    """Seed a new session as this process is seeded, if `torch.manual_seed` was called before. Return at once.

    torch keeps the seed for GPUs that it has not touched yet, or has given it to those that it has.
    """
    seed = torch.initial_seed()
    if torch.cuda.is_initialized():
        seeded = any(generator.initial_seed() == seed for generator in torch.cuda.default_generators)
    else:
        seeded = torch.cuda._lazy_seed_tracker.manual_seed_all_cb is not None
    if seeded:
        manual_seed(seed)


@functools.wraps(_fork_rng)
def fork_rng(
    devices: Iterable[object] | None = None, *args: object, **kwargs: object
) -> AbstractContextManager[None]:
    """Do as torch's own does; without `devices` and in a session, take the places that are there.

    torch would warn that many devices are slow, which places are not. And a lost node would be an error in
    code that knows of no session. The places are named as the kind of device, since torch 2.11 would take
    CUDA's.
    """
    if devices is None and kwargs.get("device_type", "remote") in (None, "remote") and active:
        session = active[0]
        if session.closed is None:
            devices = [place for place in session.places.own if session.nodes[place.node].failed is None]
            kwargs["device_type"] = "remote"
    return _fork_rng(devices, *args, **kwargs)


def _state_bytes(place: Residence) -> int:
    """Return how many bytes a place's random state has.

    Block for one round trip, the first time, where the worker's greeting did not tell.
    """
    if place.place.members:
        place = session_of_log(place.node).places.residence(place.place.members[0], numbered=False)
    node, rows = place.worker, place.worker.welcome.devices
    k = next(k for k, row in enumerate(rows) if row.name == place.place.local_device)
    if not rows[k].state:
        size = read_function(node, "rng_state_bytes", [place.lazy])
        if not isinstance(size, int):
            raise ProtocolError(f"{node} says that a random state has {size!r:.80} bytes")
        rows[k] = rows[k]._replace(state=size)
    return rows[k].state


def get_rng_state(place: Residence) -> DistributedTensor:
    """Return a snapshot of a place's random state, as a byte tensor. Return at once.

    It is on the CPU of the place's node, or on all members of a mesh.
    """
    session = session_of_log(place.node)
    session.require_open()
    place.node.require_alive()
    size = _state_bytes(place)
    home = place
    if not place.node.members and "cpu" in session.places.devices(place.place.node):
        home = session.places.residence(session.places.place(place.place.node, "cpu"))
    state = spec((size,), (1,), 0, torch.uint8)
    handle = new_value(state, home)
    issue_function(place.node, "get_rng_state", [place.lazy], fresh=handle)
    return wrap(DistributedTensor, handle)  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, place: Residence) -> None:
    """Set a place's random state from a snapshot, remote or local. Return at once."""
    if not isinstance(state, DistributedTensor) or state.get_node() != place.place.node:
        local = state.cpu()
        state = wrap(DistributedTensor, upload(local, place))
    issue_function(place.node, "set_rng_state", [place.lazy, state])


def draw_from(
    state: DistributedTensor, place: Residence, targets: Sequence[DistributedTensor] = ()
) -> DistributedTensor:
    """Have a place draw from `state` from now on; return the state that it drew from. Return at once.

    `targets` are what is drawn into, which nothing is if `state` is none. To the worker this is no seed:
    whoever calls this gives the old state back.
    """
    before = new_value(spec(tuple(state.shape), (1,), 0, torch.uint8), state._handle.place)
    issue_function(place.node, "get_rng_state", [place.lazy], fresh=before)
    issue_function(place.node, "draw_from", [place.lazy, state, *targets])
    return wrap(DistributedTensor, before)  # type: ignore[no-any-return]


def give_back(
    before: DistributedTensor,
    state: DistributedTensor,
    place: Residence,
    drawn: Sequence[DistributedTensor] = (),
) -> DistributedTensor:
    """Have a place draw from `before` again; return the state that it has now drawn from. Return at once.

    What it has `drawn` is poisoned if `state`, from which it was to draw, is none.
    """
    after = new_value(spec(tuple(state.shape), (1,), 0, torch.uint8), state._handle.place)
    arguments = [place.lazy, before, state, list(drawn)]
    issue_function(place.node, "exchange_rng_state", arguments, fresh=after, written=drawn)
    return wrap(DistributedTensor, after)  # type: ignore[no-any-return]


@contextmanager
def drawing_from(state: DistributedTensor, place: Residence) -> Iterator[None]:
    """Let a place draw from `state` in the block, and then go on as if it had not drawn."""
    before = draw_from(state, place)
    try:
        yield
    finally:
        give_back(before, state, place)
