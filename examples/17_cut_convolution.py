"""A small network whose images are cut over four places: each has a quarter of every image.

    $ python examples/17_cut_convolution.py
    shards of an image: (4, 4), (4, 4), (4, 4), (4, 4)
    step  2  loss 2.1247  serial 2.1247
    step  4  loss 2.0203  serial 2.0203
    step  6  loss 1.6211  serial 1.6211
    step  8  loss 1.6119  serial 1.6119
    step 10  loss 1.2691  serial 1.2691
    largest difference: losses 2.4e-07, parameters 1.4e-07

The layers of `dr.nn` take and return lists of shards. A convolution's outputs at the edge of a quarter need
pixels of the neighbours. These travel while each place computes the outputs that need none of them. The batch
norm has the statistics of all quarters together. So the numbers are those of one place that has whole images,
and images may be larger than the memory of one GPU. docs/layers.md has the other layers.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import distruntime as dr

STEPS, BATCH = 10, 32

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)


def serial_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def cut_network(P: dr.mesh.Partition, one: dr.mesh.Partition, rows: dr.mesh.Partition) -> nn.Sequential:
    """Build the same network over the places of `P`; its last layer is on one place."""
    return nn.Sequential(
        dr.nn.Conv2d(P, 1, 8, 3, padding=1, bias=False),
        dr.nn.BatchNorm2d(P, 8),
        dr.nn.Each(nn.ReLU()),
        dr.nn.MaxPool2d(P, 2),
        dr.nn.Conv2d(P, 8, 16, 3, stride=2, padding=1),
        dr.nn.Each(nn.ReLU()),
        dr.nn.Repartition(P, one),
        dr.nn.Each(nn.Flatten()),
        dr.nn.Linear(rows, 64, 10),
    )


def main() -> None:
    dr.init_master_worker(world_size=2, simulate_cuda=2, quiet=True)
    places = [dr.place(node, gpu) for node in (0, 1) for gpu in ("cuda:0", "cuda:1")]
    P = dr.mesh.Partition(places, (1, 1, 2, 2))
    one, rows = dr.mesh.Partition(places[:1], (1, 1, 1, 1)), dr.mesh.Partition(places[:1], (1, 1))
    print("shards of an image:", ", ".join(str(tuple(size[2:])) for size in P.shapes((BATCH, 1, 8, 8))))

    serial, cut = serial_network(), cut_network(P, one, rows)
    cut.load_state_dict(serial.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (serial, cut)]
    entropy = dr.nn.CrossEntropyLoss(rows)
    losses: list[tuple[float, float]] = []
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        own = nn.functional.cross_entropy(serial(images[batch]), labels[batch])
        loss = entropy(cut(P.scatter(images[batch])), labels[batch])
        for optimizer, value in zip(optimizers, (own, loss)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append((loss.item(), own.item()))
        if step % 2:
            print(f"step {step + 1:2}  loss {losses[-1][0]:.4f}  serial {losses[-1][1]:.4f}")
    pairs = zip(dr.fetch(list(cut.parameters())), serial.parameters())
    apart = max((p - q).abs().max().item() for p, q in pairs)
    print(f"largest difference: losses {max(abs(a - b) for a, b in losses):.1e}, parameters {apart:.1e}")
    dr.shutdown()


if __name__ == "__main__":
    main()
