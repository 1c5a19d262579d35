"""The name "distruntime" of `torch.compile`'s backend, which Dynamo knows from this package's import on.

An entry point would say it without the import, but only where the package is installed. A script needs the
import in any case, and a clone is enough for that. So no entry point is declared.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..backend.on_import import when_imported

_PACKAGE = __name__.partition(".")[0]


def install_name() -> None:
    """Offer the backend to Dynamo, once it is imported. Dynamo loads it when a call names it."""
    when_imported("torch._dynamo.backends.registry", _offer)


def _offer(module: ModuleType) -> None:
    # It takes 20 ms, and Dynamo has imported it by then.
    metadata = importlib.import_module("importlib.metadata")
    where = f"{_PACKAGE}.compiled.backend:{_PACKAGE}"
    module._BACKENDS[_PACKAGE] = metadata.EntryPoint(_PACKAGE, where, "torch_dynamo_backends")
