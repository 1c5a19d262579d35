import types

import torch
import transformers

import distruntime as dr


class CartPole:
    def __init__(self, name):
        self.name, self.steps = name, 0

    def reset(self, seed):
        torch.manual_seed(seed)
        return torch.rand(4), {}

    def step(self, action):
        self.steps += action
        return torch.rand(4), 1.0, False, False, {}


gym = types.SimpleNamespace(make=CartPole)
dr.init_master_worker(world_size=2)
x = torch.arange(4.0, device=dr.place(1))
# %% k, cfg = 5, {"lr": 1.0}
assert y.place == x.place
torch.testing.assert_close(y.cpu(), (x.cpu() - 1.5) / (x.cpu().std() + 1e-6))
# %% env = dr.remote(gym.make)("CartPole-v1", node=1)
torch.testing.assert_close(y.cpu(), x.cpu() * 7 * 0.1)
# %% net = dr.RemoteModule(transformers.GPT2LMHeadModel, config, node=1)
assert dr.fetch(env.steps) == 1 and tuple(observation.shape) == (4,) and dr.fetch(reward) == 1.0
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
# It would say which loss it takes.
dr.fetch(dr.remote(transformers.logging.set_verbosity_error)(node=1))
ids = torch.arange(8, device=dr.place(1))[None]
# %% the end
loss.backward()
optimizer.step()
assert loss.item() > 0
