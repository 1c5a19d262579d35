"""`torch.Generator(device="remote")`: a generator of random numbers whose state lives on a worker.

Around each draw with it stand three instructions: the worker keeps its own state, takes the generator's,
draws, and changes them back. Nobody waits. It draws what a generator of this process draws after the same
seed.

torch's C++ takes a generator of its own kind only, and hands a new Python object for it to the kernel. So a
remote generator carries one of this process's CPU, which is seeded with a number that nobody else has, and by
that number it is found again.
"""

from __future__ import annotations

import secrets
import struct
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

import torch

from ..errors import NotSupportedError, of_caller, without_our_frames
from ..log.handle import Residence
from ..log.log import relieve
from ..operators.alias_info import Operator
from ..operators.ask_worker import unanswered
from ..operators.new_calls import draws
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..session.session import active_session, session_of_log
from ..session.spelling import indexed, is_remote
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor, saving
from ..wire.shield import shield
from .on_import import when_imported
from .random import draw_from, give_back

_Own = torch._C.Generator
# torch seeds a new generator so.
_DEFAULT_SEED = 67280421310721
_remote: weakref.WeakValueDictionary[int, RemoteGenerator] = weakref.WeakValueDictionary()


class _Kind(type(_Own)):  # type: ignore[misc]
    """The class of `torch.Generator`: it makes a remote generator for a place, and torch's own otherwise."""

    @without_our_frames
    def __call__(cls, device: object = None) -> torch.Generator:
        if cls is not Generator:
            made: torch.Generator = super().__call__(device)
            return made
        if is_remote(device):
            return RemoteGenerator(device)
        return _Own() if device is None else _Own(device)  # type: ignore[arg-type]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Own) if cls is Generator else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, _Own) if cls is Generator else type.__subclasscheck__(cls, other)


class Generator(_Own, metaclass=_Kind):
    """torch's own generator, or one on a worker for `device="remote"` or a place."""


def _refusing(name: str) -> Callable[..., NoReturn]:  # type: ignore[explicit-any]
    def refuse(*_: object) -> NoReturn:
        """Refuse."""
        raise NotSupportedError(
            f"Generator.{name} is for CUDA graphs of this process; a generator on a worker has "
            "get_state, set_state and clone_state"
        )

    return refuse


