"""An error tells how the program came to the line that issued the instruction, the outermost call first."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from agree import REMOTE
from distruntime.log.line import of_a_library, user_line

ROOT = Path(__file__).resolve().parents[2]


def lines_of(poisoned: torch.Tensor) -> list[str]:
    """Return the sources that a poisoned value's error names, as "called from f(x)" and "issued at g(x)"."""
    with pytest.raises(IndexError) as caught:
        poisoned.cpu()
    found = re.findall(r"^  (called from|issued at) (.+):\d+   (.+)$", str(caught.value), re.M)
    assert {os.path.basename(name) for _, name, _ in found} == {"test_called_from.py"}
    return [f"{what} {source}" for what, _, source in found]


def pick(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([7], device=REMOTE)]


def by_way_of(x: torch.Tensor) -> torch.Tensor:
    return pick(x)


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_way_of(x)


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return self.inner(x)


ISSUED = "issued at return x[torch.tensor([7], device=REMOTE)]"


@pytest.fixture
def x(session: object) -> torch.Tensor:
    return torch.arange(3.0, device=REMOTE)


def test_the_calls_through_modules_are_named_and_torchs_are_not(x: torch.Tensor) -> None:
    model = Outer()
    for _ in range(3):  # the first time every signature is new
        poisoned = model(x)
        assert lines_of(poisoned) == [
            "called from poisoned = model(x)",
            "called from return self.inner(x)",
            "called from return by_way_of(x)",
            "called from return pick(x)",
            ISSUED,
        ]


def test_each_call_of_a_function_has_its_own_callers(x: torch.Tensor) -> None:
    def this_way() -> torch.Tensor:
        return by_way_of(x)

    def that_way() -> torch.Tensor:
        return by_way_of(x)

    made = []
    for _ in range(20):  # Python uses a frame's memory again at once
        made.append((this_way(), "called from made.append((this_way(), "))
        one = that_way()
        two = by_way_of(x)
        made += [(one, "called from one = that_way()"), (two, "called from two = by_way_of(x)")]
    for poisoned, expected in made:
        found = lines_of(poisoned)
        assert found[0].startswith(expected) and found[-2:] == ["called from return pick(x)", ISSUED]
        assert len(found) == (3 if "two" in expected else 4)


def test_a_generator_is_called_by_whoever_goes_on_with_it(x: torch.Tensor) -> None:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield pick(x)

    steps = endless()

    def one() -> torch.Tensor:
        return next(steps)

    def another() -> torch.Tensor:
        return next(steps)

    for _ in range(2):
        first = one()
        second = another()
        third = next(steps)
        assert lines_of(first) == [
            "called from first = one()",
            "called from return next(steps)",
            "called from yield pick(x)",
            ISSUED,
        ]
        assert lines_of(second)[0] == "called from second = another()"
        assert lines_of(third)[:2] == ["called from third = next(steps)", "called from yield pick(x)"]


def test_coroutines_are_named(x: torch.Tensor) -> None:
    async def inner() -> torch.Tensor:
        await asyncio.sleep(0)
        return by_way_of(x)

    async def outer() -> list[str]:
        return lines_of(await inner())

    assert asyncio.run(outer())[-4:] == [
        "called from return lines_of(await inner())",
        "called from return by_way_of(x)",
        "called from return pick(x)",
        ISSUED,
    ]


def test_a_deep_recursion_is_folded(x: torch.Tensor) -> None:
    def down(n: int) -> torch.Tensor:
        return down(n - 1) if n else pick(x)

    for deep in (30, 300):
        with pytest.raises(IndexError, match=r"\n  \(\d+ more calls\)\n") as caught:
            down(deep).cpu()
        assert len(str(caught.value).splitlines()) < 22


