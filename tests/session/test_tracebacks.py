"""What a traceback shows of a simple mistake: the user's lines and torch's, as locally, and none of ours."""

from __future__ import annotations

import atexit
import io
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

OURS = str(Path(dr.__file__).parent)


def frames_below(error: BaseException) -> list[str]:
    """Return the frames below this file's last one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max(k for k, frame in enumerate(frames) if frame.filename == __file__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[last + 1 :]]


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([9], device=x.device)]


def _autocast(x: torch.Tensor) -> object:
    with torch.autocast(REMOTE, dtype=torch.bfloat16):
        return x @ x[:2]


def _into_node_1(x: torch.Tensor) -> object:
    with dr.on(1):
        return x + torch.ones(3, 3)


MISTAKES: dict[str, Callable[[torch.Tensor], object]] = {
    "a meta kernel in Python": lambda x: x @ x[:2],
    "a meta kernel in C++": lambda x: x.reshape(4, 4),
    "dtypes": lambda x: x @ x.double(),
    "a local operand": lambda x: x + torch.ones(3),
    "another node": _into_node_1,
    "in autocast": _autocast,
    "a place that is none": lambda x: torch.zeros(3, device="remote:77"),
    "a factory's arguments": lambda x: torch.eye(-1, device=x.device),
    "a tensor class of ours": lambda x: dr.factories.FloatTensor(1.5),
    "the operator that waits": lambda x: torch.nonzero(poisoned(x)),
    "cpu": lambda x: poisoned(x).cpu(),
    "to": lambda x: poisoned(x).to("cpu"),
    "item": lambda x: poisoned(x).sum().item(),
    "item of several": lambda x: x.item(),
    "bool": lambda x: bool(poisoned(x).sum()),
    "tolist": lambda x: poisoned(x).tolist(),
    "float": lambda x: float(poisoned(x).sum()),
    "format": lambda x: f"{poisoned(x).sum():.3f}",
    "fetch": lambda x: dr.fetch({"x": poisoned(x)}),
    "a future": lambda x: dr.fetch_async(poisoned(x)).result(),
    "synchronize": lambda x: poisoned(x) is None or dr.synchronize(),
    "numpy": lambda x: x.numpy(),
    "to nowhere": lambda x: x.to(node=9),
    "data": lambda x: setattr(x, "data", torch.ones(3, 3)),
    "pickle": lambda x: pickle.dumps(x),
    "shared memory": lambda x: x.share_memory_(),
    "copy_": lambda x: x.copy_(torch.ones(2, 2)),
    "local.copy_": lambda x: torch.ones(2, 2).copy_(x),
    "a start": lambda x: dr.init_master_worker(world_size=0),
    "a misspelt start": lambda x: dr.init_master_worker(worldsize=2),  # type: ignore[call-arg]
    "a session that is not there": lambda x: dr.init_master_worker(session="nobody", resume=True),
    "another start": lambda x: dr.init_master_worker(world_size=7),
    "place": lambda x: dr.place(9),
    "too many arguments": lambda x: dr.place(0, "cpu", 3, 4),  # type: ignore[call-arg]
    "on": lambda x: dr.on(9),
    "lookup": lambda x: dr.lookup("nobody"),
    "restart": lambda x: dr.restart(9),
    "config": lambda x: dr.config(num_thread=1),  # type: ignore[call-arg]
    "too few arguments": lambda x: dr.publish(x),  # type: ignore[call-arg, arg-type]
    "a device of no type": lambda x: x.to("remot"),
    "a name of none": lambda x: dr.nodez(),  # type: ignore[attr-defined]
    "memory": lambda x: dr.memory(9),
    "load": lambda x: dr.load("/nowhere"),
    "detach": lambda x: dr.detach(),
    "a stream": lambda x: dr.Stream(9),
    "a partition": lambda x: dr.mesh.Partition([9], 1),
    "what is scattered": lambda x: dr.mesh.Partition([0], 1).scatter([1]),  # type: ignore[arg-type]
    "what is gathered": lambda x: dr.mesh.Partition([0], 1).gather(x),  # type: ignore[arg-type]
    "a primitive": lambda x: dr.primitives.all_gather(x, dr.mesh.Partition([0], 1), 0),  # type: ignore[arg-type]
    "lines": lambda x: dr.lines.all_reduce("dp", x),  # type: ignore[arg-type]
    "attention": lambda x: dr.lines.attention("tp", x, x, x),  # type: ignore[arg-type]
    "an untyped storage": lambda x: torch.UntypedStorage(3, device=REMOTE),
    "a storage": lambda x: torch.ones(3).untyped_storage().to(REMOTE),
    "a device's memory": lambda x: torch.remote.memory_allocated(9),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows_no_frame_of_ours(session: object, name: str) -> None:
    x = torch.ones(3, 3, device=REMOTE)
    # They have several classes, and their texts are held elsewhere.
    with pytest.raises(Exception) as caught:
        MISTAKES[name](x)
    assert [frame for frame in frames_below(caught.value) if frame.startswith(OURS)] == []


def test_torchs_own_frames_stay(session: object) -> None:
    """They say which layer of a model it was, as they do locally."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 4)).to(REMOTE)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(2, 4, device=REMOTE))
    frames = frames_below(caught.value)
    assert frames and not [frame for frame in frames if frame.startswith(OURS)]
    assert frames[-1].endswith("forward") and "linear.py" in frames[-1]


