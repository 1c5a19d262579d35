"""The worker on an asynchronous device: losses, marks, copies to the host. Each test has its own session.

The device is the simulated accelerator. This process does not load it, as a master cannot have it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import distruntime as dr
from distruntime.cluster.observe import Observer
from distruntime.wire.messages import AskWorker
from on_device import held
from processes import STARTING, until

sys.path.insert(0, str(Path(__file__).parent))
from building import BUILDS, torch_folder

BUILT = BUILDS / torch_folder()[1]

pytestmark = [
    pytest.mark.slow(reason="starts a program for each device that it loses"),
    pytest.mark.skipif(not (BUILT / "stamp").exists(), reason="make accelerator builds the device"),
    pytest.mark.skipif(hasattr(torch, "simulated"), reason="a master cannot have the device itself"),
]

# A kernel takes so many microseconds where a test looks at what has not happened yet.
SLOW = "2000"
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Start]:
    """Start workers that have the device; end them after the test."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(**knobs: str) -> str:
        paths = [str(BUILT), *sys.path]
        named = {f"SIMULATED_{name.upper()}": to for name, to in knobs.items()}
        address = f"ipc://{tmp_path}/w{len(workers)}"
        # A master must not load the device, and the workers must.
        rest = {name: to for name, to in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "distruntime_worker", "--listen", address],
                env={**rest, **named, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
        )
        return address

    yield start
    # It tells what failed and nobody has read.
    with suppress(torch.AcceleratorError):
        dr.shutdown()
    # The worker has not ended by itself.
    assert [worker.poll() for worker in workers] == [None] * len(workers)
    for worker in workers:
        worker.terminate()
        worker.wait(20)
    # No thread of theirs has ended with an error.
    assert "Traceback" not in capfd.readouterr().err


def session(address: str) -> None:
    dr.init_master_worker(workers=[address], quiet=True)


def lose_it() -> torch.Tensor:
    """Return what an index out of range leaves; the same call was right before."""
    table, good = torch.zeros(4, 2, device="remote"), torch.tensor([1], device="remote")
    assert F.embedding(good, table).sum().item() == 0
    return F.embedding(torch.tensor([99], device="remote"), table) + 1


def test_a_lost_device_is_told_at_once_and_the_rest_goes_on(start: Start) -> None:
    session(start())
    on_cpu, on_other = torch.ones(3, device=dr.place(0, "cpu")), torch.ones(3, device=dr.place(0, 1))
    before = torch.ones(3, device="remote")
    lost = lose_it()
    for read in (lost.sum().item, before.cpu, lambda: torch.ones(2, device="remote").sum().item()):
        with pytest.raises(torch.AcceleratorError) as caught:
            read()
        text = str(caught.value)
        assert text.startswith("simulated:0 is lost: simulated error: device-side assert triggered. ")
        assert "dr.restart(0, force=True) starts this worker anew" in text
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        torch.arange(3.0).to("remote").sum().item()
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        dr.synchronize()
    for _ in range(2):
        assert on_cpu.sum().item() == on_other.sum().item() == 3
        dr.Stream(0, 1).synchronize()
    # A seed is for all places, and costs those that are left nothing.
    torch.manual_seed(0)
    assert on_other.sum().item() == 3
    assert torch.arange(3.0).to(dr.place(0, 1)).sum().item() == 3
    assert [d.description for d in dr.nodes()[0].devices[1:]] == ["lost", "Simulated accelerator"]


def test_who_waits_for_a_lost_device_hears_of_it(start: Start) -> None:
    """The kernel fails while the master waits, on another stream than the one that is waited for too."""
    session(start(delay_us=SLOW))
    before = torch.ones(3, device="remote")
    stream = dr.Stream(0)
    with dr.stream(stream):
        used = torch.zeros(1000, device="remote")
    kept = used + before.sum()
    lost = lose_it()
    del used
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        lost.cpu()
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        kept.cpu()
    event = dr.Event()
    event.record(stream)
    until(event.query)
    with pytest.raises(torch.AcceleratorError, match="is lost"), dr.stream(dr.Stream(0)):
        torch.ones(2, device="remote").sum().item()


def test_a_lost_device_ends_no_other_session(start: Start, tmp_path: Path) -> None:
    address = start()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    session(address)
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        lose_it().sum().item()
    said, _ = other.communicate("go on\n", timeout=60)
    assert said == "3.0\nsimulated:0 is lost\n"


OTHER = """
import sys, torch, distruntime as dr
dr.init_master_worker(workers=[sys.argv[1]], quiet=True)
on_cpu, here = torch.ones(3, device=dr.place(0, "cpu")), torch.ones(3, device="remote")
assert here.sum().item() == 3
print("ready", flush=True)
sys.stdin.readline()
print(on_cpu.sum().item())
try:
    here.sum().item()
except torch.AcceleratorError as error:
    print(str(error).partition(":")[0] + ":0 is lost" if " is lost: " in str(error) else error)
dr.shutdown()
"""


def test_events_and_reads_wait_for_no_more_than_they_are_asked_for(start: Start) -> None:
    session(start())
    x = torch.ones(4, device="remote")
    assert (x * 2).sum().item() == 8
    early, event, late = (x + 1).sum(), dr.Event(), dr.Event()
    event.record()
    dr.synchronize()
    with held(0):
        for _ in range(500):
            x = x * 1.0
        late.record()
        event.synchronize()
        assert event.query() and early.item() == 8
        assert not late.query()
    assert x.sum().item() == 4 and late.query()


