import pickle

import torch
from torch import nn

import distruntime as dr


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dr.init_master_worker(world_size=1)
model = Net().to("remote")
x = torch.randn(512, 64, device="remote")


# %% import tempfile
@dr.remote
def pretend():
    """Let a worker without a GPU write a snapshot."""

    def dump(name):
        with open(name, "wb") as file:
            pickle.dump({"segments": [], "device_traces": [[]]}, file)

    torch.cuda.memory._dump_snapshot, torch.cuda.memory._record_memory_history = dump, lambda: None


pretend(node=0)
# %% the end
assert pickle.loads(Path("x.pickle").read_bytes())["segments"] == []
assert {*time_layers(model, x)} == {"", "blocks.0", "blocks.0.up", "blocks.0.act", "blocks.0.down", "head"}
try:
    with FirstNaN():
        torch.sqrt(x - 9.0).sum()
except FloatingPointError as error:
    assert str(error) == "aten.sqrt.default was the first to give NaN"
else:
    raise AssertionError("no NaN was found")
assert sum(isinstance(m, nn.SiLU) for m in model.modules()) == 1
