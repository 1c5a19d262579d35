"""What the lane would notice: the worker with one line left out, for each line on which order depends.

Each mutation is applied to a copy of the worker, and a test that is named beside it must fail on that copy.
A test of waits that passes without them shows nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_DEVICE_PATH = HERE / "workers" / "test_device_path.py"
# A worker that has lost an order may wait for ever, so a test of a mutant has so many seconds.
_LIMIT = 120


class Mutant(NamedTuple):
    """In `file` of the worker `old`, which stands there once, becomes `new`; then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(
        "no wait between two streams",
        "log/waits.py",
        "mine.wait_for(target.events(position))",
        "pass",
        "test_reads_and_writes_of_two_streams_come_in_order",
    ),
    Mutant(
        "no record_stream for what another stream has read",
        "log/instructions.py",
        "accelerator.used_on(value, self._state.mine().on(value.device))",
        "pass",
        "test_freed_memory_is_not_used_while_another_stream_reads_it",
    ),
    Mutant(
        "no record_stream for a recorded backward's gradients",
        "values/functions.py",
        "accelerator.used_on(g, accelerator.current_stream(g.device))",
        "pass",
        "test_attention_forward_on_one_stream_and_backward_on_another",
    ),
    Mutant(
        "no event behind an upload out of a pinned buffer",
        "values/staging.py",
        "copied.record(stream)",
        "pass",
        "test_uploads_in_a_row_stay_apart",
    ),
    Mutant(
        "a pinned buffer is used again without a look at its event",
        "values/staging.py",
        "if queue and queue[0][0].query():",
        "if queue:",
        "test_uploads_in_a_row_stay_apart",
    ),
    Mutant(
        "a copy to the host is answered before it is there",
        "values/streams.py",
        "self.event = accelerator.moment(accelerator.current_stream(value.device))",
        "self.event = None",
        "test_downloads_in_a_row_stay_apart",
    ),
    Mutant(
        "a conjugate is copied as it is",
        "values/streams.py",
        "value = value.resolve_conj().resolve_neg()",
        "pass",
        "test_a_conjugate_is_read_conjugated",
    ),
    Mutant(
        "no order between the devices of one collective",
        "machine/accelerator.py",
        "others = [stream for stream in found if stream != first]",
        "others = []",
        "test_a_group_of_two_devices_of_one_worker_with_a_stream_each",
    ),
    Mutant(
        "a stamp of any device is one of the first",
        "log/instructions.py",
        "name = text_word(p[i + 2]) if mesh is None else mesh.devices[0]",
        'name = text_word(p[i + 2]).partition(":")[0] + ":0"',
        "test_elapsed_time_is_that_of_the_device_of_the_events",
    ),
]


def survives(mutant: Mutant, environment: dict[str, str]) -> str:
    """Return "" if the mutant's test fails on a copy of the worker that has it; else what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "worker"
        shutil.copytree(ROOT / "worker", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / "distruntime_worker" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}"
        file.write_text(text.replace(mutant.old, mutant.new))
        paths = [str(ROOT), str(copy), str(ROOT / "tests" / "help")]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line"),
                *("-o", f"pythonpath={' '.join(paths)}", f"--timeout={_LIMIT}"),
                f"{_DEVICE_PATH}::{mutant.test}",
            ],
            env={**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    # Pytest ends with 1 where a test has failed, and with more where it could not run one.
    if done.returncode == 1 and " failed" in done.stdout:
        return ""
    return f"{mutant.test} does not fail:\n{done.stdout[-1500:]}{done.stderr[-500:]}"
