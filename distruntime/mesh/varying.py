"""Numbers that differ from member to member, and the few steps of torch that depend on the rank.

In a program of one rank per process, a rank is an int. Here one process speaks for all members, so what
depends on the rank is a symbolic int that knows each member's value: torch has one, for its
single-process debugging class LocalTensor, and marks the functions of DTensor that are to run once for
each rank (`maybe_run_for_local_tensor`). On a mesh's tensors these run once for each member, on the
members' own shards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import _local_tensor
from torch.fx.experimental import _constant_symnode

from ..errors import UsageError
from ..log.handle import Residence
from ..log.mesh_log import MeshLog
from ..log.shards import mesh_of
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..tensors.tensor import DistributedTensor

# It stands for a size of which nothing is known.
_LARGE = 1 << 40
# A mesh keeps so many tensors of one number for each member.
_MOST_NUMBERS = 64


class _Varying(_local_tensor.LocalIntNode):
    """torch's own node, but it refuses questions that have no one answer. torch's node answers: not equal."""

    def int_(self) -> NoReturn:
        raise self._refused("one int was asked of it")

    def guard_int(self, file: str, line: int) -> NoReturn:
        self.int_()

    def wrap_int(self, num: int) -> _Same:
        """Return an int that is the same on all members, to be computed with together with this one."""
        return _Same(num)

    def int_truediv(self, other: Any) -> NoReturn:
        raise self._refused("a float was asked of it (a tensor can be divided by it: x.sum() / n)")

    def sym_float(self) -> NoReturn:
        self.int_truediv(None)

    def pow_by_natural(self, other: Any) -> Any:
        """Return each member's power."""
        others = getattr(other, "_local_ints", None)
        return _Varying(
            {
                k: n ** (other.maybe_as_int() if others is None else others[k])
                for k, n in self._local_ints.items()
            }
        )

    def has_hint(self) -> bool:
        """Return False: torch's C++ would take a hint for the number."""
        return False

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._local_ints.values()))
        return f"<by member: {shown}>"

    __str__ = _graph_repr = _str = __repr__

    def _refused(self, what: str) -> UsageError:
        shown = ", ".join(f"member {k}: {n}" for k, n in list(self._local_ints.items())[:4]) + (
            ", ..." if len(self._local_ints) > 4 else ""
        )
        return UsageError(
            f"this number differs from member to member ({shown}), and {what}: one program speaks for all "
            "members, and takes one way. Compute with the tensor that it is, mesh.coordinate(dim), and "
            "torch.where, or with one member's tensors, t.member(k)"
        )


class _Same(_constant_symnode.ConstantIntNode):
    """torch's own node of an int, and what that node cannot do with a `_Varying`."""

    def int_truediv(self, other: _Varying) -> NoReturn:
        other.int_truediv(self)

    def pow_by_natural(self, other: _Varying) -> Any:
        """Return the power, whose exponent each member has of its own."""
        return _Varying({k: self.val**n for k, n in other._local_ints.items()})


