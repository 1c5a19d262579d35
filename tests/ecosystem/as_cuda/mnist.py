"""In the style of pytorch/examples' mnist: a CNN with dropout, Adadelta, loaders, and a saved model."""

import argparse
import json
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    seen = []
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            seen.append(loss.item())
            done = batch_idx * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}")
    return seen


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_loader.dataset)}")
    return [test_loss, correct]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--no-accel", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    use_accel = not args.no_accel and torch.accelerator.is_available()
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() if use_accel else torch.device("cpu")

    train_kwargs = {"batch_size": args.batch_size, "generator": torch.Generator()}
    test_kwargs = {"batch_size": args.test_batch_size, "generator": torch.Generator()}
    if use_accel:
        accel_kwargs = {"num_workers": 1, "persistent_workers": True, "pin_memory": True}
        train_kwargs.update(accel_kwargs)
        test_kwargs.update(accel_kwargs)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    images = (images / 16 - 0.1307) / 0.3081
    labels = torch.tensor(digits.target)
    train_data = TensorDataset(images[:960], labels[:960])
    # The order of the data is a matter of its own seed, and not of what the device draws.
    order = RandomSampler(train_data, generator=torch.Generator().manual_seed(args.seed))
    train_loader = DataLoader(train_data, sampler=order, **train_kwargs)
    test_loader = DataLoader(TensorDataset(images[960:1360], labels[960:1360]), **test_kwargs)

    model = Net().to(device)
    torch.manual_seed(args.seed)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    log = []
    for epoch in range(1, args.epochs + 1):
        log += train(args, model, device, train_loader, optimizer, epoch)
        log += test(model, device, test_loader)
        scheduler.step()
    path = os.path.join(tempfile.mkdtemp(), "mnist_cnn.pt")
    torch.save(model.state_dict(), path)
    saved = torch.load(path, weights_only=True)
    total = sum(tensor.double().abs().sum().item() for tensor in saved.values())
    where = str(next(model.parameters()).device)
    print(json.dumps({"log": log, "saved": total, "where": where}))


if __name__ == "__main__":
    main()
