"""`send`, `recv`, `isend`, `irecv` with torch.distributed's names and meaning.

One program holds both ends: the tensor says the other.

A send copies to the receiver's place at once, so that the sender may write its tensor again; the matching
receive writes the copy into its own tensor there. Sends and receives of one pair and tag match in the
order in which they are issued. The copy is part of the autograd
graph: gradients travel back to the sender.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import PlacementError, UsageError
from ..log.handle import Place, Residence
from ..log.line import Line, line_text, user_line
from ..session.session import Session
from ..session.spelling import is_node, on_node
from ..tensors.tensor import DistributedTensor
from .arguments import group_for, root_of, session_of, tensor
from .group import ProcessGroup, groups_of
from .work import Work, aside


@dataclass(eq=False)
class _Sent:
    """A tensor on its way: its sender, its target place (or node, with `anywhere`), and the copy there."""

    source: Place
    target: Place
    anywhere: bool
    tag: int
    value: Any
    line: Line


@dataclass(eq=False)
class _Wanted:
    """A receive that was posted before its send."""

    source: Place | int | None
    target: Place
    tag: int
    tensor: Any
    work: Work
    line: Line


@dataclass(eq=False)
class _Mail:
    """What has been sent and not received, and wanted and not sent, in one group, or outside of groups.

    The oldest first.
    """

    sent: list[_Sent] = field(default_factory=list)
    wanted: list[_Wanted] = field(default_factory=list)
    # Operations that nobody waits for run on these streams.
    streams: dict[Place, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def send(
    tensor: torch.Tensor,
    dst: Any = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a copy of `tensor`, from where it lives to a node (a number or a place), or a rank of the group.

    Return at once.

    The tensor may be written at once: what is issued afterwards does not reach the copy. Without a group,
    a node's number means the place of its that `tensor.to(node=dst)` chooses. Raises `PlacementError` for
    what is no member, `UsageError` for a send to itself.
    """
    session, mail, source, target = _ends(tensor, dst, group, tag, group_dst)
    _deliver(
        session,
        group,
        mail,
        _Sent(
            source, target.place, is_node(dst) and group is None, tag, _copied(tensor, target), user_line()
        ),
    )


