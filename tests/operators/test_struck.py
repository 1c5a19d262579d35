"""What a signal's handler issues is done, wherever it strikes: at each call of a Python function in turn."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import distruntime as dr
from agree import REMOTE
from distruntime.log.log import BATCH
from distruntime.session.session import active_session
from dynamo import COMPILES
from strikes import Struck, strikes

SIGNAL = signal.SIGUSR1
SLOW = pytest.mark.slow(reason="strikes at some hundred places, as others beside it do")
pytestmark = [
    pytest.mark.filterwarnings("ignore:the program:UserWarning"),
    # torch's compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Kind = Callable[[torch.Tensor, torch.Tensor], object]


class Image(torch.Tensor):
    """A user's class."""


class Strikes:
    """Strikes at every so many calls. Each handler adds 1 to a remote tensor."""

    def __init__(self, every: int) -> None:
        self.sum = torch.zeros(1, dtype=torch.float64).to(REMOTE)
        self.every, self.calls, self.times = every, 0, 0

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.calls += 1
            if self.calls % self.every == 0:
                signal.raise_signal(SIGNAL)

    def _handle(self, *_: object) -> None:
        self.times += 1
        self.sum.add_(1)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = signal.signal(SIGNAL, self._handle)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            signal.signal(SIGNAL, before)


@dr.program
def one_memory(x: torch.Tensor, y: torch.Tensor) -> object:
    return x, x[0], x * 2, y.view(-1)


@dr.remote
def within(x: torch.Tensor) -> object:
    return x[1:], x * 2


def _trained(x: torch.Tensor, y: torch.Tensor) -> object:
    weight = nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([weight], foreach=True)
    for _ in range(2):
        (weight * y).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach()


def _reshaped(x: torch.Tensor, y: torch.Tensor) -> object:
    x.t_()
    x.unsqueeze_(0)
    x.squeeze_(0)
    return x.resize_(2, 2).zero_()


def _layers(x: torch.Tensor, y: torch.Tensor) -> object:
    weight = y[:3].clone().requires_grad_()
    out = F.layer_norm(F.linear(x, weight), (3,)).softmax(-1)
    (out * out).sum().backward()
    return out.detach(), weight.grad


def _compiled(x: torch.Tensor, y: torch.Tensor) -> object:
    return torch.compile(_sines)(x, y)


def _compiled_backward(x: torch.Tensor, y: torch.Tensor) -> object:
    x = x.clone().requires_grad_()
    torch.compile(_sines)(x, y)[0].sum().backward()
    return x.grad


def _sines(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.sin(x) * 2 + y
    return z, z[0]


KINDS: dict[str, Kind] = {
    "program": one_memory,
    "remote function": lambda x, y: within(x),
    "class": lambda x, y: (x.as_subclass(Image) * 2).as_subclass(torch.Tensor),
    "optimizer": _trained,
    "in place": _reshaped,
    "layers": _layers,
    "compiled": _compiled,
    "compiled backward": _compiled_backward,
    "copies": lambda x, y: (copy.deepcopy(x), x.cpu().to(REMOTE)),
    "several results": lambda x, y: (x.topk(2), x.split(1), torch._foreach_mul([x, y], 2.0), x.unbind()),
    "constants": lambda x, y: x + torch.tensor([1.0, 2, 3, 4]).to(REMOTE) + torch.tensor([]).to(REMOTE).sum(),
    "sizes of data": lambda x, y: (x.topk(2), x[x > 0]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
    "inference": torch.inference_mode()(lambda x, y: torch.einsum("ij,ij->i", x, y)),
    "checkpoint": lambda x, y: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "autocast": lambda x, y: torch.autocast("remote", dtype=torch.bfloat16)(torch.matmul)(x, y.t()),
    "factories": lambda x, y: x.new_zeros(3, 2) + torch.arange(2, device=REMOTE),
    "text": lambda x, y: torch.tensor(len(repr(x))),
}


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=COMPILES) if "compiled" in kind else kind for kind in KINDS]
)
def test_what_a_handler_issues_is_done(session: object, kind: str, every: int) -> None:
    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(12.0).view(3, 4).to(REMOTE), torch.ones(3, 4).to(REMOTE)

    function, handlers = KINDS[kind], Strikes(every)
    expected = [leaf.cpu() for leaf in tree_leaves(function(*tensors()))]
    for _ in range(4):
        x, y = tensors()
        with handlers():
            found = function(x, y)
        torch.testing.assert_close([leaf.cpu() for leaf in tree_leaves(found)], expected)
        assert handlers.times and handlers.sum.item() == handlers.times


