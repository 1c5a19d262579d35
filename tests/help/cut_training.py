"""A training that uses every way to a worker, while somebody troubles the network: it must end as an
undisturbed one does, bit by bit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

import distruntime as dr
from distruntime.session.session import active_session
from distruntime.wire.messages import AskMemory
from network import Network
from processes import pause

# A product with this prime, to which something is added each time, tells of every step, of its order, and of
# steps that ran twice.
_PRIME = 6364136223846793005
# These are numbers of float32. Frames of the first size are copied, and those of the second are the user's
# own memory.
_BYTES_200K, _BYTES_3M = (
    50_000,
    750_000,
)


def whole_words() -> None:
    """Let tensors go through the socket, not through shared memory, which no cut concerns."""
    for node in active_session().nodes:
        node.shared = False


def train(
    steps: int, disturb: Callable[[int], object] = lambda step: None, node: int = 0
) -> list[torch.Tensor]:
    """Train a small model on a node; return all that it computed: losses, weights, counts, and what was
    fetched on the way.
    """
    torch.manual_seed(7)
    device = dr.default_stream(node, "cpu").device
    side = dr.Stream(node, "cpu")
    model = torch.nn.Sequential(
        torch.nn.Linear(50, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = torch.zeros((), dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    numbers = torch.Generator().manual_seed(3)
    small, large = torch.empty(_BYTES_200K), torch.empty(_BYTES_3M)
    found: list[torch.Tensor] = []
    pending: list[Any] = []
    for step in range(steps):
        disturb(step)
        small.normal_(generator=numbers)
        # The next step writes this memory again.
        batch = small.to(device).view(-1, 50)
        loss = (model(batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for k in range(20):
            count += 1
            total.mul_(_PRIME).add_(step * 20 + k)
        with dr.stream(side):
            side.wait_stream(dr.default_stream(node, "cpu"))
            shadow = count * 2
            done = side.record_event()
        done.wait(dr.default_stream(node, "cpu"))
        total += shadow
        if step % 3 == 0:
            found.append(torch.tensor(loss.item()))
        if step % 5 == 1:
            large.normal_(generator=numbers)
            there = large.to(device)
            large.zero_()
            pending.append(dr.fetch_async(there * 2))
        if step % 7 == 2:
            pending.append(dr.fetch_async([count, total, loss]))
        if len(pending) > 3:
            found += _leaves(pending.pop(0).result(120))
    for future in pending:
        found += _leaves(future.result(120))
    dr.synchronize(node)
    return [*found, count.cpu(), total.cpu(), *(p.detach().cpu() for p in model.parameters())]


def _leaves(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list) else [value]


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Fail unless two trainings computed the same, bit by bit."""
    assert len(got) == len(wanted)
    for k, (one, other) in enumerate(zip(got, wanted)):
        assert torch.equal(one, other), f"value {k} of {len(got)} differs"


def counted(node: int = 0) -> None:
    """Fail unless a worker has run, and counted, just what was issued and sent."""
    session = active_session()
    dr.synchronize(node)
    worker = session.nodes[node]
    assert session.value(session.ask(worker, AskMemory))[1] == worker.base
    assert worker.outlet.seq > 0 and not worker.flights and worker.link.sent > worker.outlet.seq


class Trouble:
    """Cuts, tears and slows a network at moments that a seed draws.

    A context manager: at its end the network is whole.
    """

    def __init__(
        self, network: Network, seed: int, steps: int, faults: int = 4, longest: float = 1.5
    ) -> None:
        self._network, self._random = network, random.Random(seed)
        self._longest = longest
        self._steps = set(self._random.sample(range(1, steps), faults))
        self._threads: list[threading.Thread] = []
        # It allows one trouble at a time.
        self._one = threading.Lock()
        self.done: list[str] = []

    def __call__(self, step: int) -> None:
        """Begin trouble, if this is a step for it."""
        if step in self._steps:
            draw = self._random
            kind = draw.choice(["tear", "tear", "cut", "long cut", "cut and tear", "slow"])
            delay, length = draw.uniform(0.0, 0.05), draw.uniform(0.05, 0.4)
            if kind == "long cut":
                length = draw.uniform(0.4, self._longest)
            thread = threading.Thread(target=self._trouble, args=(kind, delay, length))
            self._threads.append(thread)
            thread.start()

    def _trouble(self, kind: str, delay: float, length: float) -> None:
        pause(delay)
        with self._one:
            if kind == "tear":
                self._network.tear()
            elif kind == "slow":
                self._network.slow(0.02)
                pause(length)
                self._network.slow(0.0)
            else:
                with self._network.broken():
                    pause(length)
                    if kind == "cut and tear":
                        self._network.tear()
            self.done.append(kind)

    def __enter__(self) -> Trouble:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()
