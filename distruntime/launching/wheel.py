"""A wheel of this very package, with its worker, for other machines. It is made of what runs here."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import re
import zipfile
from pathlib import Path

from ..errors import ConfigurationError

_NAME = "distruntime"
_HERE = Path(__file__).resolve().parents[1]
# The module with the version is outside of the rooms. It is read here as it is on another machine.
VERSION = re.findall(r'__version__ = "(.+)"', (_HERE / "version.py").read_text(encoding="utf-8"))[0]
_COMMANDS = "[console_scripts]\ndistruntime-worker = distruntime_worker.cli:command\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: distruntime\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel() -> tuple[str, bytes]:
    """Return the name and the bytes of a wheel of this version."""
    found = importlib.util.find_spec("distruntime_worker")
    # The package is found and not imported: the master's side never runs the worker's.
    folders = [Path(text) for text in (found.submodule_search_locations or () if found else ())]
    worker = folders[0] if folders else _HERE.parent / "worker" / "distruntime_worker"
    if not (worker / "__init__.py").is_file():
        raise ConfigurationError(
            "the worker's package distruntime_worker is not here, so it cannot be sent to another machine. "
            "Install distruntime as a whole: pip install ."
        )
    files = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for folder in (_HERE, worker)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    }
    about = f"{_NAME}-{VERSION}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requirements())
    files[f"{about}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {VERSION}\nRequires-Python: >=3.10\n{needs}"
    ).encode()
    files[f"{about}/WHEEL"], files[f"{about}/entry_points.txt"] = _WHEEL.encode(), _COMMANDS.encode()
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    record = f"{about}/RECORD"
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return f"{_NAME}-{VERSION}-py3-none-any.whl", packed.getvalue()


def requirements() -> list[str]:
    """Return what this package needs, torch included, as pip reads it."""
    # A checkout that was not installed has no metadata.
    project = _HERE.parent / "pyproject.toml"
    if project.is_file():
        found = re.search(r"^dependencies = (\[.*?\])$", project.read_text(encoding="utf-8"), re.M | re.S)
        if found is not None:
            return [str(one) for one in ast.literal_eval(found[1])]
    try:
        named = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            "this package was not installed, and is no checkout: it is not known what it needs on another "
            "machine. Install distruntime there by hand"
        ) from None
    return [one for one in named if "extra ==" not in one]


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")
