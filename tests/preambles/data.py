import os
import types
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import distruntime as dr

warnings.filterwarnings("ignore", module="torch")
# Workers that load a model show a bar.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# This machine may have fewer cores than the loader has processes.
warnings.filterwarnings("ignore", "This DataLoader will create")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained("/models/llama")
Path("/models/mine").mkdir()
torch.save(torch.nn.Linear(8, 16).state_dict(), "/models/mine/weights.pt")
path = "/models/llama/model.safetensors"


def Model():
    return torch.nn.Linear(8, 16)


class MNIST(torch.utils.data.Dataset):
    def __init__(self, folder, transform):
        self.folder, self.transform = folder, transform

    def __len__(self):
        return 1000

    def __getitem__(self, k):
        return self.transform(k), k % 10


def ToTensor():
    return lambda k: torch.full((1, 28, 28), float(k))


torchvision = types.SimpleNamespace(datasets=types.SimpleNamespace(MNIST=MNIST))
dr.init_master_worker(world_size=2, simulate_cuda=4)
# %% mesh = dr.init_device_mesh("cuda", (8,))
assert len(weights) == len(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).state_dict())
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
members = dr.init_device_mesh("cuda", (8,))
for module in model.modules():
    for name, p in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(p.detach().to(members.device), members, [Shard(0)])
        setattr(module, name, torch.nn.Parameter(placed))
# %% from transformers import AutoModelForCausalLM
assert isinstance(model.lm_head.weight, DTensor)
# %% def digits():  # runs at the worker, where the folder lies
assert model.lm_head.weight.place.node == 1 and not model.training
# %% dr.save({"model": model, "loader": loader, "step": step}, path)
assert tuple(x.shape) == (1000 % 128, 1, 28, 28) and x.place == dr.place(1, "cuda:0")
model, step, path = torch.nn.Linear(8, 16).to(dr.place(1)), 7, "/data/going-on"
# %% from pathlib import Path
Path("model.pt").write_text("two", encoding="utf-8")
Path("/data/run7").mkdir()
Path("/data/run7/log.csv").write_text("three", encoding="utf-8")
# %% the end
assert (
    Path("/data/model.pt").read_text(encoding="utf-8") == "two"
    and Path("log.csv").read_text(encoding="utf-8") == "three"
)