def test_calls_of_libraries_are_folded(x: torch.Tensor) -> None:
    made: list[torch.Tensor] = []

    json.loads("[1]", parse_int=lambda text: made.append(pick(x)))
    with ThreadPoolExecutor(1) as pool:
        made.append(pool.submit(by_way_of, x).result())
    with pytest.raises(IndexError) as caught:
        made[0].cpu()
    text = re.sub(r" /.*/", " ", re.sub(r":\d+ ", ":N ", str(caught.value)))
    assert (
        "  called from test_called_from.py:N   json.loads("
        '"[1]", parse_int=lambda text: made.append(pick(x)))\n'
        "  (3 calls in libraries)\n"
        "  called from test_called_from.py:N   json.loads("
    ) in text
    assert lines_of(made[1]) == ["called from return pick(x)", ISSUED]  # nobody of the user's has called it


def test_a_traced_program_is_traced_as_before(x: torch.Tensor) -> None:
    seen: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if os.path.basename(frame.f_code.co_filename) == "test_called_from.py":
            seen.append(f"{event} {frame.f_code.co_name}")
        return trace

    before = sys.gettrace()

    def traced() -> list[torch.Tensor]:
        found = [by_way_of(x)]  # this frame is known now
        sys.settrace(trace)
        try:
            found.append(by_way_of(x))
            found.append(by_way_of(x))
        finally:
            sys.settrace(before)
        return [*found, by_way_of(x)]

    sys.settrace(None)
    try:
        made = traced()
    finally:
        sys.settrace(before)
    assert seen.count("line pick") == seen.count("return pick") == 2
    for poisoned in made:
        found = lines_of(poisoned)
        assert found[0] == "called from made = traced()" and found[-2:] == [
            "called from return pick(x)",
            ISSUED,
        ]


def test_what_a_function_held_is_let_go_when_it_returns(x: torch.Tensor) -> None:
    class Held:
        pass

    def hold() -> tuple[torch.Tensor, weakref.ref[Held]]:
        held = Held()
        return pick(x), weakref.ref(held)

    gc.disable()
    try:
        poisoned, held = hold()
        assert held() is None
    finally:
        gc.enable()
    assert len(lines_of(poisoned)) == 3


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in CELLS:
    done = shell.run_cell(cell, store_history=True, silent=False)
    assert done.success, cell
"""


@pytest.mark.slow(reason="starts a prompt, 10 s")
def test_a_cell_of_ipython_is_named_by_its_number(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = [
        "import torch, distruntime as dr; session = dr.init_master_worker(world_size=1, quiet=True)",
        "def pick(x):\n    return x[torch.tensor([7], device='remote')]",
        "y = torch.ones(3, device='remote')\nz = pick(y)",
        "try:\n    z.cpu()\nexcept IndexError as error:\n    print(error)",
        "print(z)",
        "print(dr.memory())\ntry:\n    dr.shutdown()\nexcept IndexError:\n    pass",
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    ran = subprocess.run(
        [sys.executable, "-c", f"CELLS = {cells!r}\n{CELLS}"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "  called from In[3]:2   z = pick(y)\n  issued at In[2]:2   return x[" in ran.stdout
    assert "(issued at In[2]:2   return x[" in ran.stdout
    assert re.search(r"node 0 cpu +In\[3\]:1   y = torch\.ones", ran.stdout)


def test_equal_code_of_a_library_and_of_the_user_is_told_apart() -> None:
    source = "def line(user_line):\n    return user_line()[1]\n"
    found = []
    for name in (os.path.join(os.path.dirname(torch.__file__), "theirs.py"), "/home/user/train.py"):
        made: dict[str, Any] = {}
        exec(compile(source, name, "exec"), made)
        found.append(made["line"](user_line).code.co_filename)
    assert found == [__file__, "/home/user/train.py"]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_another_python_are_libraries(folder: str) -> None:
    """A line of a `.pth` file adds them: they are imported on workers, and do not travel."""
    assert of_a_library(f"/opt/other/lib/python3/{folder}/numpy/linalg.py")
    assert not of_a_library(f"/opt/other/{folder}.py")
