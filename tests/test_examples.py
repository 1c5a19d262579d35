"""The examples run as their docstrings say, and print what their docstrings show (figures apart)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import steps

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments: str, folder: Path, stdin: str = "") -> str:
    """Return what a Python process printed; fail with all of it where its status is not 0."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    quiet = {
        "IPYTHONDIR": str(folder),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }  # kernel threads get in each other's way in CI
    env = {**os.environ, "PYTHONPATH": path, **quiet}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(example: Path) -> str:
    """Return what stands between `python` and the example where its docstring says how to run it."""
    found = re.search(
        rf"^    \$ python (.*)examples/{example.name}", example.read_text(encoding="utf-8"), re.M
    )
    return found[1] if found else ""


def shown(example: Path) -> list[str]:
    """Return the output that an example's docstring shows: the indented lines after its command."""
    after = (
        example.read_text(encoding="utf-8")
        .partition(f"    $ python {command(example)}examples/{example.name}")[2]
        .partition("\n")[2]
    )
    lines = re.match(r"(?:    .*\n|\n(?=    ))*", after)
    assert lines is not None
    return [line[4:] for line in lines.group().rstrip().splitlines()]


def without_figures(lines: list[str]) -> list[str]:
    """Blank out what differs from run to run: numbers, and how close two sums are that were added up in
    another order.
    """
    lines = [line.replace("to the last bit", "within 0") for line in lines]
    return [re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "#", line)).strip() for line in lines]


# The demo, below, runs the other one.
ALONE = [example for example in EXAMPLES if example.stem != "02_digits"]
# These compare themselves with a serial program, so many times.
TWINS = {
    **dict.fromkeys(("06_data_parallel", "07_pipeline", "09_mesh", "10_tensor_parallel", "11_fsdp"), 1),
    **dict.fromkeys(("13_parameter_server", "17_cut_convolution", "19_all_together", "20_ddp"), 1),
    "24_state_in_shares": 1,
    "18_schedules": 2,
}
LONG = {
    "17_cut_convolution": "imports torch and starts two workers, 8 s of a processor",
    "09_mesh": "imports torch and starts four workers, 8 s of a processor",
    "08_own_channel": "imports torch and starts two workers, 8 s of a processor",
    "07_pipeline": "imports torch and starts two workers, 8 s of a processor",
    "06_data_parallel": "imports torch and starts two workers, 8 s of a processor",
    "05_streams": "imports torch and starts two workers, 8 s of a processor",
    "03_explore": "imports torch and starts a prompt and two workers, 8 s of a processor",
    "04_gpt": "trains a language model for 250 steps, 20 s of a core",
    "10_tensor_parallel": "trains a Llama that is cut over a mesh, 11.5 s in the suite",
    "11_fsdp": "trains a sharded model, 10.4 s in the suite",
    "20_ddp": "starts a rank of torch.distributed on each of two workers, 7 s",
    "21_fsdp_ranks": "starts two ranks of torch.distributed and imports FSDP2 in each, 10 s",
    "22_gpt_torchrun": "runs a script under torchrun, whose ranks import torch, 11 s",
    "12_data_there": "trains from a loader and from tensors, 5 s in the suite",
    "13_parameter_server": "trains over three workers and here, 7 s in the suite",
    "14_batched_inference": "starts workers and answers questions, 7 s in the suite",
    "15_actors": "plays fifteen rounds, 6 s of a core",
    "18_schedules": "trains on two workers and here, 5 s in the suite",
    "19_all_together": "trains on eight members of four workers, 20 s of a core",
    "23_own_launcher": "starts workers and kills some, 12 s of a processor",
    "24_state_in_shares": "imports torch's DTensor and starts a worker, 6 s of a core",
    "25_looking_inside": "imports torch and starts a worker, 5 s of a core",
    "16_sweep": "trains eight models, 8 s of a core",
}