def isend(
    tensor: torch.Tensor,
    dst: Any = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """As `send`, beside the current streams: leave the tensor as it is until the `Work` has been waited for.

    Return at once.
    """
    session, mail, source, target = _ends(tensor, dst, group, tag, group_dst)
    moved: list[Any] = []
    homes = _homes(session, source, target.place)
    events = aside(mail.streams, homes, False, lambda: moved.append(_copied(tensor, target)))
    _deliver(
        session,
        group,
        mail,
        _Sent(source, target.place, is_node(dst) and group is None, tag, moved.pop(), user_line()),
    )
    return Work(f"a send from {source} to {target.place}", events, [tensor])


def recv(
    tensor: torch.Tensor,
    src: Any = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Write into `tensor` the oldest tensor sent to where it lives, from `src` or from anywhere.

    Return the sender's node, at once.

    Raises `UsageError` where nothing has been sent: a receive that comes before its send is an `irecv`.
    """
    _, mail, place, source = _receiver(tensor, src, group, tag, group_src)
    found = _take(mail, place, source, tag, tensor)
    if found is None:
        raise UsageError(
            f"nothing has been sent to {place}{_from(source)} with tag {tag}: waiting for it would "
            "never end, as this program sends it "
            "too. Call send() before recv(), or irecv(), which may come first"
        )
    _write(mail, found, tensor)
    return found.source.node


def irecv(
    tensor: torch.Tensor,
    src: Any = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """As `recv`, beside the current streams, and also before the send.

    The next send that matches is written into `tensor`.

    Return at once. The `Work` raises `UsageError` when it is waited for and nothing has been sent.
    """
    session, mail, place, source = _receiver(tensor, src, group, tag, group_src)
    work = Work(f"a receive on {place}{_from(source)}", None, [tensor])
    found = _take(mail, place, source, tag, tensor, _Wanted(source, place, tag, tensor, work, user_line()))
    if found is not None:
        _receive(session, group, mail, found, tensor, work)
    return work


def _ends(
    value: Any, dst: Any, group: ProcessGroup | None, tag: int, group_dst: int | None
) -> tuple[Session, _Mail, Place, Residence]:
    given = tensor(value, "tensor")
    session, mail = _mail(group, given, tag)
    if dst is None and group_dst is None:
        raise UsageError(
            "send needs to know where to: dst=, a node number or a place, or group_dst=, a rank of the group"
        )
    source = given.place
    if group is not None:
        _member(group, source)
        target = group.homes[root_of(group, dst, group_dst, ("dst", "group_dst"))]
    else:
        target = session.places.residence(_place(session, dst, group_dst, ("dst", "group_dst"), source))
    if target.place == source:
        raise UsageError(
            f"a tensor on {source} cannot be sent to {source}: a place does not send to itself, as "
            "in torch; use copy_"
        )
    target.node.require_alive()
    return session, mail, source, target


def _receiver(
    value: Any, src: Any, group: ProcessGroup | None, tag: int, group_src: int | None
) -> tuple[Session, _Mail, Place, Place | int | None]:
    given = tensor(value, "tensor")
    session, mail = _mail(group, given, tag)
    place = given.place
    source: Place | int | None = None
    if group is not None:
        _member(group, place)
        if src is not None or group_src is not None:
            source = group.places[root_of(group, src, group_src, ("src", "group_src"))]
    elif src is not None or group_src is not None:
        named = _place(session, src, group_src, ("src", "group_src"), place)
        source = named.node if is_node(src) else named
    if source == place:
        raise UsageError(
            f"a tensor on {place} cannot be received from {place}: a place does not send to itself, "
            "as in torch; use copy_"
        )
    return session, mail, place, source


def _place(session: Session, where: Any, rank: int | None, names: tuple[str, str], like: Place) -> Place:
    """Return a place that is named without a group. A node stands for its place with the device of `like`."""
    if rank is not None:
        raise UsageError(
            f"{names[1]}= is a rank of a group, and none was given: say {names[0]}=, a node number "
            "or a place, or group="
        )
    if isinstance(where, Place):
        return session.places.residence(where).place
    if not is_node(where):
        raise UsageError(f"{names[0]} must be a node number or a place, got {where!r}")
    otherwise = "cpu" if like.device == "cpu" else None
    return on_node(session.places, where, like=like.device, otherwise=otherwise)


def _member(group: ProcessGroup, place: Place) -> None:
    if place not in group.ranks:
        raise PlacementError(f"tensor is on {place}, which is not in {group!r}")


def _mail(group: ProcessGroup | None, given: DistributedTensor, tag: int) -> tuple[Session, _Mail]:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise UsageError(f"tag must be a number, got {tag!r}")
    holder: Any = groups_of(given._handle.place.node.session) if group is None else group_for(group, [given])
    session = session_of(group) if group is not None else given._handle.place.node.session
    session.require_open()
    with session.lock:
        if holder.mail is None:
            holder.mail = _Mail()
    mail: _Mail = holder.mail
    return session, mail


def _copied(value: Any, target: Residence) -> Any:
    """Return a copy at the target, which is not the same place."""
    return value.to(target.place)


def _homes(session: Session, *places: Place) -> Sequence[Residence]:
    return [session.places.residence(place) for place in places]


def _deliver(session: Session, group: ProcessGroup | None, mail: _Mail, sent: _Sent) -> None:
    """Give a tensor that was sent to the receive that waits for it, or keep it for the one that will."""
    with mail.lock:
        wanted = next((w for w in mail.wanted if _match(sent, w.target, w.source, w.tag)), None)
        if wanted is None:
            mail.sent.append(sent)
            return
        _require_alike(sent, wanted.tensor, wanted.line)
        mail.wanted.remove(wanted)
    _receive(session, group, mail, sent, wanted.tensor, wanted.work)


def _take(
    mail: _Mail,
    place: Place,
    source: Place | int | None,
    tag: int,
    into: Any,
    otherwise: _Wanted | None = None,
) -> _Sent | None:
    with mail.lock:
        found = next((s for s in mail.sent if _match(s, place, source, tag)), None)
        if found is not None:
            _require_alike(found, into, user_line())
            mail.sent.remove(found)
        elif otherwise is not None:
            mail.wanted.append(otherwise)
        return found


def _match(sent: _Sent, place: Place, source: Place | int | None, tag: int) -> bool:
    there = sent.target.node == place.node if sent.anywhere else sent.target == place
    from_there = source is None or (
        sent.source.node == source if isinstance(source, int) else sent.source == source
    )
    return there and from_there and sent.tag == tag


def _require_alike(sent: _Sent, into: Any, line: Line) -> None:
    if sent.value.shape != into.shape or sent.value.dtype != into.dtype:
        raise UsageError(
            "the tensors of a send and its recv must be of one shape and dtype: sent "
            f"{sent.value._handle.spec}, "
            f"received into {into._handle.spec}\n  sent at {line_text(sent.line)}\n  received at "
            f"{line_text(line)}"
        )


def _write(mail: _Mail, sent: _Sent, into: Any) -> None:
    try:
        into.copy_(sent.value)
    # This tensor must not be written, but another one may be.
    except BaseException:
        with mail.lock:
            mail.sent.insert(0, sent)
        raise


def _receive(
    session: Session, group: ProcessGroup | None, mail: _Mail, sent: _Sent, into: Any, work: Work
) -> None:
    events = aside(mail.streams, _homes(session, into.place), False, lambda: _write(mail, sent, into))
    work._begin(events, sent.source.node if group is None else group.ranks[sent.source])


def _from(source: Place | int | None) -> str:
    return "" if source is None else f" from node {source}" if isinstance(source, int) else f" from {source}"