def _add_1(x: torch.Tensor) -> None:
    x.add_(1)


# Each writes to x. y is a tensor of its place, and z one of another node.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "a number": lambda x, y, z: x.add_(1),
    "a local tensor": lambda x, y, z: x.copy_(torch.full((4,), 7.0)),
    "another one": lambda x, y, z: x.copy_(y),
    "a list": lambda x, y, z: torch._foreach_add_([x], 1.0),
}
WRITES_OF_TWO_NODES: dict[str, Write] = {
    "another node's": lambda x, y, z: x.copy_(z),
    "lists of two nodes": lambda x, y, z: torch._foreach_copy_([x], [z]),
    "a collective": lambda x, y, z: dr.distributed.all_reduce([x, z]),
}
_adds = dr.program(_add_1)
_far_adds = dr.remote(writes=[0])(_add_1)
# These count their writes before they issue anything: a strike between the two counts one too many.
AHEAD: dict[str, Write] = {"a program": lambda x, y, z: _adds(x), "a function": lambda x, y, z: _far_adds(x)}


@pytest.fixture
def no_streams() -> None:
    """Ends the session of the tests before if node 0 has the log's rules for several streams."""
    if dr.is_initialized() and active_session().nodes[0].order is not None:
        dr.shutdown()


def _amid(write: Write, sends: bool, streams: bool) -> list[tuple[bool, bool, str]]:
    """Strike at each place of a write in turn; return whether it counted, whether it came, and the place.

    `sends` is whether the log is sent at once, by whoever issues the write.
    """
    # A log keeps the rules of streams for good, so node 1 has the streams.
    here, there = ("remote:1", "remote:0") if streams else ("remote:0", "remote:1")
    node = active_session().nodes[int(streams)]
    if streams:
        dr.Stream(device=here)
    assert (node.order is not None) == streams
    y, z = torch.full((4,), 7.0, device=here), torch.full((4,), 7.0, device=there)
    write(torch.zeros(4, device=here), y, z)
    found = []
    for strike in strikes():
        x = torch.zeros(4, device=here)
        before = x._version
        # Nothing is under way then, and no acknowledgement comes between.
        dr.synchronize()
        node.enough = 0 if sends else BATCH
        try:
            with strike:
                write(x, y, z)
        except Struck:
            pass
        found.append((x._version > before, bool(x.any()), strike.struck))
        assert found[-1][:2] != (False, True), strike.struck
    # The last ones came behind it.
    assert len(found) > 5 and found[-1][:2] == (True, True)
    return found


@pytest.mark.parametrize(
    ("sends", "streams"),
    [(False, False), (True, False), (False, True), pytest.param(True, True, marks=SLOW)],
)
@pytest.mark.parametrize(
    "write",
    [*WRITES.values(), *(pytest.param(write, marks=SLOW) for write in WRITES_OF_TWO_NODES.values())],
    ids=[*WRITES, *WRITES_OF_TWO_NODES],
)
def test_a_write_counts_where_a_signal_strikes_amid_it(
    no_streams: None, session: object, write: Write, sends: bool, streams: bool
) -> None:
    for counted, came, struck in _amid(write, sends, streams):
        assert counted == came, struck


@SLOW
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("write", AHEAD.values(), ids=AHEAD)
def test_no_write_comes_that_does_not_count(
    no_streams: None, session: object, write: Write, streams: bool
) -> None:
    _amid(write, False, streams)