def test_a_polling_loop_that_goes_on_issuing_ends(start: Start) -> None:
    session(start(delay_us=SLOW))
    x, event = torch.ones(4, device="remote"), dr.Event()
    (x * 2).sum().item()
    y = x * 2
    event.record()
    polls = 0
    while not event.query():
        y = y * 1.0
        polls += 1
        assert polls < 2000
    assert y.sum().item() == 8


def test_many_values_need_few_threads(start: Start) -> None:
    session(start())
    values = [torch.full((10,), float(k), device="remote") for k in range(500)]
    assert all((value == k).all() for k, value in enumerate(dr.fetch(values)))
    assert len(os.listdir(f"/proc/{dr.nodes()[0].pid}/task")) < 30


def test_conjugates_stamps_and_states_are_the_devices_own(start: Start) -> None:
    session(start(delay_us=SLOW))
    assert torch.tensor([1 + 2j]).to("remote")[0].conj().item() == 1 - 2j
    assert torch.remote.get_rng_state(0).shape == (16,)
    place = dr.place(0, 1)
    x, begin, end = torch.ones(4, device=place), dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    with dr.on(0, 1):
        (x * 1.0).sum().item()
        begin.record()
        for _ in range(50):
            x = x * 1.0
        end.record()
    assert begin.elapsed_time(end) > 50 * float(SLOW) / 1000 / 2


def test_an_upload_needs_its_memory_once(start: Start) -> None:
    session(start(memory=str(48 << 20)))
    local = torch.arange(float(1 << 23))
    there = local.to("remote")
    there.copy_(local + 1)
    assert torch.equal(there.cpu(), local + 1)


def test_a_daemon_without_a_session_gives_the_devices_memory_back(start: Start) -> None:
    address = start()
    session(address)
    there = torch.zeros(1 << 22, device="remote")
    assert there.sum().item() == 0
    del there
    dr.shutdown()
    # Whoever looks with a session puts it off: the worker gives the memory back when it has none.
    with Observer([address]) as observer:

        def reserved() -> int:
            (answer,) = observer.ask(AskWorker, STARTING)
            assert answer.value is not None, answer.why
            return answer.value.devices[1].reserved

        assert reserved() >= 4 << 22
        until(lambda: reserved() == 0)


def test_sessions_draw_alike_from_their_start(start: Start) -> None:
    """The second session's CPU and device begin where the first one's began."""
    address, seen = start(), []
    for _ in range(2):
        session(address)
        places = ["remote", dr.place(0, "cpu")]
        seen.append(torch.cat([torch.rand(4, device=place).cpu() for place in places]))
        dr.shutdown()
    assert torch.equal(*seen)


def test_a_recorded_backward_on_another_stream_is_right(start: Start) -> None:
    """Autograd runs it on its forward's stream, which takes its results' memory again when they are freed."""
    session(start(delay_us="300", scribble="1"))
    stream = dr.Stream(0)
    query = torch.randn(2, 4, 16, 8)
    local = query.clone().requires_grad_()
    F.scaled_dot_product_attention(local, local, local).sum().backward()
    for _ in range(10):
        there = query.to("remote").requires_grad_()
        with dr.stream(stream):
            loss = F.scaled_dot_product_attention(there, there, there).sum()
        loss.backward()
        with dr.stream(stream):
            for _ in range(6):
                torch.full((2, 4, 16, 8), 7.0, device="remote")
        torch.testing.assert_close(there.grad.cpu(), local.grad)


def test_reads_see_the_values_of_their_place_in_the_program(start: Start) -> None:
    """A copy to the host waits for its value's maker alone, and later writes wait for the copy."""
    session(start(delay_us="100", scribble="1"))
    places, streams = [dr.place(0, 0), dr.place(0, 1)], [dr.Stream(0, 0), dr.Stream(0, 0), dr.Stream(0, 1)]
    for seed in range(12):
        choose = random.Random(seed)
        there: list[list[torch.Tensor]] = [[], []]
        here: list[list[torch.Tensor]] = [[], []]
        reads: list[tuple[dr.types.Fetched[torch.Tensor], torch.Tensor]] = []
        for _ in range(120):
            k = choose.randrange(3)
            device = k // 2
            mine, own = there[device], here[device]
            with dr.stream(streams[k] if seed % 3 else None):
                kind = choose.randrange(8)
                if len(mine) < 2 or kind == 0:
                    local = torch.full((choose.choice([6, 5000]),), float(choose.randrange(9)))
                    mine.append(local.to(places[device]))
                    own.append(local)
                    continue
                i = choose.randrange(len(mine))
                if kind in (1, 2):
                    mine[i].add_(kind)
                    own[i] = own[i] + kind
                elif kind == 3:
                    mine.append(mine[i] * 3)
                    own.append(own[i] * 3)
                elif kind == 4:
                    del mine[i], own[i]
                elif kind == 5:
                    there[1 - device].append(mine[i].to(places[1 - device]))
                    here[1 - device].append(own[i])
                else:
                    reads.append((dr.fetch_async(mine[i]), own[i]))
        assert all(torch.equal(read.result(), local) for read, local in reads)
