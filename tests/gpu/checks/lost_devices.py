"""Checks 7, 8 and 19: a device-side assert, a conjugate that is read, and no memory."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

import distruntime as dr
from box import Box, first_line, raised, until
from listing import check


@check(
    7,
    "an index out of range",
    does="looks up row 99 of 4 in an embedding, reads the sum, and then asks what still works",
    failure=(
        "finding A2: a device-side assert ends the GPU's context. It must be an error within a second, "
        "`dr.nodes()` must answer, CPU values must stay readable, and `dr.restart(0, force=True)` must give "
        "a working GPU. If the read hangs, the thread that waits for the GPU has died: look at "
        "worker/distruntime_worker/log/answers.py and machine/. If the session ends with ProtocolError, an "
        "error of the device was taken for nonsense: look at session/executor.py."
    ),
    seconds=60,
)
def index_out_of_range(box: Box) -> None:
    with box.session() as places:
        place, cpu = places[0], dr.place(0, "cpu")
        kept = torch.arange(4.0, device=cpu)
        table = torch.zeros(4, 2, device=place)
        good, bad = (torch.tensor([k], device=place) for k in (1, 99))
        for _ in range(3):
            box.require(
                torch.nn.functional.embedding(good, table).sum().item() == 0, "the good call is wrong"
            )
        began = time.monotonic()
        error = raised(lambda: torch.nn.functional.embedding(bad, table).sum().item())
        took = time.monotonic() - began
        box.saw(f"after {took:.2f} s: {error[:900] or 'no error'}")
        box.require(error, "no error: the sum of a row that does not exist was read")
        box.require(took < 10, f"the error came after {took:.1f} s, expected within a second")
        box.saw(f"state of node 0: {dr.nodes()[0].state} {dr.nodes()[0].why}")
        value = raised(lambda: box.require(kept.sum().item() == 6, "the CPU's value has changed"))
        box.saw(f"the worker's CPU value: {first_line(value) or 'is there'}")
        again = raised(lambda: (torch.ones(2, device=place) + 1).sum().item())
        box.saw(f"the next operation there: {first_line(again) or 'works'}")
        pid = dr.nodes()[0].pid
        with suppress(dr.DistruntimeError, RuntimeError, IndexError):
            # What has failed is read here, and the restart begins with nothing unread.
            dr.synchronize()
        later = raised(lambda: box.require(kept.sum().item() == 6, "the CPU's value has changed"))
        box.saw(f"the CPU value after dr.synchronize(): {first_line(later) or 'is there'}")
        dr.restart(0, force=True)
        found = (torch.ones(3, device=place) * 2).sum().item()
        box.saw(f"after dr.restart(0, force=True): 3 x 2 = {found:g}")
        box.require(found == 6, "the restarted worker computes something else")
        box.require(not value, f"a CPU's value was lost with the GPU: {value}")
        box.require(not later, f"the worker (pid {pid}) did not live on: {first_line(later)}")
        if box.simulate_cuda:
            box.leave_out("that the context is lost", "needs a device that keeps its errors")
            return
        box.require(again, "an operation after a lost context gave a value")


@check(
    8,
    "a conjugate that is read",
    does="reads (1+2j).conj() by item, tolist, fetch, complex() and cpu",
    failure=(
        "finding B5: a copy to pinned memory is conjugated before it has arrived (pytorch#146286). Look at "
        "HostCopy in worker/distruntime_worker/values/streams.py: it must resolve the bits first."
    ),
)
def conjugates(box: Box) -> None:
    with box.session() as places:
        x = torch.tensor([1 + 2j, 3 - 4j]).to(places[0])
        expected = [1 - 2j, 3 + 4j]
        for _ in range(3):
            found = {
                "item": [x[0].conj().item(), x[1].conj().item()],
                "tolist": x.conj().tolist(),
                "fetch": dr.fetch(x.conj()).resolve_conj().tolist(),
                "cpu": x.conj().cpu().resolve_conj().tolist(),
                "complex": [complex(x[0].conj()), complex(x[1].conj())],
                "imag": dr.fetch(x.conj().imag).resolve_neg().tolist(),
            }
            expected_of = {name: expected for name in found}
            # It has the negative bit.
            expected_of["imag"] = [-2.0, 4.0]
            wrong = {name: value for name, value in found.items() if value != expected_of[name]}
            box.require(not wrong, f"got {wrong}, expected {expected}, and the imaginary parts")
        box.saw(f"{', '.join(found)}: {found['item']}")


@check(
    19,
    "no memory",
    does="asks for twice the memory that is free, then lets a training step run out in its backward pass",
    failure=(
        "an allocation that fails must be torch.OutOfMemoryError with the holders' lines, and the worker "
        "must live. If the worker ended, look at its log; if the memory stays taken, a failed instruction "
        "keeps its operands: look at worker/distruntime_worker/values/objects.py and "
        "distruntime/session/failures.py."
    ),
    seconds=60,
)
def no_memory(box: Box) -> None:
    if box.simulate_cuda:
        with box.session() as places:
            huge = torch.empty(1 << 50, dtype=torch.uint8, device=places[0])
            error = raised(huge[0].item)
            box.saw(error[:600])
            box.require("memory" in error, f"got {error[:300]!r}, expected an error about memory")
            del huge
            box.require(torch.ones(4, device=places[0]).sum().item() == 4, "the worker computes nothing more")
        return box.leave_out("a GPU's allocator", "needs an accelerator")
    with box.session() as places:
        place = places[0]
        remote = torch.remote
        kept = torch.ones(1 << 20, device=place)
        free, total = remote.mem_get_info(place)
        box.saw(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        huge = torch.empty(2 * free, dtype=torch.uint8, device=place)
        error = raised(huge[0].item)
        box.saw(error[:900])
        box.require(error.startswith(("OutOfMemoryError", "RemoteError")), f"got {error[:200]!r}")
        if box.cuda:
            box.require("held there" in error, "the text names no holders")
        else:
            box.saw("the text names holders" if "held there" in error else "the text names no holders")
        del huge
        box.require(kept.sum().item() == 1 << 20, "what was there has changed")
        # Half of what is free, so that the forward pass fits and the gradients do not.
        count = int(free * 0.45) // 4
        weights = [torch.ones(count, device=place, requires_grad=True)]
        out = raised(lambda: ((weights[0] * 2).square().sum().backward(), dr.synchronize()))
        box.saw(f"a step that runs out: {first_line(out) or 'it fitted'}")
        box.require("memory" in out, "the step fitted, so nothing was shown")
        weights.clear()
        # The graph's tensors go with the error.
        until(
            lambda: remote.memory_allocated(place) < 1 << 28,
            20,
            "the memory of the failed step is given back",
        )
        fits = torch.ones(1 << 22, device=place)
        box.require(fits.sum().item() == 1 << 22, "the next allocation fails")
        box.saw("the worker lives, and the memory came back")
