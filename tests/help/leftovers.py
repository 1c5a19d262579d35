"""What a run of the suite has left anywhere: notes of sessions, processes, shared memory, folders, sockets.

The suite has a folder for temporary files and one for notes. Its processes are known by the folder's name in
their environment. A port has a process that listens there, so none is left without one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distruntime.wire import scratch
from processes import until

# So many seconds processes have to end that are just ending.
_PATIENCE = 30.0
_SHARED = Path("/dev/shm")
# These are not ours. torch keeps there what it has compiled for later processes of this user. torchrun keeps
# the logs of its ranks, and Ray those of its sessions. Python's multiprocessing and Open MPI leave their
# folders where a test has killed the process.
_OTHERS = ("torchinductor_", "torchelastic_", "ray", "pymp-", "ompi.")


class Leftovers:
    """A folder for a run, and what is there that was not before."""

    def __init__(self) -> None:
        # Addresses of sockets have at most 107 letters, so the name is short.
        self.folder = Path(tempfile.mkdtemp(prefix="drt-"))
        # The second user of the tests of ssh has its home in it.
        self.folder.chmod(0o711)
        self.tests = self.folder / "t"
        self._shared = set(_segments())
        # Workers at a port of this machine ask for a key, and the first of them makes it there. So the user's
        # home gets none, and may be one that cannot be written.
        # IPython takes a temporary folder where it finds no home, and leaves that.
        own = {
            "TMPDIR": "",
            "DISTRUNTIME_STATE": "state",
            "XDG_CONFIG_HOME": "config",
            "IPYTHONDIR": "ipython",
        }
        self._before = {name: os.environ.get(name) for name in own}
        os.environ.update({name: str(self.folder / inside) for name, inside in own.items()})
        tempfile.tempdir = None

    def found(self) -> list[str]:
        """Return a line for each thing that is left. Wait some seconds for processes that end."""
        # They go when this process ends. So the next start finds none of them.
        scratch.remove_own()
        left: list[str] = []

        def nothing() -> bool:
            # What a test has killed cannot remove its folders: the product's next start does.
            scratch.sweep()
            left[:] = [*self._processes(), *self._files(), *self._folders()]
            return not left

        with suppress(AssertionError):
            until(nothing, _PATIENCE)
        return left

    def end(self) -> None:
        """Remove the folder."""
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _folders(self) -> Iterator[str]:
        for path in sorted(self.folder.iterdir()):
            kept = (self.tests, *(self.folder / name for name in ("state", "config", "ipython")))
            if path not in kept and not path.name.startswith(_OTHERS):
                inside = ", ".join(sorted(os.listdir(path))[:5]) if path.is_dir() else ""
                yield f"{'the folder' if path.is_dir() else 'the file'} {path.name} ({inside})"
        for path in self.folder.glob("state/**/*"):
            if path.is_socket():
                yield f"the socket {path.relative_to(self.folder)}"

    def _files(self) -> Iterator[str]:
        yield from (f"the note {note}" for note in self.folder.glob("state/sessions/*"))
        yield from (f"the shared memory {name}" for name in set(_segments()) - self._shared)

    def _processes(self) -> Iterator[str]:
        mine = f"TMPDIR={self.folder}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                # Children of this process end with it, such as the one that starts its workers.
                parent = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                if os.getpid() not in (int(entry.name), parent) and mine in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    yield f"the process {entry.name}: {words[:200]}"
            except OSError:
                # It has ended, or is another user's.
                continue


def _segments() -> Iterator[str]:
    """Yield the segments whose maker has ended. Others on this machine have some, too."""
    for path in _SHARED.glob("torch_*_*"):
        maker = path.name.split("_")[1]
        if maker.isdigit() and not Path("/proc", maker).exists():
            yield path.name
