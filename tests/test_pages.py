"""The blocks of the README and of docs/ run, and print what the pages show."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distruntime.wire.keys import KeyPair
from pages import Step, follow, of_any_machine, programs, steps
from processes import ROOT, ListeningWorker, free_port

PREAMBLES = ROOT / "tests" / "preambles"
# tests/test_tutorial.py follows the tutorial, through real sshds.
TEXTS = {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
PAGES = {page: steps(path.read_text(encoding="utf-8")) for page, path in TEXTS.items() if page != "tutorial"}
# Steps that cannot run here: the page, how the step's first line begins (`$` is its end), and the reason.
NOT_HERE = [
    ("README", "pip install .       #", "it would install into the environment of the tests"),
    ("README", "python$", "the steps below it are what one types there"),
    ("README", 'dr.init_master_worker(workers=["ssh://', "the machines gpubox and gpubox2"),
    ("README", 'dr.init_master_worker(workers=["tcp://', "the daemons of gpu1 and gpu2"),
    ("README", "make ", "it makes an environment; test_examples.py runs the demo"),
    ("README", "pip install . --extra-index-url", "it would install into the environment of the tests"),
    ("launching", "dr.init_master_worker(listen=", "eight machines that dial"),
    ("launching", "distruntime-worker --master tcp://here", "the machine that it dials"),
    ("gpu", "make gpu", "a GPU"),
    ("launching", "salloc ", "a cluster of Slurm; tests/launching/test_slurm.py has one"),
    ("launching", "mpirun ", "MPI; tests/launching/test_launch.py plays its part"),
    ("launching", "distruntime-worker keygen key && kubectl", "a cluster of Kubernetes"),
    ("launching", "kubectl ", "a cluster of Kubernetes"),
    (
        "launching",
        "from distruntime.launching.ray_actors",
        "a cluster of Ray; tests/launching/test_ray.py has one",
    ),
    ("service", "cp ", "the folder of systemd"),
    ("service", "systemctl ", "systemd"),
    ("service", "podman ", "Podman"),
    ("spmd", "python -m distruntime run --workers", "two machines with GPUs"),
    ("ssh", "import distruntime as dr", "the machine gpubox; tests/launching/test_ssh.py has one"),
]
# The figures of these steps differ, and so do their units: what stands before them counts.
FIGURES = ("python -m distruntime comm ",)
# The tests of these pages are quick ones. All pages together take minutes.
QUICK = ("README", "async", "checkpoints", "groups", "layers", "meshes", "pipelines", "primitives", "testing")


def has(step: Step, begin: str) -> bool:
    """Whether a line of the step begins so."""
    return any(line.startswith(begin) for line in step.text.splitlines())


def preamble(page: str) -> dict[str, str]:
    """Return the code that comes before steps of a page, by the line that names the step.

    It is what the page expects its reader to have, and checks of what the steps have done. A cell of a
    preamble begins with `# %%` and the first line of the step that it comes before, or with "the end". What
    stands above the first cell comes before the first step.
    """
    path = PREAMBLES / f"{page}.py"
    first, *cells = re.split(r"^# %% ", path.read_text(encoding="utf-8") if path.exists() else "", flags=re.M)
    found = dict(cell.split("\n", 1) for cell in cells)
    assert len(found) == len(cells)
    return {"the begin": first, "the end": "", **found}


def listed(step: Step, begin: str) -> bool:
    """Whether the step's first line begins so."""
    return f"{step.text.splitlines()[0]}$".startswith(begin)


def left_out(page: str, step: Step) -> bool:
    return any(page == where and listed(step, begin) for where, begin, _ in NOT_HERE)


def runnable() -> Iterator[object]:
    for page, found in PAGES.items():
        if any(not left_out(page, step) for step in found):
            marks = [] if page in QUICK else [pytest.mark.slow(reason="all pages together take minutes")]
            yield pytest.param(page, id=page, marks=marks)


