"""Train a small convolutional network on a worker, and the same on this machine: handwritten digits, the same
losses.

    $ python examples/02_digits.py      (or `make demo`, or without a clone: python -m distruntime demo)
      digits  5/5 epochs   test accuracy 98.6 %   1.7 s   (same losses as local: yes, within 2e-07)
      picture: digits.png     try next:  python -m distruntime repl

`train` is ordinary PyTorch. It runs with device="cpu", then with device="remote"; nothing else changes.
"""

import time
from collections.abc import Iterator

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import distruntime as dr

EPOCHS, BATCH, LEARNING_RATE, TESTED = 5, 32, 3e-3, 360
PICTURE = "digits.png"

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8), from 0 to 1
labels = torch.tensor(data.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, training = order[:TESTED], order[TESTED:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 3 * 3, 10),
    )  # fmt: skip


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for chosen in training[torch.randperm(len(training))].split(BATCH):
        yield images[chosen], labels[chosen]


def train(device: str) -> tuple[list[float], float]:
    """Return the loss of every step, and the accuracy on images that were not trained on."""
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    bar = tqdm(
        range(EPOCHS),
        f"{device:>8}",
        bar_format="{desc}  {bar:20}  {n}/{total} epochs  {elapsed}",
        disable=None,
    )
    for _ in bar:
        for image, label in batches():
            loss = nn.functional.cross_entropy(model(image.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())  # a proxy: nothing is waited for inside an epoch
        losses[-1].item()  # so that the bar shows what is done, not what is asked for
    model.eval()
    right = model(images[test].to(device)).argmax(1) == labels[test].to(device)
    return [loss.item() for loss in dr.fetch(losses)], right.float().mean().item()


def draw(local: list[float], remote: list[float]) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(local, linewidth=5, alpha=0.3, label="this process")
    axes.plot(remote, linewidth=1, label="a worker")
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="the same training, twice")
    axes.legend()
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    with dr.init_master_worker(backend="zmq"):
        # A GPU would round the numbers of a convolution to ten bits, and a CPU does not.
        dr.config(cudnn_allow_tf32=False)
        started = time.perf_counter()
        remote, accuracy = train("remote")
        seconds = time.perf_counter() - started
        local, _ = train("cpu")
    difference = max(abs(a - b) for a, b in zip(local, remote))
    same = ("yes" if difference < 1e-3 else "NO") + (
        f", within {difference:.0e}" if difference else ", to the last bit"
    )
    draw(local, remote)
    print(
        f"  digits  {EPOCHS}/{EPOCHS} epochs   test accuracy {100 * accuracy:.1f} %   {seconds:.1f} s   "
        f"(same losses as local: {same})"
    )
    print(f"  picture: {PICTURE}     try next:  python -m distruntime repl")