class _Truth:
    """Whether such a number equals another: yes, no, or it differs too.

    Whoever needs one answer where it differs gets an error. torch's C++ gets the answer of sizes in general:
    a size is not 0 or 1. It asks so to find a shorter way, or for broadcasting, and each member's operators
    look at their own sizes.
    """

    def __init__(self, answer: bool | None, error: UsageError | None = None, general: bool | None = None):
        self._answer, self._error, self._general = answer, error, general

    def __repr__(self) -> str:
        return "<differs from member to member>" if self._answer is None else str(self._answer)

    _graph_repr = _str = __repr__

    def bool_(self) -> bool:
        if self._answer is None:
            assert self._error is not None
            raise self._error
        return self._answer

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_() if self._general is None else self._general

    expect_true = guard_size_oblivious = guard_bool

    def guard_or_false(self, file: str, line: int) -> bool:
        """Return False, for those who look for a shorter way: a slice for whether it is everything."""
        return self._answer is True

    statically_known_true = guard_or_false

    def guard_or_true(self, file: str, line: int) -> bool:
        """Return True, unless it is known that it does not."""
        return self._answer is not False

    def is_bool(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_symbolic = is_constant = is_nested_int = is_int

    @property
    def shape_env(self) -> _Truth:
        """What torch's `guard_or_false` and `guard_or_true` ask."""
        return self

    def evaluate_sym_node(self, node: Any, size_oblivious: bool = False, fallback_value: Any = None) -> bool:
        """Return the answer where it is one, else what the caller takes then."""
        return bool(fallback_value) if self._answer is None and fallback_value is not None else self.bool_()

    def wrap_bool(self, value: bool) -> _Truth:
        """Return an answer that is the same for all members, to be put together with this one."""
        return _Truth(value)

    def sym_not(self) -> _Truth:
        opposite = [None if found is None else not found for found in (self._answer, self._general)]
        return _Truth(opposite[0], self._error, opposite[1])

    def sym_and(self, other: Any) -> _Truth:
        """Return whether both are so: no, where it is known of one that it is not."""
        answers = [getattr(one, "_answer", None) for one in (self, other)]
        if False in answers:
            return _Truth(False)
        return _Truth(True) if None not in answers else self if self._answer is None else other

    def sym_or(self, other: Any) -> _Truth:
        """Return whether one is so."""
        return self.sym_not().sym_and(other.sym_not()).sym_not()


def _computed(name: str) -> Callable[..., Any]:
    method = getattr(_local_tensor.LocalIntNode, name)

    def compute(self: _Varying, *others: Any) -> Any:
        found = method(self, *others)
        return _Varying(found._local_ints) if type(found) is _local_tensor.LocalIntNode else found

    return compute


def _compared(name: str, sign: str) -> Callable[..., Any]:
    compare = getattr(operator, name)

    def ask(self: _Varying, other: Any) -> Any:
        others = getattr(other, "_local_ints", None)
        answers = {
            compare(n, other.maybe_as_int() if others is None else others[k])
            for k, n in self._local_ints.items()
        }
        if len(answers) == 1:
            return _Truth(answers.pop())
        constant = None if others is not None else other.maybe_as_int()
        general = compare(_LARGE, constant) if constant in (0, 1) else None
        return _Truth(None, self._refused(f"so does whether it is {sign} {other}"), general)

    return ask


for _name in ("add", "sub", "mul", "mod", "neg", "floordiv", "int_floordiv", "sym_max", "sym_min", "sym_sum"):
    setattr(_Varying, _name, _computed(_name))
for _name, _sign in {
    "eq": "equal to",
    "ne": "unlike",
    "lt": "below",
    "le": "at most",
    "gt": "above",
    "ge": "at least",
}.items():
    setattr(_Varying, _name, _compared(_name, _sign))


def varying(values: Sequence[int]) -> Any:
    """Return the int that is `values[k]` on member k; a plain one where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return torch.SymInt(_Varying(dict(enumerate(values))))


def numbers(home: Residence, values: tuple[int, ...], stay_on_cpu: bool = False) -> DistributedTensor:
    """Return a tensor on a mesh, of one int64 that is `values[k]` on member k. Return at once.

    The mesh keeps the tensor for the next call with these values, so nobody may write it. See `upload` for
    `stay_on_cpu`.
    """
    kept, key = home.numbers, (stay_on_cpu, values)
    found = kept.get(key)
    if not isinstance(found, DistributedTensor):
        if len(kept) >= _MOST_NUMBERS:
            kept.clear()
        mesh_log = home.node
        assert isinstance(mesh_log, MeshLog)
        places = [mesh_log.session.places.residence(place, numbered=False) for place in mesh_log.members]
        handles = [
            upload(torch.tensor(n, device="cpu"), place, stay_on_cpu=stay_on_cpu)
            for n, place in zip(values, places)
        ]
        found = kept[key] = wrap(DistributedTensor, mesh_of(mesh_log, home, handles))
    return found


def varies(value: Any) -> bool:
    """Whether a value is an int that differs from member to member."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, _local_tensor.LocalIntNode)
