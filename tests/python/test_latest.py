"""Functions, classes and loaders whose captured state has changed: what travels again, and what is freed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import active_session

pytestmark = pytest.mark.usefixtures("session")


def cell(space: dict[str, Any], text: str) -> None:
    """Run a cell of a notebook."""
    exec(compile(text, "<cell>", "exec"), space)


def cells(text: str) -> dict[str, Any]:
    """Return the globals of a notebook whose first cell is this."""
    space: dict[str, Any] = {"__name__": "__main__", "dr": dr, "torch": torch}
    cell(space, text)
    return space


def test_what_is_equal_does_not_travel_again() -> None:
    space = cells("k = 0.5\ncfg = {'lr': 0.25}\ndef f(): return k * cfg['lr']")
    f = dr.remote(space["f"], node=0)
    dr.fetch(f())
    known = f.callee()
    cell(space, "k = 1 / 2\ncfg['lr'] = 1 / 4")
    assert f.callee() is known and dr.fetch(f()) == 0.125


def test_the_shape_of_a_result_may_follow_a_global() -> None:
    space = cells("n = 2\ndef f(x): return x[:n]")
    f: Any = dr.remote(space["f"])
    x = torch.arange(6.0, device=dr.place(0))
    for n in (2, 3, 2, 5):
        space["n"] = n
        for _ in range(2):
            assert f(x).tolist() == [*range(n)]


def test_options_and_equal_functions_see_the_change() -> None:
    space = cells("k = 1\ndef f(): return k")
    f: Any = dr.remote(space["f"], node=0)
    other = f.options(node=1)
    assert dr.fetch([f(), other(), dr.remote(space["f"])(node=1)]) == [1, 1, 1]
    space["k"] = 2
    assert dr.fetch([other(), f(), dr.remote(space["f"])(node=1)]) == [2, 2, 2]


def test_a_module_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_helpers.py").write_text(
        "k = 1\ncfg = {'a': 1}\ndef scaled(x): return x * k\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_helpers  # type: ignore[import-not-found]

    space = cells("import my_helpers\nfrom my_helpers import scaled\n")
    cell(space, "def f(): return my_helpers.scaled(1), scaled(1), my_helpers.cfg['a']")
    f: Any = dr.remote(space["f"], node=0)
    assert dr.fetch(f()) == space["f"]() == (1, 1, 1)
    my_helpers.k = 2
    assert dr.fetch(f()) == space["f"]() == (2, 2, 1)
    my_helpers.cfg["a"] = 3
    assert dr.fetch(f()) == space["f"]() == (2, 2, 3)
    my_helpers.scaled = lambda x: 70
    assert dr.fetch(f()) == space["f"]() == (70, 2, 3)
    known = f.callee()
    my_helpers.nobody_reads_it = 1
    assert f.callee() is known
    sys.modules.pop("my_helpers")


def test_a_package_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "my_package" / "part.py").write_text("k = 1\ncfg = {'a': 1}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    space = cells("import my_package.part\nfrom my_package import part\nname = 'k'\n")
    read = ["my_package.part.k", "getattr(part, name)", "vars(part)['cfg']['a']", "(lambda: part.cfg['a'])()"]
    functions: list[Any] = []
    for text in read:
        cell(space, f"def f(): return {text}")
        functions.append(dr.remote(space["f"], node=0))
    assert dr.fetch([f() for f in functions]) == [1] * 4
    space["part"].k = space["part"].cfg["a"] = 2
    assert dr.fetch([f() for f in functions]) == [2] * 4
    sys.modules.pop("my_package.part"), sys.modules.pop("my_package")


def test_what_cannot_be_looked_at_is_named_once_at_the_line() -> None:
    space = cells("import numpy\ntable = numpy.zeros(1 << 16)\ndef f(): return float(table[0])")
    f: Any = dr.remote(space["f"], node=0)
    wanted = (
        r"f travels with `table`, an array of 524,288 bytes, too many to be compared .* Pass it as an argu"
    )
    with pytest.warns(UserWarning, match=wanted) as told:
        assert dr.fetch(f()) == 0.0
    assert told[0].filename == __file__
    space["table"][0] = 3.0
    assert dr.fetch(f()) == 0.0
    # Another array in its place travels, and is not named again.
    space["table"] = space["table"].copy()
    assert dr.fetch(f()) == 3.0


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("[*range(20_000)]", "a list of 20,000 items, too many to be compared"),
        ("bytearray(100_000)", "a bytearray of 100,000 bytes, too many to be compared"),
        ("dict.fromkeys('ab', 1).items()", "a dict_items, which nobody can compare with what it was"),
    ],
)
def test_other_things_that_are_named(made: str, said: str) -> None:
    space = cells(f"held = {made}\ndef f(): return len(held)")
    f: Any = dr.remote(space["f"], node=0)
    with pytest.warns(UserWarning, match=f"f travels with `held`, {said}"):
        assert dr.fetch(f()) == space["f"]()
    assert dr.fetch(f()) == space["f"]()


def test_what_never_changes_is_not_named() -> None:
    space = cells(
        "held = tuple(range(20_000)); import re; p = re.compile('a')\ndef f(): return len(held), p.pattern"
    )
    assert dr.fetch(dr.remote(space["f"], node=0)()) == space["f"]()


def test_a_change_that_cannot_travel_raises_at_the_call() -> None:
    space = cells("held = 1\ndef f(): return held")
    f: Any = dr.remote(space["f"], node=0)
    assert dr.fetch(f()) == 1
    space["held"] = threading.Lock()
    for _ in range(2):
        with pytest.raises(
            dr.errors.UsageError, match="f cannot travel to a worker: `held`, a lock, cannot be pickled"
        ):
            f()
    space["held"] = torch.ones(2, device=dr.place(0))
    with pytest.raises(dr.errors.UsageError, match="f captures `held` on node 0 cpu: pass it as an argument"):
        f()
    space["held"] = 2
    assert dr.fetch(f()) == 2


def test_what_a_function_writes_there_stays_until_it_travels_again() -> None:
    space = cells("n = 0\nk = 1\ndef f():\n    global n\n    n += k\n    return n")
    f: Any = dr.remote(space["f"], node=0)
    assert [dr.fetch(f()) for _ in range(3)] == [1, 2, 3]
    assert space["n"] == 0
    space["k"] = 10
    assert [dr.fetch(f()) for _ in range(2)] == [10, 20]
    # What was there before is gone, and does not come back.
    space["k"] = 1
    assert [dr.fetch(f()) for _ in range(2)] == [1, 2]


def test_threads_call_while_another_changes() -> None:
    space = cells("cfg = {'a': 0, 'b': 0}\ndef f(): return cfg['a'], cfg['b']")
    f: Any = dr.remote(space["f"], node=0)
    dr.fetch(f())
    failed: list[str] = []
    done = threading.Event()

    def call() -> None:
        last = 0
        while not done.is_set():
            a, _ = dr.fetch(f())
            if a < last:
                failed.append(f"{a} after {last}")
            last = a

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for k in range(1, 20):
        space["cfg"]["a"] = k
        space["cfg"][f"new {k}"] = k
        assert dr.fetch(f())[0] == k
    done.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


# -- classes and objects -------------------------------------------------------------------------------------


def test_a_class_that_is_defined_anew_is_a_new_class_for_new_objects() -> None:
    text = "class C:\n    def __init__(self): self.n = {0}\n    def read(self): return self.n * {1}\n"
    space = cells(text.format(1, 1))
    made: Any = dr.remote(space["C"], node=0)
    old = made()
    assert dr.fetch(old.read()) == 1
    cell(space, text.format(2, 100))
    new = dr.remote(space["C"], node=0)()
    assert dr.fetch([new.read(), old.read()]) == [200, 1]
    # A function that names the class makes new objects, and one of `dr.remote` has the class that it got.
    assert dr.fetch(made().read()) == 1


def test_a_class_that_is_changed_is_changed_for_its_objects_when_it_travels() -> None:
    space = cells("k = 1\nclass C:\n    def read(self): return k\n")
    made: Any = dr.remote(space["C"], node=0)
    old = made()
    assert dr.fetch(old.read()) == 1
    space["k"] = 2
    assert dr.fetch([made().read(), old.read()]) == [2, 2]
    space["C"].read = lambda self: 77
    assert dr.fetch([made().read(), old.read()]) == [77, 77]


def test_a_factory_of_a_module() -> None:
    space = cells("n = 2\ndef make(): return torch.nn.Linear(n, 1)")
    make = dr.remote(space["make"])
    for factory in (space["make"], make):
        for n in (2, 3):
            space["n"] = n
            net: Any = dr.RemoteModule(factory, node=0)
            assert net.weight.shape == (1, n)
            assert net(torch.ones(4, n, device=net.place)).shape == (4, 1)


# -- meshes, and what runs there -----------------------------------------------------------------------------


def test_members_of_a_mesh(mesh: dr.mesh.DeviceMesh) -> None:
    space = cells("k = 1\ndef f(x): return x * k")
    f: Any = dr.remote(space["f"])
    x = torch.ones(2, device=mesh.device)
    for k in (1, 2, 3):
        space["k"] = k
        assert [f(x).member(rank).tolist() for rank in range(2)] == [[k, k]] * 2


ALIVE = """
import gc
class Kept:
    pass
