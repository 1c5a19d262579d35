"""Which process this is, and whose: names of processes may have any letters, and users may have none."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distruntime.wire.identity import has_died, process, user_name


@pytest.mark.skipif(
    sys.platform != "linux", reason="what a process is called is read from /proc, which is Linux's"
)
def test_a_process_whose_name_is_not_ascii_is_known(tmp_path: Path) -> None:
    # Linux calls a process by the last part of the path that was executed.
    program = tmp_path / "schläft"
    try:
        program.symlink_to(os.path.realpath(sys.executable))
    except UnicodeEncodeError as error:
        pytest.skip(f"no file has such a name here: {error}")
    with subprocess.Popen([program, "-ISc", "input()"], stdin=subprocess.PIPE) as child:
        known = process(child.pid)
        assert known[2] and not has_died(known)
        child.communicate(b"\n")
    assert has_died(known)


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no username")])
def test_a_user_without_a_name_is_called_by_the_number(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def nobody() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert user_name() == str(os.getuid())
