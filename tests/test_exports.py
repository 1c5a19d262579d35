"""The public names: few at the top, the others in parts. Each says what it is for, and old spellings warn."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import distruntime as dr
from distruntime import old_names
from distruntime.backend import install
from distruntime.backend.on_import import rare_collections

PARTS = {name: part for name in dr.__all__ if isinstance(part := getattr(dr, name), ModuleType)}
HOMES = {"distruntime": dr, **{f"distruntime.{name}": part for name, part in PARTS.items()}}
# A name may have two homes.
PUBLIC = {
    f"{home}.{name}": value
    for home, module in HOMES.items()
    for name in module.__all__
    if not isinstance(value := getattr(module, name), ModuleType)
}
# IPython calls it, and nobody else.
HOOK = "load_ipython_extension"


def test_the_top_has_few_names() -> None:
    assert len(dr.__all__) == len(set(dr.__all__)) <= 60


def test_all_is_complete_and_has_no_strangers() -> None:
    found = {name for name in vars(dr) if not name.startswith("_")}
    rooms = {module.name for module in pkgutil.iter_modules(dr.__path__)}
    assert found - rooms - {"annotations", HOOK, "typing"} == set(dr.__all__) - rooms
    assert callable(getattr(dr, HOOK))


def test_a_public_name_that_is_a_module_too_is_that_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dr.__path__)} & set(dr.__all__)
    assert modules == set("data distributed errors mesh parallel profiler testing types workers".split())
    for name in modules:
        assert getattr(dr, name) is importlib.import_module(f"distruntime.{name}")


@pytest.mark.parametrize("part", PARTS)
def test_no_name_of_a_part_hides_a_module_of_its_folder(part: str) -> None:
    inside = getattr(PARTS[part], "__path__", ())
    assert {module.name for module in pkgutil.iter_modules(inside)} & set(PARTS[part].__all__) == set()


@pytest.mark.parametrize("name", old_names.PARTS)
def test_an_old_spelling_works_and_warns_of_the_new_one(name: str) -> None:
    part = old_names.PARTS[name]
    with pytest.warns(DeprecationWarning) as caught:
        found = getattr(dr, name)
    assert [(str(one.message), one.filename) for one in caught] == [
        (f"distruntime.{name} is deprecated: write distruntime.{part}.{name}", __file__)
    ]
    assert found is getattr(PARTS[part], name) and name in PARTS[part].__all__ and name not in dr.__all__


def test_old_spellings_are_those_of_all_parts() -> None:
    """It holds what was public when the parts came: nobody's program may lose a name."""
    assert len(old_names.PARTS) + len(old_names.GONE) == 117 and set(old_names.PARTS.values()) < set(PARTS)


@pytest.mark.parametrize("name", old_names.GONE)
def test_a_name_that_is_no_more_is_told_with_what_does_it_now(name: str) -> None:
    home = re.escape(old_names.GONE[name])
    with pytest.raises(AttributeError, match=f"{name!r} any more: {home}$"):
        getattr(dr, name)
    (page,) = re.findall(r"docs/\w+\.md", old_names.GONE[name])
    assert (Path(__file__).parents[1] / page).exists()