def test_a_module_that_is_sent_nowhere(session: object) -> None:
    with pytest.raises(dr.errors.PlacementError) as caught:
        torch.nn.Linear(2, 2).to("remote:77")
    assert not [frame for frame in frames_below(caught.value) if frame.startswith(OURS)]


def test_a_backward_pass_shows_torchs_frames_alone(session: object) -> None:
    x = torch.ones(3, 3, device=REMOTE, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        (x * 2).backward(torch.ones(2, 2, device=REMOTE))
    assert not [frame for frame in frames_below(caught.value) if frame.startswith(OURS)]


def test_a_defect_shows_all_frames(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the caller has done wrong is shown so."""

    def stumble(*args: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("distruntime.operators.new_calls.propagate", stumble)
    with pytest.raises(KeyError) as caught:
        torch.ones(3, 1, 7, device=REMOTE).sin()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert len([file for file in files if file.startswith(OURS)]) >= 2


def test_ipython_shows_the_cells_line_alone(
    session: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = interactive.InteractiveShell.instance()
    try:
        shell.run_line_magic("colors", "nocolor")
        shown = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", shown)
            shell.run_cell("import torch, distruntime\nx = torch.ones(3, 3, device='remote')\nx @ x[:2]")
        text = shown.getvalue()
        assert "mat1 and mat2 shapes cannot be multiplied" in text and "x @ x[:2]" in text, text
        assert "dispatch" not in text and str(Path(OURS).name) + "/" not in text, text
    finally:
        # Otherwise it writes its history at the process's end, when its folder is gone.
        shell.atexit_operations()
        atexit.unregister(shell.atexit_operations)
        interactive.InteractiveShell.clear_instance()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "ipc:///nowhere/at-all"])
def test_an_error_of_a_start_stands_on_its_own_line(
    fresh_session: Callable[..., Any], capsys: pytest.CaptureFixture[str], address: str
) -> None:
    with pytest.raises((dr.errors.ConfigurationError, dr.errors.ConnectionFailed)) as caught:
        dr.init_master_worker(workers=[address], timeout=0.2, quiet=False)
    said = capsys.readouterr().out
    # An address that cannot be is told before anything is said.
    assert said == "" or said.endswith("\n")
    assert [frame for frame in frames_below(caught.value) if frame.startswith(OURS)] == []


# The worker's own traceback


def test_an_operators_failure_has_no_traceback_of_the_worker(session: object) -> None:
    with pytest.raises(IndexError) as caught:
        poisoned(torch.ones(3, 3, device=REMOTE)).cpu()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ is False
    text = "".join(traceback.format_exception(caught.value))
    assert "_ops.py" not in text and "worker traceback" not in text


class Stumbling(dr.distributed.DataChannel):
    """A user's code on a worker, with a mistake of its own."""

    capabilities = dr.distributed.Capabilities(frozenset({"send"}))

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        """Lose it."""

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        raise LookupError("there is no such road")

    def abort(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


def test_users_code_on_a_worker_is_in_its_traceback(fresh_session: Callable[..., Any]) -> None:
    dr.distributed.register_data_channel("Stumbling", Stumbling)
    with fresh_session(data_channel="Stumbling"):
        with pytest.raises(dr.errors.NodeFailed, match="no such road") as caught:
            torch.ones(3, device=REMOTE).to(node=1).cpu()
        text = "".join(traceback.format_exception(caught.value))
        assert "worker traceback, node 1" in text
        assert 'raise LookupError("there is no such road")' in text and "in receive" in text
