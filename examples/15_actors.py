"""Actors and a learner: environments step on two workers, and the policy is trained on a third.

    $ python examples/15_actors.py
    round 1   an episode lasts 23.4 steps
    round 5   an episode lasts 32.4 steps
    round 10  an episode lasts 91.0 steps
    round 15  an episode lasts 94.9 steps

Each actor is an object on its worker, with four carts of its own. In a round it gets the weights of the
policy, plays, and returns what it saw, did and got: tensors, which travel to the learner from worker to
worker. The actors play at the same time, as neither call waits.

The cart with a pole is written out here, so that nothing need be installed. An environment of gymnasium is
one line: `dr.remote(gymnasium.make)("CartPole-v1", node=1)`.
"""

import math

import torch
from torch import Tensor
from torch.func import functional_call

import distruntime as dr

LEARNER, ACTORS, CARTS, MOST, ROUNDS = 0, (1, 2), 4, 200, 15


def policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


class Cart:
    """A cart with a pole on it: [position, velocity, angle, angular velocity]."""

    def __init__(self, numbers: torch.Generator) -> None:
        self.state = ((torch.rand(4, generator=numbers) - 0.5) / 10).tolist()

    def step(self, push: int) -> bool:
        """Push left (0) or right (1); return whether the pole still stands."""
        x, v, angle, turn = self.state
        force = (10.0 if push else -10.0) + 0.05 * turn**2 * math.sin(angle)
        faster = (9.8 * math.sin(angle) - math.cos(angle) * force / 1.1) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        speed = force / 1.1 - 0.05 * faster * math.cos(angle) / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * faster]
        return bool(abs(self.state[0]) < 2.4 and abs(self.state[2]) < 0.21)


class Actor:
    """Plays with the weights that it is given."""

    def __init__(self, number: int) -> None:
        self.net, self.numbers = policy(), torch.Generator().manual_seed(number)

    def play(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the states, the pushes, and how long each episode went on after them; and the steps."""
        states, pushes, after, lengths = [], [], [], []
        for _ in range(CARTS):
            cart, steps = Cart(self.numbers), 0
            while steps < MOST:
                state = torch.tensor(cart.state)
                chances = functional_call(self.net, weights, state).softmax(0)
                push = int(torch.multinomial(chances, 1, generator=self.numbers))
                states.append(state)
                pushes.append(push)
                steps += 1
                if not cart.step(push):
                    break
            after += [float(steps - k) for k in range(steps)]
            lengths.append(float(steps))
        return torch.stack(states), torch.tensor(pushes), torch.tensor(after), torch.tensor(lengths)


if __name__ == "__main__":
    with dr.init_master_worker(world_size=3, quiet=True):
        learner = dr.place(LEARNER)
        net = policy().to(learner)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        actors = [dr.remote(Actor)(number, node=number) for number in ACTORS]
        for round_ in range(1, ROUNDS + 1):
            weights = {name: weight.detach() for name, weight in net.named_parameters()}
            there = [{n: w.to(dr.place(k)) for n, w in weights.items()} for k in ACTORS]
            # How many steps were played only the actor knows. `returns=object` does not wait for it, so that
            # both play; the parts are asked for below.
            played = [dr.remote(Actor.play, returns=object)(a, w) for a, w in zip(actors, there)]
            parts = [[part.to(learner) for part in one] for one in played]
            states, pushes, after, lengths = (torch.cat(part) for part in zip(*parts))
            score = (after - after.mean()) / (after.std() + 1e-6)
            chosen = net(states).log_softmax(1).gather(1, pushes[:, None])[:, 0]
            optimizer.zero_grad()
            (-(chosen * score).mean()).backward()
            optimizer.step()
            if round_ == 1 or round_ % 5 == 0:
                print(f"round {round_:<3} an episode lasts {lengths.mean().item():.1f} steps")
