"""Importing distruntime changes nothing for local tensors, and a session changes nothing for them either.

Each check is plain PyTorch on local tensors. All run before the import, after it, in a session, and after the
session.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamo import NO_COMPILER

_CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    _CHECKS[function.__name__] = function
    return function


def _loader(**options: object) -> list[torch.Tensor]:
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    with warnings.catch_warnings():
        # torch always says this on such a machine.
        warnings.filterwarnings("ignore", message=".*no accelerator is found")
        return [batch for (batch,) in DataLoader(data, batch_size=2, **options)]  # type: ignore[arg-type]


@_check
def pinned_loader() -> None:
    assert torch.equal(torch.cat(_loader(pin_memory=True)), torch.arange(12.0).view(6, 2))


@_check
def forked_loader_workers() -> None:
    batches = _loader(num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    assert torch.equal(torch.cat(batches), torch.arange(12.0).view(6, 2))


@_check
def forked_and_pinned_loader() -> None:
    assert len(_loader(num_workers=1, multiprocessing_context="fork", pin_memory=True)) == 3


@_check
def loader_with_random_workers() -> None:
    torch.manual_seed(0)
    first = _loader(shuffle=True)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(first, _loader(shuffle=True), strict=True))


def _child(queue: multiprocessing.Queue[float]) -> None:
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    queue.put(float(x.grad.sum()))


@_check
def forked_process() -> None:
    # A device guard that claims to have devices makes autograd start threads, after which no child may run
    # backward.
    torch.ones(2, requires_grad=True).sum().backward()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    process.join(30)
    assert process.exitcode == 0 and queue.get(timeout=10) == 6.0


@_check
def accelerator() -> None:
    """This machine has none; a GPU box has its own, and must go on having it."""
    here = torch.accelerator.is_available()
    assert here == (torch.cuda.is_available() or torch.backends.mps.is_available())
    current = torch.accelerator.current_accelerator(check_available=True)
    assert (current is not None) == here and (current is None or current.type != "remote")


@_check
def random_state() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = torch.rand(3)
    # By default it saves the current accelerator's state too.
    with torch.random.fork_rng():
        torch.rand(5)
    second = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)
    assert torch.initial_seed() == 0 and torch.Generator().device == torch.device("cpu")
    expected = torch.tensor([0.4962565899, 0.7682217956, 0.0884774327])
    # torch draws these numbers for this seed, and has since 1.x.
    torch.testing.assert_close(first, expected)


@_check
def autocast() -> None:
    x, model = torch.randn(3, 4), nn.Linear(4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            model(x).dtype is torch.bfloat16
            and (x @ x.t()).dtype is torch.bfloat16
            and (x + x).dtype is torch.float32
        )
    assert model(x).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")


@_check
def compiled() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    # AOTAutograd imports torch's compiler.
    for backend in ("eager",) if NO_COMPILER else ("eager", "aot_eager"):
        step = torch.compile(lambda v: torch.relu(model(v)).sum(), backend=backend, fullgraph=True)
        step(x).backward()
        torch.testing.assert_close(step(x), torch.relu(model(x)).sum())
    torch._dynamo.reset()


@_check
def checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    gradients = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        x = torch.ones(4, 8, requires_grad=True)
        out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        out.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@_check
def saved_and_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    for other in (loaded, pickle.loads(pickle.dumps(model)).state_dict(), copy.deepcopy(model).state_dict()):
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    x = torch.arange(4.0)
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr() == torch.from_numpy(x.numpy()).data_ptr()
    assert x.share_memory_() is x and x.is_shared()


@_check
def modules_are_converted() -> None:
    model = nn.Linear(2, 2)
    held = weakref.ref(model.weight)
    weight = model.weight
    model.half().float().to("cpu", torch.float64).requires_grad_(False)
    assert model.weight is weight is held()
    assert (
        nn.Linear(2, 2).to("meta").weight.is_meta
        and nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight.device.type == "cpu"
    )
    assert not torch.__future__.get_swap_module_params_on_conversion()


@_check
def optimizers() -> None:
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        for options in ({}, {"foreach": True}, {"fused": True}):
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = make(model.parameters(), lr=0.1, **options)
            first = model(torch.ones(4, 3)).square().mean()
            first.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            assert model(torch.ones(4, 3)).square().mean() < first


@_check
def texts_and_numbers() -> None:
    x = torch.tensor([1.0, 2.5])
    assert repr(x) == "tensor([1.0000, 2.5000])" and f"{x[1]:.2f}" == "2.50" and x.tolist() == [1.0, 2.5]
    assert x.device == torch.device("cpu") and torch.get_default_device() == torch.device("cpu")
    assert (
        torch.zeros(2).device.type
        == torch.tensor([1, 2]).device.type
        == nn.Linear(1, 1).weight.device.type
        == "cpu"
    )
    assert type(x.data) is torch.Tensor and type(x + 1) is torch.Tensor


@_check
def profiled() -> None:
    with warnings.catch_warnings():
        # torch 2.11 says that the next cycle forgets the events of this one. Here is one cycle.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        _profile()


def _profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (torch.ones(3) + 1).sum()
    assert any(event.key == "aten::add" for event in profile.key_averages())


@_check
def exported_and_scripted() -> None:
    model = nn.Linear(3, 2)
    x = torch.ones(1, 3)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


@_check
def transforms() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(torch.func.hessian(lambda v: (v**3).sum())(x), torch.diag(6 * x))
    torch.testing.assert_close(torch.func.vmap(torch.square)(x), x * x)
    assert torch.autograd.gradcheck(torch.sin, x.double().requires_grad_())


@_check
def packed_sequences() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(3, 4, 2), torch.tensor([4, 3, 1]), batch_first=True
    )
    assert nn.LSTM(2, 3)(packed)[1][0].shape == (1, 3, 3)


@_check
def other_layouts() -> None:
    x = torch.eye(3)
    assert torch.equal(x.to_sparse().to_dense(), x) and torch.equal(x.to_sparse() @ x, x)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse


def _run_all(state: str) -> None:
    """What the child process below runs, in three states."""
    for name, check in _CHECKS.items():
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"{name} fails {state}") from error


@pytest.mark.parametrize("name", list(_CHECKS))
@pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:.torch.jit.:DeprecationWarning",
    "ignore::FutureWarning",
)
def test_in_a_session(session: object, name: str) -> None:
    x = torch.ones(3, device="remote", requires_grad=True)
    _CHECKS[name]()
    (x * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0], "the session survived"


_SCRIPT = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("local_code", sys.argv[1])
local_code = importlib.util.module_from_spec(spec)
sys.modules["local_code"] = local_code
spec.loader.exec_module(local_code)
torch.set_num_threads(1)
local_code._run_all("before the import")
def state():
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return torch._C._get_privateuse1_backend_name(), torch.nn.Module._apply, swaps

before = state()
import distruntime
assert before == state()
assert not hasattr(torch, "remote")
local_code._run_all("after the import")
with distruntime.init_master_worker():
    x = torch.ones(3, device="remote")
    local_code._run_all("in a session")
    assert x.sum().item() == 3.0
local_code._run_all("after the session")
print("all right")
"""


@pytest.mark.slow(reason="two processes import torch and run all checks: 10.4 s")
@pytest.mark.timeout(180)
def test_before_and_after_the_import_and_the_session() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(Path(__file__))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("all right")