def agree(step: Step, printed: str) -> bool:
    shown = step.shows
    if step.text.startswith(FIGURES):
        # A column is as wide as its figures.
        begins = [
            {" ".join(re.split(r"\d", line)[0].split()) for line in text.splitlines()}
            for text in (shown, printed)
        ]
        return begins[0] <= begins[1]
    return doctest.OutputChecker().check_output(
        "\n".join(of_any_machine(shown)), "\n".join(of_any_machine(printed)), doctest.ELLIPSIS
    )


class StandIns:
    """What stands here for the machines and the folders that a page names, by their names."""

    def __init__(self, text: str, folder: Path) -> None:
        self._running = ExitStack()
        self._names = {"tcp://0.0.0.0:29400": f"tcp://127.0.0.1:{free_port()}", "/home/ann": str(folder)}
        for name in ("data", "models"):
            self._names[f"/{name}/"] = f"{folder}/{name}/"
            (folder / name).mkdir()
        for address in sorted(set(re.findall(r"tcp://gpu\w+:29400", text))):
            self._names[address] = self._daemon(folder, address.split(":")[1].strip("/"))

    def _daemon(self, folder: Path, name: str) -> str:
        key = folder / ".config" / "distruntime" / "key"
        if not key.exists():
            key.parent.mkdir(parents=True)
            KeyPair.generate().save(key)
        (folder / name).mkdir()
        worker = ListeningWorker(folder / name, "--listen", "tcp://127.0.0.1:0", "--key", str(key))
        self._running.callback(worker.stop)
        return worker.address

    def __enter__(self) -> StandIns:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def here(self, text: str) -> str:
        for name, ours in self._names.items():
            text = text.replace(name, ours)
        return text

    def there(self, text: str) -> str:
        for name, ours in self._names.items():
            text = text.replace(ours, name)
        return text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", list(runnable()))
def test_a_page_shows_what_its_blocks_print(page: str, tmp_path: Path) -> None:
    before = preamble(page)
    todo = [step for step in PAGES[page] if not left_out(page, step)]
    every = [Step("exec", before.pop("the begin"), "")]
    end = Step("exec", before.pop("the end"), "")
    for step in todo:
        every += [Step("exec", code, "") for line, code in before.items() if has(step, line)]
        every.append(step)
    every.append(end)
    # A page that does not show how its sessions begin has them begin in silence.
    quiet = "" if any("new tensors go to" in step.shows for step in todo) else "1"
    with StandIns("\n".join(step.text for step in todo), tmp_path) as names:
        ours = [Step(step.kind, names.here(step.text), step.shows) for step in every]
        path = programs(tmp_path / "programs")
        printed = [names.there(text) for text in follow(ours, tmp_path, PATH=path, DISTRUNTIME_QUIET=quiet)]
    for step, text in zip(every, printed, strict=True):
        # What a block prints with no text below it is nobody's promise.
        if step in todo and (step.shows or "print(" not in step.text):
            assert agree(step, text), f"{step.text}\nprinted:\n{text}\nshown:\n{step.shows}"


@pytest.mark.parametrize("page", PAGES)
def test_each_block_of_a_page_is_found(page: str) -> None:
    text = TEXTS[page].read_text(encoding="utf-8")
    blocks = re.findall(r"^ *(?:```|~~~) *(?:python|py|pycon|console|bash|sh|shell)\b", text, re.M)
    assert len(blocks) == len(re.findall(r"^```(?:python|pycon|console)$", text, re.M))


def test_the_list_of_what_is_left_out_is_not_stale() -> None:
    for page, begin, reason in NOT_HERE:
        assert reason and any(listed(step, begin) for step in PAGES[page]), (page, begin)


def test_the_preambles_are_not_stale() -> None:
    for path in PREAMBLES.glob("*.py"):
        for line in preamble(path.stem):
            named = sum(has(step, line) for step in PAGES[path.stem])
            assert named == 1 or line in ("the begin", "the end"), (path.name, line)
