"""Which tests are known to differ, and why: the list in `expected.txt`.

Each entry of the list begins with a line at the margin, its cause: a kind, a colon, and the reason. Under
it stand, indented, the tests: `file::class::test`, where `*` stands for anything. A line that begins with
`says ` has words of the error (a regular expression): then only tests that fail with them belong to the
cause. A line that begins with `in ` has the mode in which the cause holds. An entry without tests holds for
all tests that fail with its words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from rows import ALIKE, Row

NOT_RUN = "not run"
OPEN = "open"
KINDS = {
    "documented": "as docs/limits.md or docs/meshes.md say",
    "torch": "torch's own limits: what it does to any tensor subclass, or to a device that is no CPU",
    "other version": "the test asks for what this torch does not do",
    "harness": "what this lane does differently from torch's own run",
    OPEN: "a defect here that is not mended yet",
    NOT_RUN: "tests that a sample leaves out",
}


@dataclass
class Cause:
    kind: str
    why: str
    says: str = ""
    mode: str = ""
    tests: list[str] = field(default_factory=list)
    matched: int = 0

    def explains(self, row: Row) -> bool:
        if self.mode not in ("", row.mode):
            return False
        if self.says and not re.search(self.says, row.error):
            return False
        return not self.tests or any(fnmatchcase(row.test, pattern) for pattern in self.tests)


# These three are seen by running the test again, so the list has no entries for them.
OTHER_VERSION = Cause("other version", "it fails here too, on CPU tensors")
ALIKE_ALONE = Cause("torch", "it fails in processes of its own, too, where no GPU is")
LATE = Cause(
    "documented", "a mistake that only a kernel sees is raised when a value is read, not at the call"
)


def read(path: Path) -> list[Cause]:
    causes: list[Cause] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = "" if line.startswith("#") else line.rstrip()
        if not words:
            continue
        if not words.startswith(" "):
            kind, colon, why = words.partition(": ")
            if kind not in KINDS or not colon:
                raise ValueError(
                    f"{path}, line {number}: a cause begins with one of {', '.join(KINDS)} and a colon"
                )
            causes.append(Cause(kind, why))
        elif words.strip().startswith("says "):
            causes[-1].says = words.strip().removeprefix("says ")
        elif words.strip().startswith("in "):
            causes[-1].mode = words.strip().removeprefix("in ")
        else:
            causes[-1].tests.append(words.strip())
    return causes


def cause_of(row: Row, causes: list[Cause]) -> Cause | None:
    """Return why a failed test fails; None if nobody knows."""
    if row.here == "failed":
        return OTHER_VERSION
    # In step the worker is asked again, with a signature that it has corrected meanwhile.
    if row.in_step == "passed" and "its meta kernel promised" not in row.error:
        return LATE
    known = next((cause for cause in causes if cause.explains(row)), None)
    return ALIKE_ALONE if known is None and row.here == ALIKE else known
