"""Packages of the user's on the workers, and what is installed on each node."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import load, save

import distruntime as dr
from distruntime.guards.own_code import own_by_value
from distruntime.python import shipping

_names = count()


@pytest.fixture(autouse=True)
def _later_sessions_get_nothing() -> Iterator[None]:
    yield
    shipping._shipped.clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A package here that no worker has, and that no other test has shipped: its folder and its name."""
    folder = tmp_path / f"shipped{next(_names)}"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import answer\n", encoding="utf-8")
    (folder / "inner.py").write_text("def answer():\n    return 1\n", encoding="utf-8")
    (folder / "words.txt").write_text("data of the package", encoding="utf-8")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "inner.pyc").write_text("no code", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder, folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def imported(name: str) -> int:
    module: Any = importlib.import_module(name)
    found: int = module.answer()
    return found


def files(name: str) -> list[str]:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    return sorted(file.name for file in Path(module.__file__).parent.iterdir() if file.is_file())


def test_a_package_is_imported_there_once_it_is_shipped(session: object, package: tuple[Path, str]) -> None:
    _, name = package
    call = dr.remote(imported)
    with pytest.raises(ModuleNotFoundError, match=rf'send it, dr\.workers\.ship\("{name}"\)'):
        dr.fetch(call(name, node=1))
    dr.workers.ship(name)
    assert dr.fetch([call(name, node=0), call(name, node=1)]) == [1, 1]
    assert dr.fetch(dr.remote(files)(name, node=1)) == ["__init__.py", "inner.py", "words.txt"]


def test_what_has_changed_replaces_what_was_imported(session: object, package: tuple[Path, str]) -> None:
    folder, name = package
    dr.workers.ship(name)
    module: ModuleType = importlib.import_module(name)
    by_name = dr.remote(module.answer)
    assert dr.fetch([by_name(node=1), dr.remote(imported)(name, node=1)]) == [1, 1]
    (folder / "inner.py").write_text("def answer():\n    return 22\n", encoding="utf-8")
    dr.workers.ship(module)
    assert dr.fetch([by_name(node=1), dr.remote(imported)(name, node=1)]) == [22, 22]


def test_one_node_gets_a_folder_of_modules(session: object, tmp_path: Path) -> None:
    name = f"alone{next(_names)}"
    (tmp_path / f"{name}.py").write_text("def answer():\n    return 3\n", encoding="utf-8")
    dr.workers.ship(tmp_path, node=1)
    assert dr.fetch(dr.remote(imported)(name, node=1)) == 3
    with pytest.raises(ModuleNotFoundError, match="is not installed on this worker"):
        dr.fetch(dr.remote(imported)(name, node=0))


def test_a_worker_that_comes_later_gets_it_too(
    fresh_session: Callable[..., Any], package: tuple[Path, str]
) -> None:
    fresh_session()
    dr.workers.ship(package[1])
    dr.restart(1, force=True)
    assert dr.fetch(dr.remote(imported)(package[1], node=1)) == 1


def test_the_members_of_a_mesh_import_it_too(mesh: dr.mesh.DeviceMesh, package: tuple[Path, str]) -> None:
    folder, name = package
    call = dr.spmd(mesh, imported, returns=object)
    with pytest.raises(
        ModuleNotFoundError, match=rf'send it, dr\.workers\.ship\("{name}"\).* \(rank ([01]) on node \1\)'
    ):
        dr.fetch(call(name))
    before = dr.fetch(dr.spmd(mesh, os.getpid)())
    dr.workers.ship(name)
    assert dr.fetch(call(name)) == [1, 1]
    by_name = dr.spmd(mesh, importlib.import_module(name).answer, returns=object)
    assert dr.fetch(by_name()) == [1, 1]
    (folder / "inner.py").write_text("def answer():\n    return 22\n", encoding="utf-8")
    dr.workers.ship(name)
    assert dr.fetch([call(name), by_name()]) == [[22, 22], [22, 22]]
    assert dr.fetch(dr.spmd(mesh, os.getpid)()) == before


class Named:
    """Its attributes have names of torch's modules that are of classes of their own."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def ops(self) -> torch.Tensor:
        return torch.ones(self.classes)


def saved(path: str) -> float:
    save(Named(2).ops(), path)
    found: torch.Tensor = load(path)
    return found.sum().item()


def test_what_stands_in_torchs_place_travels_as_torchs_own(session: object, tmp_path: Path) -> None:
    assert dr.remote(Named)(3, node=1).ops().tolist() == [1, 1, 1]
    assert dr.remote(Named.ops)(Named(2), node=1).tolist() == [1, 1]
    path = str(tmp_path / "saved.pt")
    assert dr.fetch(dr.remote(saved)(path, node=1)) == 2
    dr.remote(torch.save)(torch.arange(3), path, node=1)
    assert dr.remote(torch.load)(path, node=1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no_such_package", "there is no package 'no_such_package' here that has files"),
        ("sys", "there is no package 'sys' here that has files"),
        ("__main__", "What the script itself defines travels by itself"),
        ("a/b", r"or a folder \(a path with a slash\)"),
    ],
)
def test_what_cannot_be_shipped_is_refused(session: object, what: str, why: str) -> None:
    with pytest.raises(dr.errors.UsageError, match=why):
        dr.workers.ship(what)


def test_threads_send_functions_while_others_import(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []

    def run(thread: int) -> None:
        for k in range(60):
            name = f"_imported_{thread}_{k}"
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            try:
                with own_by_value():
                    pass
            except RuntimeError as error:
                wrong.append(str(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
