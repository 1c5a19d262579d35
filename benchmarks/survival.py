"""What a session survives, and how fast: a restarted master with a gigabyte of weights, a worker that dies
beside others.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch

import distruntime as dr

from . import floors
from .harness import ROOT, Figure

_FIRST = """
import os, signal, sys, torch, distruntime as dr
dr.init_master_worker(session="survival", world_size=1, quiet=True)
with torch.device("remote"):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(int(sys.argv[1]))))
dr.publish("model", model)
model(torch.ones(1, 2048, device="remote")).sum().item()
os.kill(os.getpid(), signal.SIGKILL)
"""

_SECOND = """
import json, time, torch, distruntime as dr
started = time.perf_counter()
dr.init_master_worker(session="survival", resume=True, quiet=True)
attached = time.perf_counter()
model = dr.lookup("model")
found = time.perf_counter()
model[0].weight[0, 0].item()
read = time.perf_counter()
model(torch.ones(1, 2048, device="remote")).sum().item()
print(json.dumps([attached - started, found - attached, read - found, time.perf_counter() - read]))
dr.shutdown()
"""


def _python(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    ).stdout


def _resume(layers: int) -> Figure:
    """Return what passes from a new master's first line to its first value of a model that a killed one had
    published, beside what it takes to import torch.
    """
    _python(_FIRST, str(layers))
    floor = floors.import_torch()
    attach, lookup, first, forward = json.loads(_python(_SECOND).splitlines()[-1])
    nbytes = layers * 2048 * 2048 * 4 / 2**30
    parts = f"attach {attach:.2f} s, lookup {lookup:.2f} s, first value {first:.2f} s"
    note = f"{parts}; then a forward pass, {forward:.2f} s; import torch {floor:.2f} s"
    name = f"a killed master's model of {nbytes:.2f} GiB, in a new one / import torch alone"
    return Figure(name, (attach + lookup + first) / floor, "x", 1.0, note)


def _death(seconds: float) -> list[Figure]:
    """Return how long a worker's death takes to be an error of what was on it, and what it costs two others
    that work beside it.
    """
    with floors.pipe() as pipe, dr.init_master_worker(world_size=3, quiet=True):
        xs = []
        for node in range(3):
            with dr.on(node):
                xs.append(torch.zeros(64, device="remote"))
        counts, ends, stop = [0, 0, 0], [0.0, 0.0, 0.0], threading.Event()

        def work(node: int) -> None:
            try:
                while not stop.is_set():
                    for _ in range(50):
                        xs[node].add_(1)
                    xs[node][0].item()
                    counts[node] += 50
            except dr.errors.NodeFailed:
                ends[node] = time.perf_counter()

        threads = [threading.Thread(target=work, args=(node,)) for node in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        start = list(counts)
        time.sleep(seconds)
        before = [(counts[k] - start[k]) / seconds for k in (0, 2)]
        pid = dr.nodes()[1].pid
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        start = list(counts)
        time.sleep(seconds)
        after = [(counts[k] - start[k]) / seconds for k in (0, 2)]
        # The other two are still at work.
        floor = pipe.death()
        stop.set()
        for thread in threads:
            thread.join()
    ratio, until = sum(after) / sum(before), ends[1] - killed
    return [
        Figure(
            "a worker's death, until it is an error / until a bare pipe ends",
            until / floor,
            "x",
            10.0,
            f"kill -9 of one of three under load: {until * 1e3:.1f} ms, pipe {floor * 1e3:.1f} ms",
        ),
        Figure(
            "the other two after it / before",
            ratio,
            "x",
            0.9,
            f"{sum(after):,.0f} operations a second, {sum(before):,.0f} before",
            most=False,
        ),
    ]


def measure(quick: bool) -> list[Figure]:
    """Return the figures; the session is noted in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for variable, name in (
            ("STATE", "state"),
            ("SIGNING_KEY", "signing-key"),
            ("TRUSTED_KEYS", "trusted-keys"),
        ):
            os.environ[f"DISTRUNTIME_{variable}"] = f"{folder}/{name}"
        resumed = [_resume(64) for _ in range(1 if quick else 3)]
    middle = statistics.median(figure.value for figure in resumed)
    return [next(figure for figure in resumed if figure.value == middle), *_death(2.0 if quick else 5.0)]