class RemoteGenerator(Generator):
    """A generator at a place of the session. Nothing here blocks."""

    def __new__(cls, device: str | torch.device) -> RemoteGenerator:
        """Make one; torch's own would look for the device here."""
        return super().__new__(cls)

    def __init__(self, device: str | torch.device) -> None:
        self._home = indexed(active_session().places, torch.device(device))
        if self._home.node.members:
            raise NotSupportedError(
                f"a generator lives at one place, and {self._home.place} are several: make one for each "
                "member's place, or seed them with mesh.manual_seed(...)"
            )
        self._number = secrets.randbits(63)
        _Own.manual_seed(self, self._number)
        self._pristine = _Own.get_state(self)
        _remote[self._number] = self
        self.manual_seed(_DEFAULT_SEED)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The place that it draws at."""
        return self._home.device

    def manual_seed(self, seed: int) -> RemoteGenerator:
        """Seed it, and return it."""
        number = int(seed)
        if not -(1 << 63) <= number < 1 << 64:
            raise of_caller(RuntimeError("Overflow when unpacking long long"))
        self._seed = number % (1 << 64)
        if self._home.has_cpu_kernels:
            self.set_state(_Own().manual_seed(self._seed).get_state())
        else:
            # A GPU's generator has a seed and an offset.
            self.set_state(torch.frombuffer(bytearray(struct.pack("<Qq", self._seed, 0)), dtype=torch.uint8))
        return self

    def seed(self) -> int:
        """Seed it with a number that nobody knows, and return that."""
        self.manual_seed(secrets.randbits(53))
        return self._seed

    def initial_seed(self) -> int:
        """Return the last seed."""
        return self._seed

    @without_our_frames
    def get_state(self) -> torch.Tensor:
        """Return its state, a byte tensor on the worker; what is drawn later does not change it."""
        return self._state.clone()

    @without_our_frames
    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        """Take a state, remote or local, and return this generator."""
        if new_state.dtype != torch.uint8:
            raise of_caller(TypeError("expected a torch.ByteTensor, but got " + new_state.type()))
        home = self._home
        home.node.session.require_open()
        places = session_of_log(home.node).places
        if "cpu" in places.devices(home.place.node):
            home = places.residence(places.place(home.place.node, "cpu"))
        found, wanted = new_state.numel(), getattr(self, "_state", new_state).numel()
        if found != wanted:
            text = (
                f"Expected a CPUGeneratorImplState of size {wanted} but found the input RNG state size to be "
                f"{found}"
            )
            raise of_caller(RuntimeError(text if self._home.has_cpu_kernels else "RNG state is wrong size"))
        whole = new_state.detach().reshape(-1)
        if isinstance(whole, DistributedTensor):
            state = whole.to(home.device, copy=True)
        else:
            # As one instruction it is a seed, which `dr.cancel` leaves.
            state = wrap(DistributedTensor, upload(whole.cpu(), home))
        assert isinstance(state, DistributedTensor)
        self._state = state
        return self

    def clone_state(self) -> RemoteGenerator:
        """Return another generator at its place, with its state."""
        twin = RemoteGenerator(self.device)
        twin.set_state(self._state)
        twin._seed = self._seed
        return twin

    def draw(
        self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object], place: Residence
    ) -> object:
        """Issue a call that draws from it."""
        self._require_unused()
        self._home.node.session.require_open()
        if place is not self._home:
            raise of_caller(
                RuntimeError(
                    f"Expected a '{place.device}' device type for generator but found '{self.device}': "
                    f"the generator draws on {self._home.place}, and {func} on {place.place}"
                )
            )
        if "out" in kwargs:
            return self._draw_into(func, args, kwargs, place)
        relieve(place.node)
        # Another thread that draws comes before or after.
        # Ctrl-C waits until the place draws from its own state again.
        targets, drawn = _written(func, args), None
        with shield, place.node.lock:
            own = draw_from(self._state, self._home, targets)
            unanswered.now = True
            try:
                drawn = func(*args, **kwargs)
            finally:
                unanswered.now = False
                made = drawn if isinstance(drawn, (tuple, list)) else (drawn,)
                results = [one for one in made if isinstance(one, DistributedTensor)]
                self._state = give_back(own, self._state, self._home, [*targets, *results])
        return drawn

    def _draw_into(
        self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object], place: Residence
    ) -> torch.Tensor:
        """Draw, and copy: how large `out` must be may be known to the worker alone."""
        overload = func._overloadname.removesuffix("out").removesuffix("_") or "default"
        plain: Operator = getattr(func.overloadpacket, overload)
        out, rest = kwargs["out"], {name: value for name, value in kwargs.items() if name != "out"}
        assert isinstance(out, torch.Tensor)
        if any(argument.name == "dtype" for argument in plain._schema.arguments):
            rest |= {"dtype": out.dtype, "device": place.lazy}
        drawn = self.draw(plain, args, rest, place)
        assert isinstance(drawn, torch.Tensor)
        if drawn.dtype != out.dtype:
            raise of_caller(
                RuntimeError(f"Expected out tensor to have dtype {drawn.dtype}, but got {out.dtype} instead")
            )
        if out.shape != drawn.shape:
            out.resize_(drawn.shape)
        return out.copy_(drawn)

    def _require_unused(self) -> None:
        if not torch.equal(_Own.get_state(self), self._pristine):
            raise of_caller(RuntimeError(self._misused()))

    def _misused(self) -> str:
        return (
            f"Expected a 'cpu' device type for generator but found '{self.device}': this generator drew "
            "numbers for a tensor of this process, and these do not follow its seed. "
            "Use torch.Generator() for tensors of this process"
        )

    def __del__(self) -> None:
        if not hasattr(self, "_pristine"):
            return
        # A collection may come while somebody's mode is on, such as that of a compilation.
        with torch._C._DisableTorchDispatch():
            same = torch.equal(_Own.get_state(self), self._pristine)
        if not same:
            warnings.warn(self._misused(), stacklevel=2)

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteGenerator:
        return self.clone_state()

    # torch's stub says less than torch's own returns.
    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]
        # `torch.save` makes a generator of this process of it, as it makes local tensors of remote ones.
        if saving.get() is not None and self._home.has_cpu_kernels:
            local = _Own()
            local.set_state(fetch(self._state))
            reduced: tuple[object, ...] = local.__reduce__()
            return reduced
        raise NotSupportedError(
            "a generator at a place cannot be pickled; save its state: "
            "torch.save(generator.get_state(), path)"
        )

    get_offset, set_offset = _refusing("get_offset"), _refusing("set_offset")
    graphsafe_get_state = _refusing("graphsafe_get_state")
    graphsafe_set_state = _refusing("graphsafe_set_state")


def _written(func: Operator, args: Sequence[object]) -> list[DistributedTensor]:
    """Return what a call draws into."""
    return [
        value
        for argument, value in zip(func._schema.arguments, args)
        if argument.is_write and isinstance(value, DistributedTensor)
    ]


def _draw(
    generator: object,
    func: Operator,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    place: Callable[[], Residence],
) -> object:
    """Issue a call with a generator, if that is remote."""
    if not isinstance(generator, _Own):
        return NotImplemented
    found = _remote.get(generator.initial_seed())
    if found is None:
        return NotImplemented
    given = [None if value is generator else value for value in args]
    named = {name: None if value is generator else value for name, value in kwargs.items()}
    return found.draw(func, given, named, place())


def _break_graphs(module: ModuleType) -> None:
    """Have `torch.compile` break its graph where a remote generator is used, as it does at torch's own.

    It would hand the C++ of a draw an empty generator.
    """
    # torch 2.15 has given the class another name.
    names = vars(module)
    variable = names.get("TorchScriptObjectVariable") or names["CustomClassObjectVariable"]
    own = variable.is_matching_cls

    def is_matching_cls(cls: type) -> bool:
        return not issubclass(cls, RemoteGenerator) and own(cls)

    variable.is_matching_cls = staticmethod(is_matching_cls)


def install_generators() -> None:
    """Let `torch.Generator` make generators for places, from now on."""
    torch.Generator = Generator  # type: ignore[misc]
    draws.append(_draw)
    when_imported("torch._dynamo.variables.script_object", _break_graphs)
