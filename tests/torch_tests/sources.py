"""Where PyTorch's test files come from: a folder of the user's, or Ubuntu's source archive of PyTorch 2.9.1.

PyTorch's packages do not contain `test/`, and its repository is large. The archive has 33 MB.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "2.9.1"
ARCHIVE = f"http://archive.ubuntu.com/ubuntu/pool/universe/p/pytorch/pytorch_{VERSION}+dfsg.orig.tar.xz"
SHA256 = "28fdfe67285a4f638dd586679cf36db32656b24efde38230d0860b6a59720aee"
KEPT = Path(__file__).resolve().parents[2] / "build" / "torch_tests"

ASKED = "name the folder `test` of a PyTorch clone: TORCH_TESTS=/path/to/pytorch/test make torch-tests"


class NoSources(Exception):
    """There is nothing to run."""


def test_folder() -> Path:
    """Return the folder `test` of a clone of PyTorch, downloading it if TORCH_TESTS names none."""
    if named := os.environ.get("TORCH_TESTS"):
        if not (Path(named) / "test_torch.py").exists():
            raise NoSources(f"TORCH_TESTS={named} has no test_torch.py: {ASKED}")
        return Path(named).resolve()
    folder = KEPT / f"pytorch-v{VERSION}" / "test"
    if not folder.exists():
        _unpack(_download())
    return folder


def _download() -> Path:
    path = KEPT / Path(ARCHIVE).name
    if not path.exists():
        print(f"downloading {ARCHIVE} (33 MB)", file=sys.stderr)
        KEPT.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            urllib.request.urlretrieve(ARCHIVE, part)
        except OSError as error:
            raise NoSources(f"{ARCHIVE}: {error}. Without it, {ASKED}") from error
        part.rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise NoSources(f"{path} has the sha256 {found}, expected {SHA256}: delete it, and try again")
    return path


def _unpack(path: Path) -> None:
    """Unpack `test` alone. It gets its name last, so what was interrupted is done again."""
    inside = f"pytorch-v{VERSION}/test/"
    new = KEPT / "new"
    with tarfile.open(path) as archive:
        wanted = [member for member in archive if member.name.startswith(inside)]
        archive.extractall(new, wanted, filter="data")
    (new / f"pytorch-v{VERSION}").rename(KEPT / f"pytorch-v{VERSION}")
    new.rmdir()


def version(folder: Path) -> str:
    """Return which PyTorch's tests these are."""
    if folder.is_relative_to(KEPT):
        return VERSION
    file = folder.parent / "version.txt"
    return file.read_text(encoding="utf-8").strip() if file.exists() else "of an unknown version"
