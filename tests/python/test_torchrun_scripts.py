"""Scripts in the style of PyTorch's own examples run as they are under `distruntime run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distruntime import command_options
from distruntime.python import torchrun

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow(reason="each rank of a script imports torch, which takes two seconds of a core")


def run(line: str, script: Path, *arguments: str) -> int:
    flags = command_options.command_parser().parse_args(["run", *line.split(), "x.py"]).torchrun
    return torchrun.run_script(flags, str(script), arguments, False)


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (SCRIPTS / "ddp_toy.py", [], "rank 1] Finished running basic DDP example on rank 1."),
        (SCRIPTS / "fsdp2_toy.py", ["--steps", "4"], "rank 0] loss went down: True"),
        (SCRIPTS / "imagenet_style.py", ["--epochs", "2", "-b", "8"], "rank 0] Epoch: [1] Acc@1"),
        (EXAMPLES / "22_gpt_torchrun.py", [], "rank 0] step 30  loss"),
    ],
    ids=["ddp", "fsdp2", "imagenet", "gpt"],
)
def test_a_script_runs_as_it_is(
    session: Any, nurseries: None, capfd: Any, script: Path, arguments: list[str], says: str
) -> None:
    assert run("--nnodes 2 --nproc-per-node 1", script, *arguments) == 0
    assert says in capfd.readouterr().out


@pytest.mark.timeout(300)
def test_a_script_that_loses_a_rank_resumes(
    session: Any, nurseries: None, capfd: Any, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot.pt"
    given = "--nnodes 2 --max-restarts 1 --rdzv-id resumes"
    assert run(given, SCRIPTS / "resume.py", "4", str(snapshot), "--kill-at", "2") == 0
    out = capfd.readouterr().out
    assert out.count("Resuming training from snapshot at Epoch 2") == 2
    assert "[rank0] Epoch 3" in out and "[rank1] Epoch 3" in out
    assert "[rank1] Epoch 0" in out
