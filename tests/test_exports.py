"""The public names: `__all__` is complete, has no strangers, and every name says what it is for."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import subprocess
import sys
import threading
from types import ModuleType

import pytest
import torch

import distruntime as dr
from distruntime import testing
from distruntime.backend import install
from distruntime.backend.on_import import rare_collections

EVERY = {**vars(dr), **{name: getattr(dr, name) for name in dir(dr)}}  # some come when they are asked for
PUBLIC = {
    name: value
    for name, value in EVERY.items()
    if not name.startswith("_") and not isinstance(value, ModuleType)
}


def test_all_is_complete_and_has_no_strangers() -> None:
    assert len(dr.__all__) == len(set(dr.__all__))
    assert set(dr.__all__) == set(PUBLIC) - {"annotations"} | {
        "functional",
        "lines",
        "nn",
        "nvtx",
        "primitives",
        "testing",
    }


def test_no_public_name_hides_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dr.__path__)} & set(dr.__all__)
    assert modules == {"testing"} and dr.testing is testing


def test_what_is_public_of_the_rooms_is_imported_as_users_import() -> None:
    code = "import distruntime.functional as F, distruntime.primitives; from distruntime import lines"
    code += "; print(F.__name__, lines.all_reduce.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout == "distruntime.collectives.functional all_reduce\n"


def test_the_suites_for_plug_points_are_all_public() -> None:
    suites = [name for name in vars(testing) if name.startswith("check_")]
    assert sorted(testing.__all__) == sorted(suites)
    assert suites == ["check_adjoint", "check_collectives", "check_data_channel", "check_launcher"]


def test_completion_at_a_prompt_offers_the_public_names_only() -> None:
    assert [name for name in dir(dr) if not name.startswith("_")] == sorted(dr.__all__)
    assert all(hasattr(dr, name) for name in dir(dr))


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
    sessions = (
        "init_master_worker shutdown is_initialized Session nodes synchronize manual_seed stalls "
        "set_sync_debug_mode"
    )
    places = "node device on place set_place Place"
    tensors = (
        "DistributedTensor FloatTensor DoubleTensor HalfTensor ByteTensor CharTensor ShortTensor IntTensor "
        "LongTensor"
    )
    factories = "fetch fetch_async zeros ones full empty rand randn randint arange linspace eye tensor"
    errors = (
        "DistruntimeError UsageError PlacementError SessionClosed NotSupportedError ConfigurationError "
        "RemoteError NodeFailed"
    )
    wanted = " ".join(
        (sessions, places, tensors, factories, errors, "ConnectionFailed ProtocolError InternalError")
    ).split()
    assert [name for name in wanted if name not in dr.__all__] == []


@pytest.mark.parametrize(
    "name", [name for name, value in PUBLIC.items() if callable(value) and not isinstance(value, torch.dtype)]
)
def test_a_public_name_is_documented(name: str) -> None:
    value = PUBLIC[name]
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} has no docstring of its own"


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isfunction(value)])
def test_a_public_function_has_a_signature(name: str) -> None:
    assert inspect.signature(PUBLIC[name]).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", ["Session", "DistributedTensor", "Place"])
def test_the_methods_of_a_class_that_torch_does_not_have_are_documented(name: str) -> None:
    cls = getattr(dr, name)
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