def test_an_old_spelling_warns_once_for_each_line_and_name() -> None:
    code = """
from distruntime import all_reduce
for _ in range(3):
    found = dr.all_reduce, dr.broadcast
again = dr.all_reduce
"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(compile(code, "user.py", "exec"), {"dr": dr})
    names = [str(one.message).partition(" ")[0].removeprefix("distruntime.") for one in caught]
    assert list(zip(names, [one.lineno for one in caught])) == [
        ("all_reduce", 2),
        ("all_reduce", 4),
        ("broadcast", 4),
        ("all_reduce", 5),
    ]
    assert {one.filename for one in caught} == {"user.py"}


def test_a_misspelled_name_of_a_part_is_told_with_its_part() -> None:
    with pytest.raises(AttributeError, match=r"'all_reduec'. Did you mean 'distributed.all_reduce'\?$"):
        dr.all_reduec  # noqa: B018
    with pytest.raises(AttributeError, match=r"'distruntime.mesh' has no .* Did you mean 'Partition'\?$"):
        dr.mesh.Partitoin  # noqa: B018


def test_the_page_has_each_name_in_its_part() -> None:
    text = (Path(__file__).parents[1] / "docs" / "names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `dr\.(\w+)` \|.*\| (`.*`) \|$", text, re.MULTILINE)
    shown = {part: re.findall(r"`(\w+)`", names) for part, names in rows}
    assert shown == {name: list(part.__all__) for name, part in PARTS.items()}
    top = re.findall(r"^\| [^`|]+ \| (`.*`) \|$", text, re.MULTILINE)
    assert sorted(re.findall(r"`dr\.(\w+)`", " ".join(top))) == sorted(set(dr.__all__) - set(PARTS))


def test_what_is_public_of_the_rooms_is_imported_as_users_import() -> None:
    code = "import distruntime.functional as F, distruntime.primitives; from distruntime import lines"
    code += "; print(F.__name__, lines.all_reduce.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout == "distruntime.collectives.functional all_reduce\n"


def test_the_suites_for_plug_points_are_all_public() -> None:
    suites = [name for name in vars(dr.testing) if name.startswith("check_")]
    assert sorted(dr.testing.__all__) == sorted(suites)
    assert suites == ["check_adjoint", "check_collectives", "check_data_channel", "check_launcher"]


@pytest.mark.parametrize("home", HOMES)
def test_completion_at_a_prompt_offers_the_public_names_only(home: str) -> None:
    module = HOMES[home]
    assert [name for name in dir(module) if not name.startswith("_")] == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))


def test_workers_do_not_import_what_only_meshes_need() -> None:
    meshes = "{'torch.distributed.tensor', 'torch._dynamo', 'sympy'}"
    code = f"import sys, distruntime_worker.session.daemon as _; print({meshes} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
        ).stdout
        == "set()\n"
    )


def test_the_names_of_the_design_are_there() -> None:
    sessions = "init_master_worker shutdown is_initialized nodes synchronize manual_seed"
    places = "node device on place set_place"
    tensors = "DistributedTensor fetch fetch_async"
    wanted = f"{sessions} {places} {tensors} DistruntimeError".split()
    assert [name for name in wanted if name not in dr.__all__] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name: str) -> None:
    value = PUBLIC[name]
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} has no docstring of its own"


@pytest.mark.parametrize("home", HOMES)
def test_a_home_of_names_is_documented_and_has_a_page_in_the_reference(home: str) -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / f"{home}.rst"
    assert HOMES[home].__doc__ and f".. automodule:: {home}\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isfunction(value)])
def test_a_public_function_has_a_signature(name: str) -> None:
    assert inspect.signature(PUBLIC[name]).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("cls", [dr.types.Session, dr.DistributedTensor, dr.types.Place])
def test_the_methods_of_a_class_that_torch_does_not_have_are_documented(cls: type) -> None:
    methods = {
        key: value
        for key, value in vars(cls).items()
        if not key.startswith("_") and inspect.isfunction(value)
    }
    assert [
        key for key, method in methods.items() if not method.__doc__ and key not in dir(torch.Tensor)
    ] == []


def test_nothing_is_imported_ahead_once_a_session_is_there(session: object) -> None:
    """`torch.compile` imports what needs that and is needed by it: one of two threads may get half of it."""
    assert "distruntime-imports" not in {thread.name for thread in threading.enumerate()}


def test_an_import_ahead_that_fails_because_the_process_ends_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(importlib, "import_module", refuse)
    install._import_ahead()


def test_imports_make_collections_rare_and_leave_what_others_choose_meanwhile() -> None:
    before = gc.get_threshold()
    try:
        with rare_collections():
            rare = gc.get_threshold()
            assert rare[0] > before[0] and rare[1:] == before[1:]
            with rare_collections():
                assert gc.get_threshold() == rare
            assert gc.get_threshold() == rare
        assert gc.get_threshold() == before
        with rare_collections():
            gc.set_threshold(50, 5, 5)
        assert gc.get_threshold()[:2] == (50, 5)
        gc.set_threshold(0)
        with rare_collections():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