def marked(example: Path) -> object:
    """Return an example as a parameter; one that takes long is marked."""
    slow = [pytest.mark.slow(reason=LONG[example.stem])] if example.stem in LONG else []
    return pytest.param(example, id=example.stem, marks=slow)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", [marked(example) for example in ALONE])
def test_an_example_prints_what_it_shows(example: Path, tmp_path: Path) -> None:
    printed = run(*command(example).split(), str(example), folder=tmp_path).rstrip().splitlines()
    assert shown(example), "the docstring shows no output"
    if example.stem == "04_gpt":  # what it writes differs from machine to machine
        printed, expected = (["".join(lines).partition("    def")[0]] for lines in (printed, shown(example)))
        assert without_figures(printed) == without_figures(expected)
    else:
        assert without_figures(printed) == without_figures(shown(example))
    apart = [line.partition(":")[2] for line in printed if line.startswith("largest difference:")]
    assert len(apart) == TWINS.get(example.stem, 0)
    assert all(
        float(figure) < 1e-5 for line in apart for figure in re.findall(r"\d[.\d]*(?:e[+-]?\d+)?", line)
    )


def check_digits(printed: str, folder: Path) -> None:
    accuracy = re.search(r"test accuracy ([\d.]+) %", printed)
    assert accuracy is not None and float(accuracy.group(1)) >= 97
    assert re.search(r"same losses as local: yes, (within \de-\d+|to the last bit)\)", printed)
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 150


def test_the_demo_of_a_wheel_is_the_example(tmp_path: Path) -> None:
    assert '"examples/02_digits.py" = "distruntime/demo.py"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )
    installed = tmp_path / "site" / "distruntime"
    shutil.copytree(ROOT / "distruntime", installed, ignore=shutil.ignore_patterns("__pycache__"))
    assert not (installed / "demo.py").exists()
    (installed / "demo.py").write_text("print('the demo of', __name__)", encoding="utf-8")
    command = "import sys; sys.path.insert(0, 'site'); from distruntime.__main__ import main; main(['demo'])"
    assert run("-c", command, folder=tmp_path) == "the demo of __main__\n"


@pytest.mark.slow(reason="trains the demo, 20 s")
def test_the_demo_runs_without_a_clone_in_mind(tmp_path: Path) -> None:
    printed = run("-m", "distruntime", "demo", folder=tmp_path)
    check_digits(printed, tmp_path)
    assert without_figures(printed.rstrip().splitlines()) == without_figures(
        shown(ROOT / "examples" / "02_digits.py")
    )


def test_the_readme_shows_what_the_demo_prints() -> None:
    (demo,) = [
        step
        for step in steps((ROOT / "README.md").read_text(encoding="utf-8"))
        if step.text.startswith("make test")
    ]
    # At a terminal, as there, the start and two bars come first.
    printed = shown(ROOT / "examples" / "02_digits.py")
    assert without_figures(demo.shows.splitlines()[-len(printed) :]) == without_figures(printed)


LINES = "x = torch.arange(4, device='remote')\nprint('sum', x.sum().item(), dr.is_initialized())\n"


def test_the_repl_has_a_session(tmp_path: Path) -> None:
    assert "sum 6 True" in run("-m", "distruntime", "repl", "--world-size", "1", folder=tmp_path, stdin=LINES)


@pytest.mark.slow(reason="starts a prompt and its workers, 8 s")
def test_the_repl_does_without_ipython(tmp_path: Path) -> None:
    start = (
        "import sys; sys.modules['IPython'] = None; from distruntime.__main__ import main; "
        "sys.exit(main(['repl', '--world-size', '1']))"
    )
    assert "sum 6 True" in run("-c", start, folder=tmp_path, stdin=LINES)


@pytest.mark.slow(reason="starts a prompt, 3 s")
def test_a_repl_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    command = [sys.executable, "-m", "distruntime", "repl", "nonsense://here"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.match(r"\w+: ", done.stderr) and "Traceback" not in done.stderr
