"""Kinds of state: global names, modules, and what is patched of Python's."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import math
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from state_kinds import Here, Holder, State, kind

# These global names are rebound.
rebound = 1.0
listed = [1.0]

# -- global names and modules --------------------------------------------------------------------------------


@kind()
def global_that_is_rebound(here: Here) -> State:
    here.put(sys.modules[__name__], "rebound", 1.0)
    return (lambda: rebound), (lambda k: globals().update(rebound=float(k)))


@kind()
def global_list(here: Here) -> State:
    listed[0] = 1.0
    return (lambda: listed[0]), (lambda k: listed.__setitem__(0, float(k)))


@kind()
def global_by_name(here: Here) -> State:
    here.put(sys.modules[__name__], "rebound", 1.0)
    return (lambda: globals()["rebound"]), (lambda k: globals().update(rebound=float(k)))


@kind()
def global_that_hides_a_builtin(here: Here) -> State:
    here.callback(lambda: globals().pop("divmod", None))

    def change(k: int) -> None:
        globals()["divmod"] = lambda a, b: (float(k), 0)

    return (lambda: divmod(7, 4)[0]), change


@kind()
def builtin_that_is_patched(here: Here) -> State:
    def change(k: int) -> None:
        here.put(builtins, "hex", lambda number: "x" * k)

    return (lambda: len(hex(1))), change


@kind()
def function_of_the_library_that_is_patched(here: Here) -> State:
    return (lambda: math.fabs(-1)), (lambda k: here.put(math, "fabs", lambda number: float(k)))


@kind(wide=True)
def class_of_the_library_that_is_patched(here: Here) -> State:
    def read() -> float:
        with contextlib.nullcontext(1.0) as found:
            return found

    def change(k: int) -> None:
        here.put(contextlib, "nullcontext", lambda found=None: contextlib.closing(_Closed(float(k))))

    return read, change


class _Closed(float):
    def close(self) -> None:
        pass


@kind()
def attribute_of_a_module(here: Here) -> State:
    module: Any = types.ModuleType("some")
    module.v = 1.0
    return (lambda: module.v), (lambda k: setattr(module, "v", float(k)))


def _imported(here: Here, name: str, text: str) -> Any:
    """Return a module of the user's that was imported from a folder."""
    folder = here.enter_context(tempfile.TemporaryDirectory())
    Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, folder)
    here.callback(sys.path.remove, folder)
    here.callback(sys.modules.pop, name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@kind()
def attribute_of_an_imported_module(here: Here) -> State:
    module = _imported(here, "user_a", "v = 1.0")
    return (lambda: module.v), (lambda k: setattr(module, "v", float(k)))


@kind()
def global_of_a_function_of_an_imported_module(here: Here) -> State:
    module = _imported(here, "user_b", "v = 1.0\ndef get():\n    return v\n")
    return (lambda: module.get()), (lambda k: setattr(module, "v", float(k)))


@kind()
def function_of_an_imported_module_patched(here: Here) -> State:
    module = _imported(here, "user_c", "def get():\n    return 1.0\n")
    return (lambda: module.get()), (lambda k: setattr(module, "get", lambda: float(k)))


@kind()
def getattr_of_a_module(here: Here) -> State:
    module = _imported(here, "user_d", "values = [1.0]\ndef __getattr__(name):\n    return values[0]\n")
    return (lambda: module.scale), (lambda k: module.values.__setitem__(0, float(k)))


@kind()
def import_inside_the_function(here: Here) -> State:
    module = _imported(here, "user_e", "v = 1.0")

    def read() -> float:
        import user_e  # type: ignore[import-not-found]

        return user_e.v

    return read, (lambda k: setattr(module, "v", float(k)))


@kind()
def import_of_a_name_inside_the_function(here: Here) -> State:
    module = _imported(here, "user_f", "v = 1.0")

    def read() -> float:
        from user_f import v

        return v

    return read, (lambda k: setattr(module, "v", float(k)))


@kind()
def module_by_name(here: Here) -> State:
    module = _imported(here, "user_g", "v = 1.0")
    return (lambda: sys.modules["user_g"].v), (lambda k: setattr(module, "v", float(k)))


@kind()
def module_that_is_reloaded(here: Here) -> State:
    module = _imported(here, "user_h", "v = 1.0\ndef get():\n    return v\n")

    def change(k: int) -> None:
        path = Path(str(module.__file__))
        path.write_text(f"v = {k}.0\ndef get():\n    return v\n" + "#" * k, encoding="utf-8")
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))

    return (lambda: module.get()), change


@kind("guarded or recorded", "eval")
def evaluated_text(here: Here) -> State:
    box = Holder()
    return (lambda: eval("box.v", {"box": box})), (lambda k: setattr(box, "v", float(k)))


@kind()
def function_with_globals_of_its_own(here: Here) -> State:
    space: dict[str, Any] = {"v": 1.0}
    exec("def get():\n    return v", space)
    get = space["get"]
    return (lambda: get()), (lambda k: space.update(v=float(k)))
