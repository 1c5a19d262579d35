"""A parameter server: the weights live on one node, and trainers on others compute gradients where their
data is.

    $ python examples/13_parameter_server.py
    3 nodes: the server on node 0, trainers on nodes 1 and 2 with 96 rows each
    step 1   loss 2.1471
    step 10  loss 0.4711
    step 20  loss 0.0672
    step 30  loss 0.0161
    largest difference: 3.6e-07 from one model that has seen all rows

A trainer is an object on its node. It makes its rows there, and keeps them. In each step it gets the
server's weights, and returns its gradients. The master only says what goes where: weights and gradients
travel from worker to worker, and nothing is waited for between the steps that are printed.
"""

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import distruntime as dr

SERVER, TRAINERS, ROWS, STEPS = 0, (1, 2), 96, 30


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Make the rows of one trainer, as a folder of its own would have them."""
    numbers = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 16, generator=numbers)
    return x, x[:, :8].argmax(1)


class Trainer:
    """Computes gradients of weights that come from elsewhere."""

    def __init__(self, number: int) -> None:
        self.x, self.y = rows(number)
        self.net = model()

    def gradients(self, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of these weights, and their gradients."""
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        loss = cross_entropy(functional_call(self.net, leaves, self.x), self.y)
        return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()])))


def serial() -> torch.nn.Module:
    """Train one model here on the rows of all trainers."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    parts = [rows(number) for number in TRAINERS]
    x, y = (torch.cat(part) for part in zip(*parts))
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


if __name__ == "__main__":
    with dr.init_master_worker(world_size=3, quiet=True):
        server = dr.place(SERVER)
        net = model().to(server)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        trainers = {number: dr.remote(Trainer)(number, node=number) for number in TRAINERS}
        print(f"3 nodes: the server on node 0, trainers on nodes 1 and 2 with {ROWS} rows each")
        for step in range(1, STEPS + 1):
            weights = {name: weight.detach() for name, weight in net.named_parameters()}
            losses = []
            for number, trainer in trainers.items():
                there = {name: weight.to(dr.place(number)) for name, weight in weights.items()}
                loss, gradients = trainer.gradients(there)
                losses.append(loss.to(server))
                for name, weight in net.named_parameters():
                    part = gradients[name].to(server) / len(trainers)
                    weight.grad = part if weight.grad is None else weight.grad + part
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 or step % 10 == 0:
                print(f"step {step:<3} loss {torch.stack(losses).mean().item():.4f}")
        twin = dict(serial().named_parameters())
        apart = max((twin[name] - weight.cpu()).abs().max().item() for name, weight in net.named_parameters())
        print(f"largest difference: {apart:.1e} from one model that has seen all rows")
