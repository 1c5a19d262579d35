"""Train one model on several workers: each has a copy and a share of every batch, and the gradients are
summed between them.

    $ python examples/06_data_parallel.py
    2 workers, 15 steps, 8 sums of gradients a step, beside the backward pass
    loss 2.2995 -> 2.1925, serial 2.2995 -> 2.1925
    largest difference: losses 2.4e-07, parameters 3.0e-08

A parameter's gradients are summed as soon as the last worker's is known, on streams of the group's own, while
the backward pass goes on. The bytes go from worker to worker. The same steps on this machine, with whole
batches, give the same losses and parameters.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import distruntime as dr

WORKERS, STEPS, BATCH = 2, 15, 64

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(data.target)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Tanh(),
        nn.Linear(128, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = slice(step * BATCH, (step + 1) * BATCH)
    return images[rows], labels[rows]


def serial() -> tuple[list[float], list[Tensor]]:
    """Train on this machine; return the losses and the parameters."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


class DataParallel:
    """A copy of a model on each place of a group, and sums of their gradients that begin while the backward
    pass runs.
    """

    def __init__(self, group: dr.distributed.ProcessGroup) -> None:
        self.group = group
        self.copies = []
        for place in group.places:
            with dr.node(place.node):
                self.copies.append(network().to("remote"))
        self.works: list[dr.distributed.Work] = []
        for twins in zip(*(copy.parameters() for copy in self.copies)):
            # The sum needs the gradients of all copies. This process runs the backward passes one after the
            # other, so the last copy's gradient comes last, and its hook starts the sum.
            twins[-1].register_post_accumulate_grad_hook(lambda _, twins=twins: self.reduce(twins))

    def reduce(self, twins: tuple[nn.Parameter, ...]) -> None:
        work = dr.distributed.all_reduce(
            [twin.grad for twin in twins if twin.grad is not None], group=self.group, async_op=True
        )
        assert work is not None
        self.works.append(work)

    def step(self, image: Tensor, label: Tensor) -> list[Tensor]:
        """Run one forward and backward pass on shares of the batch; return the losses' parts.

        Nothing is waited for.
        """
        losses = []
        for copy, x, y in zip(self.copies, image.chunk(len(self.copies)), label.chunk(len(self.copies))):
            device = next(copy.parameters()).device
            loss = nn.functional.cross_entropy(copy(x.to(device)), y.to(device), reduction="sum") / len(image)
            loss.backward()
            losses.append(loss.detach())
        for work in self.works:
            work.wait()  # makes the streams wait, not this process
        self.works.clear()
        return losses


def parallel() -> tuple[list[float], list[list[Tensor]], int]:
    """Train on the workers; return the losses, each copy's parameters, and how many sums a step took."""
    with dr.init_master_worker(backend="zmq", world_size=WORKERS):
        model = DataParallel(dr.distributed.new_group(range(WORKERS)))
        optimizers = [torch.optim.SGD(copy.parameters(), lr=0.05, momentum=0.9) for copy in model.copies]
        parts = []
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts.append(model.step(*batch(step)))
            for optimizer in optimizers:
                optimizer.step()
        losses = [sum(part.item() for part in step) for step in dr.fetch(parts)]
        return (
            losses,
            dr.fetch([[p.detach() for p in copy.parameters()] for copy in model.copies]),
            len(list(model.copies[0].parameters())),
        )


if __name__ == "__main__":
    losses, copies, sums = parallel()
    expected, parameters = serial()
    print(f"{WORKERS} workers, {STEPS} steps, {sums} sums of gradients a step, beside the backward pass")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, serial {expected[0]:.4f} -> {expected[-1]:.4f}")
    apart = max(
        (mine - theirs).abs().max().item() for copy in copies for mine, theirs in zip(copy, parameters)
    )
    print(
        f"largest difference: losses {max(abs(a - b) for a, b in zip(losses, expected)):.1e}, parameters "
        f"{apart:.1e}"
    )