held = Kept()
def alive():
    gc.collect()
    return sum(type(x).__name__ == "Kept" for x in gc.get_objects())
"""


def test_spmd_sees_changes_and_frees_what_is_outdated(mesh: dr.mesh.DeviceMesh) -> None:
    space = cells(ALIVE + "k, n, cfg = 1, 0, {'a': 1}\n")
    cell(space, "def f():\n    global n\n    n += 1\n    return k, cfg['a'], n, len(vars(held)), alive()")
    f: Any = dr.spmd(mesh, space["f"])
    for k in range(1, 6):
        space["k"] = space["cfg"]["a"] = k
        for n in (1, 2, 3):
            *seen, alive = dr.fetch(f())
            assert seen == [[k, k], [k, k], [n, n], [0, 0]]
            # The words that free the one before come with a later call.
            assert n < 3 or alive == [1, 1]


def test_the_workers_free_what_is_outdated() -> None:
    space = cells(ALIVE + "k = 0\ndef f(x): return x + k + len(vars(held))")
    f: Any = dr.remote(space["f"])
    x = torch.zeros(2, device=dr.place(1))
    before = len(active_session().nodes[1].code)
    for k in range(6):
        space["k"] = k
        for _ in range(3):
            assert f(x).tolist() == [k, k]
    assert len(active_session().nodes[1].code) == before + 1
    assert dr.fetch(dr.remote(space["alive"], node=1)()) == 1


@pytest.mark.parametrize("passed", [False, True])
def test_data_loaders_have_what_they_were_made_with_and_say_so(passed: bool) -> None:
    space = cells(
        "scale = 1\nclass Data(torch.utils.data.Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return torch.full((1,), float(scale))\n"
    )
    factory = space["Data"]() if passed else space["Data"]
    loader = dr.data.data_loader(factory, node=0, batch_size=2)
    assert [batch.tolist() for batch in loader] == [[[1.0], [1.0]]]
    # A copy of an argument is there, as everywhere.
    vars(factory).update(note=1) if passed else None
    assert [batch.tolist() for batch in loader] == [[[1.0], [1.0]]]
    space["scale"] = 2
    with pytest.warns(
        UserWarning, match="has changed since this data loader was made, .* make another"
    ) as told:
        assert [batch.tolist() for batch in loader] == [[[1.0], [1.0]]]
    assert told[0].filename == __file__
    assert [batch.tolist() for batch in loader] == [[[1.0], [1.0]]]
    another = dr.data.data_loader(factory, node=0, batch_size=2)
    assert [batch.tolist() for batch in another] == [[[2.0], [2.0]]]
