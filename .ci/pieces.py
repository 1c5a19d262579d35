"""Run one piece of the lanes that `make test` is too short for. Each commit has another one.

    python .ci/pieces.py            the piece whose turn it is
    python .ci/pieces.py NAME ...   these pieces, with the lot whose turn it is
    python .ci/pieces.py --all      every lot of every piece: hours
    python .ci/pieces.py --list     print them

A piece that takes longer than its limit has failed, and so has one that ends with another status than 0. One
that cannot run on this machine is skipped, and says why. What a piece prints is in `build/pieces/`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "pieces"
# `make ecosystem-some` and `make torch-tests` end with this where what they need cannot be downloaded. Make
# turns the status of what it runs into 2, so they say it in words.
CANNOT = "cannot run here: "
LIMIT = 720


class Piece(NamedTuple):
    """A command of bash, in which `{lot}` is another one of the lots each time the piece's turn comes.

    It has `limit` seconds.
    """

    name: str
    command: str
    lots: tuple[str, ...] = ("",)
    limit: int = LIMIT


def _parts(number: int) -> tuple[str, ...]:
    return tuple(f"{k}/{number}" for k in range(1, number + 1))


# Neighbours take turns from commit to commit, so each kind of lane comes up in every few commits.
PIECES = (
    Piece(
        "slow-tests",
        "make test ARGS='-m slow {lot}'",
        (
            "tests/launching tests/log tests/timeline",
            "tests/programs tests/collectives tests/test_benchmarks.py",
            "tests/python tests/worker tests/backend tests/torch_tests",
            "tests/cluster tests/publishing tests/hostile",
            "tests/layers tests/operators tests/test_tutorial.py tests/test_contributing.py",
            "tests/checkpoint tests/parallel tests/mesh",
            "tests/session tests/streams tests/tensors tests/testing tests/wire",
            "tests/torch_db tests/test_pages.py tests/test_cluster_box.py",
        ),
    ),
    Piece(
        "ecosystem",
        "make ecosystem-some LIBRARIES='{lot}'",
        (
            "accelerate peft trl transformers safetensors",
            "lightning torchmetrics pytorch-ignite skorch fastai",
            "timm kornia torchvision segmentation-models-pytorch pytorch-metric-learning",
            "diffusers open_clip_torch monai captum nnsight",
            "sentence-transformers x-transformers einops opt_einsum torchao vector-quantize-pytorch",
            "torch-geometric gpytorch botorch pyro-ppl torchdiffeq torchsde e3nn snntorch",
            "stable-baselines3 tensordict torchrl gymnasium",
            "schedulefree pytorch_optimizer ema-pytorch jaxtyping transformer-lens",
        ),
        # On two cores with a load of 25, installing took longer than 12 minutes.
        limit=1500,
    ),
    Piece("programs", "python tests/long/programs.py --programs 300 {lot}", (
        "--publish", "--publish --masters 2 --simulate-cuda 2", "--nodes 4 --threads 3",
    )),
    Piece("torch-tests", "make torch-tests ARGS='--part {lot}'", _parts(12)),
    Piece("examples", "make examples ARGS='-m slow'"),
    Piece("op-db-dtypes", "python tests/long/op_db_dtypes.py {lot}", (
        "float64", "float16 complex32", "bfloat16", "complex64", "complex128", "int64 int32", "int16 int8",
        "uint8 bool", "uint16 uint32 uint64", "float8_e4m3fn float8_e5m2",
    )),
    Piece("gpu", "python tests/gpu/checks --simulate-cuda 2 --quick --only {lot}", (
        "1 2 3 4 5 6 7 8", "9 10 11 12 13", "14 15 16 17 18 19", "20 21 22 23", "24 25 26 27 28",
    )),
    Piece("transformers", "python tests/long/transformers_many.py --part {lot}", _parts(30)),
    Piece("benchmarks", "make bench ARGS='--quick {lot}'", (
        "operation kinds issuing latency bandwidth streams", "training_step groups cut_convolution mesh",
        "pipeline overlap programs slow_programs", "growth", "scale startup distance survival strangers",
        "takeover functions timeline weights loader automatic_replay",
    )),
    Piece("long-tests", "pytest -q {lot}", (
        "tests/long/test_chaos.py", "tests/long/test_storm.py -k '0 or 1'",
        "tests/long/test_examples_of_four.py", "tests/long/test_million_operations.py",
    )),
    Piece("mutants", "python tests/long/mutants.py --part {lot}", _parts(6)),
    Piece("wrong-inputs", "python tests/long/{lot}.py", ("error_inputs", "mistakes")),
    Piece("hostile", "{lot}", (
        "python tests/long/fuzz_hour.py 120 1",
        "OMP_NUM_THREADS=1 python tests/long/chaos.py --seed 0 --faults 12",
        "python tests/long/test_cancelled_streams.py 60",
        "python tests/long/soak.py --minutes 3",
    )),
    Piece("cluster", "make cluster ARGS='{lot}'", (
        "loss jitter narrow reorder duplicate all-bad figures",
        "drop-2 drop-30 deaf-master mute-master to-master-30",
        "drop-2-dial drop-30-dial stopped stopped-master",
        "workers-2 workers-30 workers-one-way-30 workers-cut vanished",
        "nat nat-drop-30 nat-dial two-racks mtu",
        "two-interfaces two-interfaces-dial own-names names-differ dead-dns",
        "ipv6 ipv6-names ipv6-dial one-port two-ports two-ports-spmd three",
    )),
    Piece("cluster-chaos", "make cluster ARGS='{lot}'", ("--chaos 80", "--soak 8")),
    Piece("recorded", "OMP_NUM_THREADS=1 python tests/long/recorded.py --programs 20 --calls 25"),
    Piece("compiled", "OMP_NUM_THREADS=1 python tests/long/compiled.py --functions 40"),
    Piece("machines", "make test-machines ARGS='{lot}'", (
        "old-processor small-shm", "one-core", "busy", "user", "home no-ipv6", "language", "ascii", "path",
        "settings",
    )),
    Piece("accelerator-programs", "make accelerator ARGS='--programs 200 -k random_programs'"),
)  # fmt: skip


def turn() -> int:
    """Return a number that is another one at the next commit: how many there are, or else the day."""
    try:
        shallow, count = (
            subprocess.run(
                ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
            for words in (["rev-parse", "--is-shallow-repository"], ["rev-list", "--count", "HEAD"])
        )
    except (OSError, subprocess.CalledProcessError):
        shallow, count = "true", ""
    return int(count) if shallow == "false" else int(time.time() // 86400)


def end_with_its_own(process: int) -> None:
    """Kill a process with all that descend from it: some have sessions of their own."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [process]
    # Each child stands behind its parent when this comes to it.
    for parent in found:
        found += [pid for pid, of in pairs if of == parent]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(piece: Piece, lot: str) -> bool:
    """Run a piece with one of its lots; print what became of it. Return whether it has not failed."""
    command = piece.command.format(lot=lot)
    print(f"piece {piece.name}: {command}", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{piece.name}.txt"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "worker"), str(ROOT / "tests" / "help")])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "PATH": programs},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(piece.limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                end_with_its_own(process.pid)
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    reason = next((line for line in text.splitlines() if line.startswith(CANNOT)), "")
    if status == 0:
        told = "ok"
    elif reason:
        told = f"skipped, {reason}"
    elif status is None:
        told = f"FAILED: it was not over after {piece.limit} s"
    else:
        told = f"FAILED with status {status}"
    if told.startswith("FAILED"):
        print(*text.splitlines()[-60:], sep="\n")
    print(f"piece {piece.name}: {told}, {time.monotonic() - began:.0f} s, see {log.relative_to(ROOT)}")
    return not told.startswith("FAILED")


def chosen(names: Sequence[str], everything: bool, now: int) -> list[tuple[Piece, str]]:
    """Return what runs. Each lap over the pieces takes the next lot of each."""
    lap, k = divmod(now, len(PIECES))
    pieces = [piece for piece in PIECES if not names or piece.name in names]
    if everything:
        return [(piece, lot) for piece in pieces for lot in piece.lots]
    return [(piece, piece.lots[lap % len(piece.lots)]) for piece in (pieces if names else [PIECES[k]])]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(piece.name for piece in PIECES))
    parser.add_argument("--all", action="store_true", help="every lot of every piece, or of these")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--turn", type=int, help="a number in the place of that of the commits")
    options = parser.parse_args()
    if unknown := set(options.names) - {piece.name for piece in PIECES}:
        parser.error(f"there is no piece {', '.join(sorted(unknown))}")
    if options.list:
        for piece in PIECES:
            for lot in piece.lots:
                print(f"{piece.name}: {piece.command.format(lot=lot)}")
        return 0
    # Who ends this must not leave the piece behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    now = turn() if options.turn is None else options.turn
    return 0 if all([run(piece, lot) for piece, lot in chosen(options.names, options.all, now)]) else 1


if __name__ == "__main__":
    sys.exit(main())
