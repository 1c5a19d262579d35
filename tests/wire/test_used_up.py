"""What is said where processes, descriptors, memory or a disk are used up: what, where, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from distruntime.errors import ConfigurationError
from distruntime.wire.descriptors import naming, on_full_disk, used_up


@pytest.mark.parametrize(("number", "words"), [
    (errno.EMFILE, r"pid PID\) has no file descriptor left of \d+.*ulimit -n"),
    (errno.ENFILE, "this machine has no file descriptor left.*file-nr"),
    (errno.EAGAIN, r"pid PID\) may start no process and no thread.*ulimit -u.*pids.max"),
    (errno.ENOMEM, r"pid PID\) gets no more memory.*memory.max"),
])  # fmt: skip
def test_what_is_used_up_is_named(number: int, words: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"no worker can be started: .*{words}".replace("PID", str(os.getpid()))
    ):
        with naming("no worker can be started"):
            raise OSError(number, os.strerror(number))


def test_other_errors_stay_as_they_are() -> None:
    assert used_up(PermissionError(errno.EACCES, "no")) == ""
    with pytest.raises(PermissionError), naming("no worker can be started"):
        raise PermissionError(errno.EACCES, "no")


def test_a_full_disk_is_named_with_what_is_free_there(tmp_path: Path) -> None:
    error = on_full_disk(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), str(tmp_path), 12345)
    assert error.errno == errno.ENOSPC and error.filename == str(tmp_path)
    assert "No space left on device: 12345 bytes were to be written, " in str(error)
    other = OSError(errno.EIO, "worse")
    assert on_full_disk(other, str(tmp_path), 1) is other
