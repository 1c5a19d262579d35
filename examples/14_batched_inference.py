"""Batched inference: many clients ask at once, and a model on a worker answers several of them together.

    $ python examples/14_batched_inference.py
    48 questions of 8 clients, 48 right
    the model on node 1 was called 6 times, with 8.0 questions at a time

The clients are tasks of this process; in a service they would be requests from outside. A question waits
until the model is free, and whatever has come by then goes together. The model is a `RemoteModule`: it is
made on its worker, and its weights are never here. `await dr.fetch_async(...)` lets the other clients go on.
"""

import asyncio

import torch
from torch import Tensor

import distruntime as dr

CLIENTS, QUESTIONS, MOST = 8, 6, 16


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).eval()


class Batcher:
    """Collects questions, and asks a model about several of them in one call."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.waiting: asyncio.Queue[tuple[Tensor, asyncio.Future[Tensor]]] = asyncio.Queue()
        self.calls = self.asked = 0

    async def ask(self, question: Tensor) -> Tensor:
        """Return the model's answer."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        await self.waiting.put((question, answer))
        return await answer

    async def serve(self) -> None:
        """Answer for ever."""
        while True:
            batch = [await self.waiting.get()]
            while not self.waiting.empty() and len(batch) < MOST:
                batch.append(self.waiting.get_nowait())
            questions = torch.stack([question for question, _ in batch]).to(self.device)
            with torch.no_grad():
                answers = await dr.fetch_async(self.model(questions).argmax(1))
            self.calls += 1
            self.asked += len(batch)
            for (_, waits), answer in zip(batch, answers):
                waits.set_result(answer)


async def client(number: int, batcher: Batcher, twin: torch.nn.Module) -> int:
    """Ask some questions, one after the other; return how many answers were right."""
    numbers, right = torch.Generator().manual_seed(number), 0
    for _ in range(QUESTIONS):
        question = torch.randn(32, generator=numbers)
        answer = await batcher.ask(question)
        right += int(answer == twin(question).argmax())
    return right


async def main(model: torch.nn.Module, device: torch.device) -> None:
    batcher = Batcher(model, device)
    server = asyncio.create_task(batcher.serve())
    right = sum(await asyncio.gather(*(client(k, batcher, make()) for k in range(CLIENTS))))
    server.cancel()
    print(f"{CLIENTS * QUESTIONS} questions of {CLIENTS} clients, {right} right")
    each = batcher.asked / batcher.calls
    print(f"the model on node 1 was called {batcher.calls} times, with {each:.1f} questions at a time")


if __name__ == "__main__":
    with dr.init_master_worker(world_size=2, quiet=True):
        place = dr.place(1)
        asyncio.run(main(dr.RemoteModule(make, node=1), place.device))
