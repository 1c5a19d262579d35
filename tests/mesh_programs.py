"""Random programs on a mesh, parts of it, its members and their streams, and the same step by step here: integers, so equal means equal."""

from __future__ import annotations

import random
from typing import Any

import torch

import distruntime as dr

SIZE = 6
MODULUS = 10007


class Program:
    """One random program; `run` fails where a value is not what a serial run gives."""

    def __init__(self, seed: int, whole: dr.DeviceMesh) -> None:
        self.choose = random.Random(seed)
        self.meshes = [whole, whole.select(dp=0), whole.select(dp=1)]
        half = whole.size() // 2
        self.ranks = [list(range(whole.size())), list(range(half)), list(range(half, whole.size()))]
        self.places = whole.places
        self.streams: list[list[Any]] = [[None, dr.Stream(m.device)] if self.choose.random() < 0.5 else [None] for m in self.meshes]
        # On a mesh: [mesh number, tensor there, one here for each member]; of one member: [rank, tensor there, tensor here].
        self.on_meshes: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
        self.on_members: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.read = 0

    def run(self, steps: int = 80) -> int:
        for _ in range(steps):
            m = self.choose.randrange(3)
            with dr.stream(self.choose.choice(self.streams[m])):
                self.step(m)
        for _, there, here in self.on_meshes:
            self.equal(dr.shards(there), here)  # type: ignore[arg-type]
        for _, one, alone in self.on_members:
            self.equal([one.cpu()], [alone])
        return self.read

    def equal(self, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        self.read += 1
        for a, b in zip(found, wanted):
            assert torch.equal(a, b), (found, wanted)

    def step(self, m: int) -> None:
        choose, mine = self.choose, [v for v in self.on_meshes if v[0] == m]
        if not mine or choose.random() < 0.1:
            here = [torch.arange(SIZE) * (r + 1) + choose.randrange(9) for r in self.ranks[m]]
            self.keep(m, dr.from_shards(here, self.meshes[m]), [t.clone() for t in here])
            return
        (_, a, xs), (_, b, ys) = choose.choice(mine), choose.choice(mine)
        match choose.randrange(12):
            case 0 | 1:
                self.keep(m, (a * 3 + b) % MODULUS, [(x * 3 + y) % MODULUS for x, y in zip(xs, ys)])
            case 2:
                a.add_(b).remainder_(MODULUS)
                for x, y in zip(xs, ys):
                    x.add_(y).remainder_(MODULUS)
            case 3:
                a[1:4].mul_(5).remainder_(MODULUS)
                for x in xs:
                    x[1:4].mul_(5).remainder_(MODULUS)
            case 4:
                k = choose.randrange(len(xs))
                self.on_members.append((self.ranks[m][k], a.member(k), xs[k]))  # type: ignore[attr-defined]
                del self.on_members[:-8]
            case 5 if self.on_members:
                _, one, alone = choose.choice(self.on_members)
                one.add_(7), alone.add_(7)
            case 6 if self.on_members:
                rank, one, alone = choose.choice(self.on_members)
                self.on_members.append((rank, one * 2 % MODULUS, alone * 2 % MODULUS))
            case 7 if self.on_members:
                _, one, alone = choose.choice(self.on_members)
                self.equal([one.cpu()], [alone])
            case 8:
                self.equal(dr.shards(a), xs)  # type: ignore[arg-type]
            case 9:
                lines = self.meshes[m].lines()
                total = dr.lines.all_reduce(lines, a)  # type: ignore[attr-defined]
                self.keep(m, total % MODULUS, [torch.stack(xs).sum(0) % MODULUS for _ in xs])
            case 10 if m == 0:
                part = choose.choice((1, 2))
                few = [a.member(k) for k in self.ranks[part]]  # type: ignore[attr-defined]
                self.keep(part, dr.from_shards(few, self.meshes[part]), [xs[k] for k in self.ranks[part]])
            case 11:
                del self.on_meshes[choose.randrange(len(self.on_meshes))]

    def keep(self, m: int, there: Any, here: list[torch.Tensor]) -> None:
        self.on_meshes.append((m, there, here))
        if len(self.on_meshes) > 12:
            del self.on_meshes[self.choose.randrange(12)]
