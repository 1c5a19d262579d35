"""What the lane would notice: the worker with one line left out, for each line on which order depends.

A test that is named beside each mutant must fail on a copy that has it. A test of waits that passes without
them shows nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "help"))

from mutation import Mutant, tried

_WORKER = "worker/distruntime_worker"
_DEVICE_PATH = "tests/accelerator/workers/test_device_path.py"

MUTANTS = [
    Mutant(
        "no wait between two streams",
        f"{_WORKER}/log/waits.py",
        "mine.wait_for(target.events(position))",
        "pass",
        (f"{_DEVICE_PATH}::test_reads_and_writes_of_two_streams_come_in_order",),
    ),
    Mutant(
        "no record_stream for what another stream has read",
        f"{_WORKER}/log/instructions.py",
        "accelerator.used_on(value, self._state.mine().on(value.device))",
        "pass",
        (f"{_DEVICE_PATH}::test_freed_memory_is_not_used_while_another_stream_reads_it",),
    ),
    Mutant(
        "no record_stream for a recorded backward's gradients",
        f"{_WORKER}/values/functions.py",
        "accelerator.used_on(g, accelerator.current_stream(g.device))",
        "pass",
        (f"{_DEVICE_PATH}::test_attention_forward_on_one_stream_and_backward_on_another",),
    ),
    Mutant(
        "no event behind an upload out of a pinned buffer",
        f"{_WORKER}/values/staging.py",
        "copied.record(stream)",
        "pass",
        (f"{_DEVICE_PATH}::test_uploads_in_a_row_stay_apart",),
    ),
    Mutant(
        "a pinned buffer is used again without a look at its event",
        f"{_WORKER}/values/staging.py",
        "if queue and queue[0][0].query():",
        "if queue:",
        (f"{_DEVICE_PATH}::test_uploads_in_a_row_stay_apart",),
    ),
    Mutant(
        "a copy to the host is answered before it is there",
        f"{_WORKER}/values/streams.py",
        "self.event = accelerator.moment(accelerator.current_stream(value.device))",
        "self.event = None",
        (f"{_DEVICE_PATH}::test_downloads_in_a_row_stay_apart",),
    ),
    Mutant(
        "a conjugate is copied as it is",
        f"{_WORKER}/values/streams.py",
        "value = value.resolve_conj().resolve_neg()",
        "pass",
        (f"{_DEVICE_PATH}::test_a_conjugate_is_read_conjugated",),
    ),
    Mutant(
        "no order between the devices of one collective",
        f"{_WORKER}/machine/accelerator.py",
        "others = [stream for stream in found if stream != first]",
        "others = []",
        (f"{_DEVICE_PATH}::test_a_group_of_two_devices_of_one_worker_with_a_stream_each",),
    ),
    Mutant(
        "a stamp of any device is one of the first",
        f"{_WORKER}/log/instructions.py",
        "name = text_word(p[i + 2]) if mesh is None else mesh.devices[0]",
        'name = text_word(p[i + 2]).partition(":")[0] + ":0"',
        (f"{_DEVICE_PATH}::test_elapsed_time_is_that_of_the_device_of_the_events",),
    ),
]


def survives(mutant: Mutant, environment: dict[str, str]) -> str:
    """Return "" if the mutant's test fails on a copy of the tree that has it; else what is wrong."""
    # What fails without the mutant, too, is yielded once more.
    *_, (_, test, said) = tried([mutant], environment, 1)
    return "" if test else f"{mutant.tests[0]} does not fail:\n{said[-1500:]}"
