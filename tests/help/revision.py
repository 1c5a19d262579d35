"""The commit of this tree, for pages that show what a run of it has given."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def revision() -> str:
    """Return the commit, and whether files differ from it: `commit 1a2b3c4d`."""
    try:
        found, changed = (
            subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
            for words in (
                ["rev-parse", "--short=8", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit is known"
    return f"commit {found.strip()}{' with changes' if changed else ''}"
