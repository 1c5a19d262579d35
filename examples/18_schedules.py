"""A pipeline of four stages on two workers, by two of torch's schedules: equal to the serial model.

    $ python examples/18_schedules.py
    <Interleaved1F1B: 4 stages, 4 micro-batches
      node 0 cpu  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
      node 1 cpu  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3>
    loss 1.0384 -> 1.0109, serial 1.0384 -> 1.0109
    largest difference: losses 1.2e-07, parameters 1.5e-08
    ZBVZeroBubble
    loss 1.0384 -> 1.0109, serial 1.0384 -> 1.0109
    largest difference: losses 1.2e-07, parameters 1.5e-08

`dr.parallel.split` cuts the model, and `dr.parallel.pipeline` has torch's own schedules drive its stages from
this process. Each worker runs its passes in the order that is shown: 2B1 is stage 2, backward, micro-batch 1.
"""

import torch
from torch import Tensor, nn

import distruntime as dr

STAGES, MICRO, STEPS, WIDTH = 4, 4, 5, 64


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(STAGES):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16 * MICRO, WIDTH, generator=generator), torch.randn(
        16 * MICRO, WIDTH, generator=generator
    )


def serial() -> tuple[list[float], list[Tensor]]:
    """Train on this machine, with whole batches."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def pipelined(schedule: str, nodes: list[int]) -> tuple[list[float], list[Tensor]]:
    """Train on workers: stage k on node `nodes[k]`."""
    stages = [part.to(dr.place(node, "cpu")) for part, node in zip(dr.parallel.split(make(), STAGES), nodes)]
    pipe = dr.parallel.pipeline(stages, MICRO, schedule, nn.functional.mse_loss)
    print(pipe if schedule == "Interleaved1F1B" else schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    means = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        pipe.step(x, target=y, losses=losses, return_outputs=False)
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
        means.append(torch.stack(losses).mean())
    return [mean.item() for mean in dr.fetch(means)], dr.fetch([p.detach() for p in pipe.parameters()])


if __name__ == "__main__":
    expected, wanted = serial()
    with dr.init_master_worker(backend="zmq", world_size=2):
        for schedule, nodes in (("Interleaved1F1B", [0, 1, 0, 1]), ("ZBVZeroBubble", [0, 1, 1, 0])):
            losses, parameters = pipelined(schedule, nodes)
            apart = max((a - b).abs().max().item() for a, b in zip(parameters, wanted))
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, serial {expected[0]:.4f} -> {expected[-1]:.4f}")
            print(
                f"largest difference: losses {max(abs(a - b) for a, b in zip(losses, expected)):.1e}, "
                f"parameters {apart:.1e}"
            )
