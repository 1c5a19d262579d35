"""Data and weights that lie at a worker: they are read there, and none of their bytes comes here.

    $ python examples/12_data_there.py
    sent to the worker: digits.safetensors
    read there: x (1797, 64), y (1797,)
    epoch 0: loss 1.418, batches of 128, the last of 5
    epoch 1: loss 0.413, batches of 128, the last of 5
    epoch 2: loss 0.164, batches of 128, the last of 5
    a module made on meta reads the weights: 100 % of the digits are right
    brought back: 40 KB

Here the worker is on this machine, so both see the same disk. Any other worker has a disk of its own.
"""

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import distruntime as dr


def digits(path: str) -> TensorDataset:
    """Return a dataset of a file. It runs at the worker."""
    found = load_file(path)
    return TensorDataset(found["x"], found["y"])


def model() -> torch.nn.Module:
    """Return a small classifier of digits."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def write(path: Path) -> None:
    """Write digits that are easy to tell apart: a pattern each, and noise."""
    torch.manual_seed(0)
    y = torch.randint(10, (1797,))
    save_file({"x": torch.randn(10, 64)[y] + 1.5 * torch.randn(1797, 64), "y": y}, path)


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory(prefix="here-") as here,
        tempfile.TemporaryDirectory(prefix="there-") as there,
    ):
        write(Path(here, "digits.safetensors"))
        with dr.init_master_worker(), dr.on(1):
            path = f"{there}/digits.safetensors"
            dr.remote(Path.write_bytes)(Path(path), Path(here, "digits.safetensors").read_bytes(), node=1)
            print("sent to the worker:", os.path.basename(path))
            data = dr.load(path, node=1)
            print("read there:", ", ".join(f"{name} {tuple(t.shape)}" for name, t in sorted(data.items())))

            net = model().to("remote")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            # The function goes there, with its argument, and two processes of the worker make the batches.
            loader = dr.data.data_loader(
                lambda: digits(path), node=1, batch_size=128, shuffle=True, num_workers=2
            )
            for epoch in range(3):
                sizes, total = [], torch.zeros((), device="remote")
                for x, y in loader:
                    loss = cross_entropy(net(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    sizes.append(len(x))
                    total += loss.detach()
                mean = total.item() / len(sizes)
                print(f"epoch {epoch}: loss {mean:.3f}, batches of {sizes[0]}, the last of {sizes[-1]}")

            # The worker writes the weights of its own tensors, and another module takes them up there.
            dr.remote(torch.save)({**net.state_dict()}, f"{there}/weights.pt")
            with torch.device("meta"):
                again = model()
            dr.load(f"{there}/weights.pt", node=1, into=again)
            right = (again(data["x"]).argmax(1) == data["y"]).float().mean().item()
            print(
                f"a module made on meta reads the weights: {right:.0%} of the digits are right".replace(
                    "%", " %"
                )
            )
            back = dr.remote(Path.read_bytes)(Path(there, "weights.pt"), node=1)
            print(f"brought back: {len(dr.fetch(back)) // 1000} KB")
