"""A pipeline of three stages on three workers, one micro-batch forward, one backward (1F1B): equal to the
serial model.

    $ python examples/07_pipeline.py
    3 stages, 8 micro-batches, 5 steps
    what node 0 was given:  F F F B F B F B F B F B F B B B
    what node 2 was given:  F B F B F B F B F B F B F B F B
    loss 0.2554 -> 0.2492, serial 0.2554 -> 0.2492
    largest difference: losses 2.4e-08, parameters 7.5e-09

Each stage lives on its own worker; activations go from worker to worker by `.to(device)`, and autograd sends
their gradients back. The schedule is simply the order in which this program issues the work. Each worker runs
its part in that order, and waits only for the inputs that it needs.
"""

import torch
from torch import Tensor, nn

import distruntime as dr

STAGES, MICRO, STEPS, WIDTH = 3, 8, 5, 64


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(STAGES)
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16 * MICRO, WIDTH, generator=generator), torch.randn(
        16 * MICRO, WIDTH, generator=generator
    )


def serial() -> tuple[list[float], list[Tensor]]:
    """Train on this machine, with whole batches."""
    model = nn.Sequential(*stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = 0.25 * nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def schedule() -> list[tuple[int, str, int]]:
    """Return (stage, "F" or "B", micro-batch) in an order in which everything can be said: each stage's own
    order is 1F1B.
    """
    orders = []
    for stage in range(STAGES):
        ahead = min(STAGES - 1 - stage, MICRO)
        order = [("F", k) for k in range(ahead)]
        for k in range(MICRO - ahead):
            order += [("F", ahead + k), ("B", k)]
        orders.append(order + [("B", k) for k in range(MICRO - ahead, MICRO)])
    said: set[tuple[int, str, int]] = set()
    found = []
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, k = order[0]
                before = (
                    (stage - 1, "F", k)
                    if kind == "F"
                    else (stage + 1, "B", k)
                    if stage < STAGES - 1
                    else (stage, "F", k)
                )
                if before[0] >= 0 and before not in said:
                    break
                said.add((stage, kind, k))
                found.append((stage, kind, k))
                order.pop(0)
    return found


class Pipeline:
    """Stages on workers of their own; gradients of activations are handed from stage to stage."""

    def __init__(self) -> None:
        self.stages = []
        for node, stage in enumerate(stages()):
            with dr.node(node):
                self.stages.append(stage.to("remote"))
        self.devices = [next(stage.parameters()).device for stage in self.stages]

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Say one step; return the losses' parts. Nothing is waited for."""
        inputs: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        losses = []
        xs, ys = x.to(self.devices[0]).chunk(MICRO), y.to(self.devices[-1]).chunk(MICRO)
        for stage, kind, k in schedule():
            if kind == "F":
                here = (
                    xs[k]
                    if stage == 0
                    else outputs[stage - 1, k].detach().to(self.devices[stage]).requires_grad_()
                )
                inputs[stage, k], outputs[stage, k] = here, self.stages[stage](here)
            elif stage == STAGES - 1:
                loss = 0.25 * nn.functional.mse_loss(outputs.pop((stage, k)), ys[k]) / MICRO
                loss.backward()
                losses.append(loss.detach())
            else:
                gradient = inputs.pop((stage + 1, k)).grad
                assert gradient is not None
                outputs.pop((stage, k)).backward(gradient.to(self.devices[stage]))
        return losses


def pipelined() -> tuple[list[float], list[Tensor]]:
    """Train on the workers."""
    with dr.init_master_worker(backend="zmq", world_size=STAGES):
        model = Pipeline()
        parameters = [p for stage in model.stages for p in stage.parameters()]
        optimizers = [torch.optim.SGD(stage.parameters(), lr=0.5) for stage in model.stages]
        parts = []
        for step in range(STEPS):
            parts.append(model.step(*batch(step)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [sum(part.item() for part in step) for step in dr.fetch(parts)], dr.fetch(
            [p.detach() for p in parameters]
        )


if __name__ == "__main__":
    losses, parameters = pipelined()
    expected, wanted = serial()
    print(f"{STAGES} stages, {MICRO} micro-batches, {STEPS} steps")
    for node in (0, STAGES - 1):
        print(f"what node {node} was given: ", *(kind for stage, kind, _ in schedule() if stage == node))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, serial {expected[0]:.4f} -> {expected[-1]:.4f}")
    apart = max((a - b).abs().max().item() for a, b in zip(parameters, wanted))
    print(
        f"largest difference: losses {max(abs(a - b) for a, b in zip(losses, expected)):.1e}, parameters "
        f"{apart:.1e}"
    )
