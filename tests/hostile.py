"""Random programs over several nodes, run twice at the same time: on workers and on local tensors, one operation after the other.

Overlapping groups, copies, sends that are received much later, streams, events across nodes, views, writes in place, frees, and operations
that nobody waits for. Whatever the order in which workers get to it, each value must be what the program's own order gives.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import torch

import distruntime as dr
from agree import REMOTE

LENGTH = 12  # of every value, so that 2, 3 and 4 members can share it
MODULUS = 97  # whole numbers: whatever the order of a sum, it is exact

_tag = count().__next__  # what an earlier program has sent and nobody received has another


@dataclass
class Pair:
    """One value: on its node, and here."""

    remote: Any
    local: torch.Tensor

    @property
    def node(self) -> int:
        node: int = self.remote.place.node
        return node


class Program:
    """One random program; the same seed gives the same. `groups` are shared by programs that run side by side."""

    def __init__(self, seed: int, nodes: int) -> None:
        self.random = Random(seed)
        self.nodes = nodes
        self.groups = [dr.new_group(self.random.sample(range(nodes), self.random.randint(1, nodes))) for _ in range(3)]
        self.streams = [dr.Stream(self.random.randrange(nodes)) for _ in range(self.random.choice((0, 2, 5)))]
        self.values = [self._new(k % nodes) for k in range(nodes * 3)]
        self.works: list[Any] = []
        self.mail: list[tuple[int, int, torch.Tensor]] = []  # tag, node, what was sent there
        self.said: list[str] = []

    def run(self, steps: int) -> None:
        """Run so many operations; see `differences`."""
        steps_of = [getattr(self, name) for name in dir(type(self)) if name.startswith("step_")]
        for _ in range(steps):
            step = self.random.choice(steps_of)
            with ExitStack() as stack:
                for stream in self.random.sample(self.streams, self.random.randint(0, min(3, len(self.streams)))):
                    stack.enter_context(dr.stream(stream))
                self.said.append(step.__name__)
                step()

    def differences(self) -> list[str]:
        """Fetch every value; return those that are not what the program gives. Blocks a minute at most."""
        dr.synchronize(timeout=60)
        fetched = dr.fetch([pair.remote for pair in self.values])
        wrong = [
            f"value {k} on node {pair.node}: {got.tolist()}, expected {pair.local.tolist()}"
            for k, (pair, got) in enumerate(zip(self.values, fetched))
            if not torch.equal(got, pair.local)
        ]
        for group in self.groups:
            group.close()
        return wrong

    # -- what it is made of ------------------------------------------------------------------------------------------------------

    def _numbers(self) -> torch.Tensor:
        return torch.tensor([self.random.randrange(MODULUS) for _ in range(LENGTH)])

    def _new(self, node: int) -> Pair:
        local = self._numbers()
        with dr.node(node):
            return Pair(local.to(REMOTE), local)

    def _any(self, node: int | None = None) -> Pair:
        """A value, on that node; a new one where there is none."""
        found = [pair for pair in self.values if node is None or pair.node == node]
        if not found:
            self.values.append(self._new(self.random.randrange(self.nodes) if node is None else node))
            return self.values[-1]
        return self.random.choice(found)

    def _members(self) -> tuple[dr.ProcessGroup, list[Pair]]:
        group = self.random.choice(self.groups)
        return group, [self._any(node) for node in group.nodes]

    def _options(self, group: dr.ProcessGroup) -> dict[str, Any]:
        return {"group": group, "async_op": self.random.random() < 0.4}

    def _keep(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def step_new(self) -> None:
        self.values.append(self._new(self.random.randrange(self.nodes)))

    def step_free(self) -> None:
        if len(self.values) > 4:
            self.values.pop(self.random.randrange(len(self.values)))

    def step_compute(self) -> None:
        a = self._any()
        b = self._any(a.node)
        self.values.append(Pair((a.remote * 3 + b.remote) % MODULUS, (a.local * 3 + b.local) % MODULUS))

    def step_write(self) -> None:
        a = self._any()
        b = self._any(a.node)
        for x, y in ((a.remote, b.remote), (a.local, b.local)):
            x.add_(y).remainder_(MODULUS)

    def step_write_a_view(self) -> None:
        a, start = self._any(), self.random.randrange(LENGTH - 1)
        for x in (a.remote, a.local):
            x[start:].mul_(2).add_(1).remainder_(MODULUS)

    def step_slow(self) -> None:
        node = self.random.randrange(self.nodes)
        with dr.node(node):
            slow = torch.ones(128, 128, device=REMOTE)
        for _ in range(self.random.randrange(6)):
            slow = slow @ slow / 128

    def step_copy(self) -> None:
        a = self._any()
        self.values.append(Pair(a.remote.to(node=self.random.randrange(self.nodes)).clone(), a.local.clone()))

    def step_copy_into(self) -> None:
        a, b = self._any(), self._any()
        a.remote.copy_(b.remote)
        a.local.copy_(b.local)

    def step_send(self) -> None:
        a, tag = self._any(), _tag()
        node = self.random.choice([k for k in range(self.nodes) if k != a.node])
        if self.random.random() < 0.5:
            dr.send(a.remote, node, tag=tag)
        else:
            self._keep(dr.isend(a.remote, node, tag=tag))
        self.mail.append((tag, node, a.local.clone()))

    def step_receive(self) -> None:
        if self.mail:
            tag, node, sent = self.mail.pop(self.random.randrange(len(self.mail)))
            into = self._any(node)
            if self.random.random() < 0.5:
                dr.recv(into.remote, tag=tag)
            else:
                self._keep(dr.irecv(into.remote, tag=tag))
            into.local.copy_(sent)

    def step_wait_across(self) -> None:
        if self.streams:
            event = self.random.choice(self.streams).record_event()
            self.random.choice(self.streams).wait_event(event)

    def step_wait(self) -> None:
        if self.works:
            self.works.pop(self.random.randrange(len(self.works))).wait()

    def step_read(self) -> None:
        a = self._any()
        got, expected = a.remote.sum().item(), a.local.sum().item()
        assert got == expected, f"after {self.said}: read {got}, expected {expected}"

    def step_all_reduce(self) -> None:
        group, members = self._members()
        op = self.random.choice(("SUM", "MIN", "MAX"))
        self._keep(dr.all_reduce([m.remote for m in members], getattr(dr.ReduceOp, op), **self._options(group)))
        stacked = torch.stack([m.local for m in members])
        total = {"SUM": stacked.sum(0), "MIN": stacked.amin(0), "MAX": stacked.amax(0)}[op]
        for m in members:
            m.local.copy_(total)
            for x in (m.remote, m.local):
                x.remainder_(MODULUS)

    def step_reduce(self) -> None:
        group, members = self._members()
        root = self.random.randrange(group.size())
        self._keep(dr.reduce([m.remote for m in members], group_dst=root, **self._options(group)))
        members[root].local.copy_(torch.stack([m.local for m in members]).sum(0))
        for x in (members[root].remote, members[root].local):
            x.remainder_(MODULUS)

    def step_broadcast(self) -> None:
        group, members = self._members()
        root = self.random.randrange(group.size())
        self._keep(dr.broadcast([m.remote for m in members], group_src=root, **self._options(group)))
        for m in members:
            m.local.copy_(members[root].local.clone())

    def step_all_gather(self) -> None:
        group, members = self._members()
        if self.random.random() < 0.5:
            whole = dr.functional.all_gather([m.remote for m in members], group)
        else:
            whole = [m.remote.new_zeros(LENGTH * group.size()) for m in members]
            self._keep(dr.all_gather_into_tensor(whole, [m.remote for m in members], **self._options(group)))
        for rank, remote in enumerate(whole):
            other = (rank + 1) % group.size()
            self.values.append(Pair(remote[other * LENGTH :][:LENGTH], members[other].local.clone()))

    def step_reduce_scatter(self) -> None:
        group, members = self._members()
        parts = dr.functional.reduce_scatter([m.remote for m in members], group=group)
        total = torch.stack([m.local for m in members]).sum(0) % MODULUS
        for m, part, expected in zip(members, parts, total.chunk(group.size())):
            m.remote[: len(expected)] = part % MODULUS
            m.local[: len(expected)] = expected

    def step_all_to_all(self) -> None:
        group, members = self._members()
        n = group.size()
        new = [m.remote.new_zeros(LENGTH) for m in members]
        self._keep(dr.all_to_all_single(new, [m.remote for m in members], **self._options(group)))
        for rank, remote in enumerate(new):
            self.values.append(Pair(remote, torch.cat([m.local.chunk(n)[rank] for m in members])))

    def step_gather_and_scatter(self) -> None:
        group, members = self._members()
        root = self.random.randrange(group.size())
        gathered = dr.functional.gather([m.remote for m in members], group_dst=root, group=group)
        turned = [*gathered[1:], gathered[0]]
        expected = [m.local.clone() for m in members]
        into = [m.remote for m in members]
        self._keep(dr.scatter(into, turned, group_src=root, **self._options(group)))
        for m, value in zip(members, [*expected[1:], expected[0]]):
            m.local.copy_(value)

    def step_barrier(self) -> None:
        if self.random.random() < 0.3:
            group = self.random.choice(self.groups)
            self._keep(dr.barrier(group, async_op=self.random.random() < 0.7))


def check(seed: int, nodes: int, steps: int = 80) -> None:
    """Run one program; fail where a value is not the serial one, or where it does not end."""
    program = Program(seed, nodes)
    program.run(steps)
    wrong = program.differences()
    assert not wrong, f"seed {seed}, {nodes} nodes:\n" + "\n".join(wrong) + f"\n{program.said}"
