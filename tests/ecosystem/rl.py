"""Libraries of reinforcement learning."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import torch
from torch import nn

from cases import case


@case("stable-baselines3", "PPO on CartPole without device=: learn, save, load, predict", tolerance=1e-3)
def stable_baselines(device: str) -> dict[str, object]:
    import gymnasium
    from stable_baselines3 import PPO

    model = PPO(
        "MlpPolicy",
        gymnasium.make("CartPole-v1"),
        n_steps=32,
        batch_size=16,
        n_epochs=2,
        seed=0,
        policy_kwargs={"net_arch": [8]},
    )
    torch.manual_seed(0)
    model.learn(64)
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "agent"))
        loaded = PPO.load(os.path.join(folder, "agent"))
    action, _ = loaded.predict(np.zeros(4, dtype=np.float32), deterministic=True)
    return {"action": action, "weight": loaded.policy.action_net.weight}


@case("gymnasium", "an environment that lives on the worker: dr.remote(gymnasium.make)")
def environment(device: str) -> dict[str, object]:
    import gymnasium

    import distruntime as dr

    there = device != "cpu"
    env = dr.remote(gymnasium.make)("CartPole-v1", node=0) if there else gymnasium.make("CartPole-v1")

    def read(x: object) -> tuple[object, ...]:
        return dr.fetch(x) if there else x  # type: ignore[return-value]

    policy = nn.Linear(4, 2).to(device)
    seen, (observation, _) = [], read(env.reset(seed=3))
    for _ in range(20):
        action = int(policy(torch.as_tensor(observation).to(device)).argmax())
        observation, reward, ended, *_ = read(env.step(action))
        seen.append([*map(float, observation), float(reward)])  # type: ignore[call-overload, arg-type]
        if ended:
            observation, _ = read(env.reset(seed=4))
    env.close()
    return {"seen": seen, "weight": policy.weight}


@case("tensordict", "TensorDict: stack, index, .to, TensorDictModule, memory-mapped on disk")
def tensordict(device: str) -> dict[str, object]:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    data = TensorDict({"x": torch.randn(4, 3), "y": {"z": torch.arange(4)}}, batch_size=[4]).to(device)
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["out"]).to(device)
    stacked = torch.stack([data, module(data.clone()).select("x", "y")])
    with tempfile.TemporaryDirectory() as folder:
        data.cpu().memmap(folder)
        loaded = TensorDict.load_memmap(folder).to(device)
    return {
        "out": module(data)["out"],
        "stacked": stacked["x"].sum(0),
        "part": data[1:3]["y", "z"],
        "loaded": loaded["x"],
    }


@case("torchrl", "a probabilistic actor, GAE, ClipPPOLoss, a replay buffer", tolerance=1e-3)
def torchrl(device: str) -> dict[str, object]:
    from tensordict import TensorDict
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()).to(device)
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(3, 1).to(device), in_keys=["observation"])
    following = {
        "observation": torch.randn(8, 3),
        "reward": torch.randn(8, 1),
        "done": torch.zeros(8, 1, dtype=torch.bool),
        "terminated": torch.zeros(8, 1, dtype=torch.bool),
    }
    data = TensorDict({"observation": torch.randn(8, 3), "next": following}, [8]).to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        data = actor(data)
        GAE(gamma=0.9, lmbda=0.9, value_network=critic)(data)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, device=device), batch_size=8)
    buffer.extend(data)
    losses = ClipPPOLoss(actor, critic)(data)
    sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
    return {
        "advantage": data["advantage"],
        "loss": losses["loss_objective"],
        "gradient": net[0].weight.grad,
        "sampled": buffer.sample().shape,
    }
