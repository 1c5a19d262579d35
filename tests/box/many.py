"""The program of many workers, as the master: it computes on all of them, loses half and gets others, or goes
on on another host. It says whether all is what it must be, and what it took.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import torch

import distruntime as dr
from processes import until

# Workers import torch one after the other where a machine plays many hosts.
STARTING = 900.0
# So many numbers has a tensor, and so many workers are in a group.
NUMBERS, TOGETHER = 1000, 8


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def wrong() -> str:
    """Return what workers compute that they must not; nothing if all is right.

    Each computes by itself, in a group of eight and with a copy to the next one. A group of all is beyond
    what one process can forward for them as their network: each of 64 would meet 63.
    """
    places = [dr.place(node.index, "cpu") for node in dr.nodes()]
    local = [torch.arange(NUMBERS) + k for k in range(len(places))]
    there = [one.to(place) * 2 for one, place in zip(local, places)]
    moved = [one.to(place) for one, place in zip(there, places[1:] + places[:1])]
    if not all(torch.equal(one.cpu(), own * 2) for one, own in zip(moved, local)):
        return "a copy from a worker to the next one"
    # The members of a group are on as many hosts as there are.
    step = len(places) // TOGETHER
    for k in range(step):
        group = dr.distributed.new_group(places[k::step])
        dr.distributed.all_reduce(there[k::step], group=group)
        wanted = sum(local[k::step]) * 2
        if not all(torch.equal(one.cpu(), wanted) for one in there[k::step]):
            return f"a sum of {TOGETHER} workers"
        group.close()
    return ""


def ends() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def away() -> list[int]:
    return [node.index for node in dr.nodes() if node.state not in ("ready", "busy")]


def lose(nodes: list[int]) -> str:
    """Have these workers killed, and wait for those in their place; return what is wrong."""
    kept = [torch.ones(3, device=dr.place(node, "cpu")) for node in nodes]
    # Whoever calls a function without a kind of result waits for what it returns.
    began = time.monotonic()
    asked = [dr.remote(ends, node=node, returns=object)() for node in nodes]
    for node, one in zip(nodes, kept):
        try:
            one.cpu()
            return f"node {node} was killed, and what it had can be read"
        except dr.errors.NodeFailed as error:
            if f"node {node} " not in str(error):
                return f"the loss of node {node} is told as {error}"
    del asked
    until(lambda: not away(), STARTING)
    say(replaced=round(time.monotonic() - began, 1))
    return ""


def memory() -> list[float]:
    """Return the resident memory of this process and of the largest worker, in MiB."""

    def resident() -> float:
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(file.read().partition("VmRSS:")[2].split()[0]) / 1024

    there = [dr.remote(resident, node=node.index, returns=object)() for node in dr.nodes()]
    return [round(resident()), round(max(dr.fetch(there)))]


def trust(host: str) -> None:
    """Let the user there open what this one has published."""
    key = subprocess.run(
        [sys.executable, "-m", "distruntime", "key"], stdout=subprocess.PIPE, check=True
    ).stdout
    there = "mkdir -p .config/distruntime && cat >> .config/distruntime/trusted-keys"
    subprocess.run(["ssh", host, f"cd && {there}"], input=key, check=True)


def main(options: dict[str, Any]) -> str:
    torch.set_num_threads(1)
    began = time.monotonic()
    dr.init_master_worker(timeout=STARTING, quiet=True, **options["begin"])
    nodes = dr.nodes()
    say(at="round 0", nodes=len(nodes), hosts=len({node.host for node in nodes}))
    say(began=round(time.monotonic() - began, 1))
    began = time.monotonic()
    if options.get("resumed"):
        return "" if dr.lookup("kept").sum().item() == sum(range(NUMBERS)) else "what was published differs"
    if found := wrong():
        return found
    say(computed=round(time.monotonic() - began, 1), memory=memory())
    if options.get("lose"):
        if found := lose([node.index for node in nodes[-options["lose"] :]]):
            return found
        return wrong()
    if options.get("move"):
        dr.publish("kept", torch.arange(NUMBERS).to(dr.place(len(nodes) - 1, "cpu")))
        dr.detach()
        trust(str(options["move"]))
        again = {**options, "resumed": True, "begin": {**options["begin"], "resume": True}}
        began = time.monotonic()
        words = ["ssh", options["move"], "python3", os.path.abspath(__file__), shlex.quote(json.dumps(again))]
        there = subprocess.run(words, capture_output=True, text=True)
        say(moved=round(time.monotonic() - began, 1))
        return "" if '{"result": "right"}' in there.stdout else f"{there.stdout}\n{there.stderr}"
    return ""


if __name__ == "__main__":
    try:
        found = main(json.loads(sys.argv[1]))
        if dr.is_initialized():
            dr.shutdown()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    say(**({"failed": found} if found else {"result": "right"}))
