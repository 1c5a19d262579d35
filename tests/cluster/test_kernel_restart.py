"""Restart the kernel, keep the model: a prompt that is killed, and the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.cluster import named_sessions as registry
from processes import PATH

# Each has 2048 x 2048 numbers: together 1 GB.
LAYERS = 64

FIRST = f"""
import os, signal, torch, distruntime as dr
session = dr.init_master_worker(backend="zmq", session="sae", world_size=1)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range({LAYERS}))
        self.tied = self.layers[0]
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

with torch.device("remote"):
    model = Net()

x = torch.arange(2048, device="remote").float() / 2048
dr.publish("net", model)
unpublished = torch.ones(1000, 1000, device="remote")
model(x).double().sum().item().hex()
sum(p.double().sum() for p in model.parameters()).item().hex()
os.kill(os.getpid(), signal.SIGKILL)
"""

SECOND = """
import time, torch, distruntime as dr
started = time.perf_counter()
session = dr.init_master_worker(backend="zmq", session="sae", resume=True)
model = dr.lookup("net")
x = torch.arange(2048, device="remote").float() / 2048
model(x).double().sum().item().hex()
sum(p.double().sum() for p in model.parameters()).item().hex()
model.tied is model.layers[0], len(model.state_dict()), type(model).__name__
dr.names()
dr.lookup("nett")
from distruntime.wire.messages import AskMemory
from distruntime.session.session import active_session
session = active_session()
session.value(session.ask(session.nodes[0], AskMemory)).values < 80
dr.shutdown()
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable, name in (
        ("STATE", "state"),
        ("SIGNING_KEY", "signing-key"),
        ("TRUSTED_KEYS", "trusted-keys"),
    ):
        monkeypatch.setenv(f"DISTRUNTIME_{variable}", str(tmp_path / name))
    dr.shutdown()
    yield
    if registry.names():  # only where the test has failed
        dr.init_master_worker(session="sae", resume=True, force=True)
        dr.shutdown()


def at_a_prompt(lines: str) -> tuple[int, list[str], str]:
    """Type lines at Python's prompt; return how it ended, what it showed, and what it complained of."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(PATH),
        "OMP_NUM_THREADS": "1",
        "PYTHONSTARTUP": "",
    }
    done = subprocess.run(
        [sys.executable, "-i", "-q", "-u", "-c", ""],
        input=lines,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow(reason="three prompts start as programs, one after the other: 11.9 s")
def test_a_killed_prompt_costs_nothing_that_was_published() -> None:
    ended, first, complaints = at_a_prompt(FIRST)
    assert ended == -signal.SIGKILL, complaints
    ended, second, complaints = at_a_prompt(SECOND)
    assert ended == 0, complaints
    assert len(first) == 2 and second[:2] == first  # bit for bit
    assert second[2] == f"(True, {LAYERS + 1}, 'Net')"
    assert second[3].split() == ["name", "what", "bytes", "places", "shared", "owner"]
    assert " ".join(second[4].split()) == "net Net, 268.4 M parameters 1.0 GiB node 0 cpu no sae"
    assert second[5] == "True" and len(second) == 6  # what nobody had published is free
    assert "UsageError: nothing is published as 'nett': there is net" in complaints
