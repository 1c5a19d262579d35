"""`send`, `recv`, `isend`, `irecv` with torch.distributed's names and meaning.

One program holds both ends: the tensor says the other.

A send copies to the receiver's place at once, so that the sender may write its tensor again; the matching
receive writes the copy into its own tensor there. Sends and receives of one pair and tag match in the
order in which they are issued. The copy is part of the autograd
graph: gradients travel back to the sender.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PlacementError, UsageError, without_our_frames
from ..log.handle import Place, Residence
from ..log.line import Line, line_text, user_line
from ..session.session import Session, session_of_log
from ..session.spelling import is_node, on_node
from ..tensors.tensor import DistributedTensor
from .arguments import group_for, root_of, session_of, tensor
from .group import ProcessGroup, Where
from .groups import Groups, groups_of
from .mail import Mail, PostedReceive, UnreceivedSend
from .work import Work, aside


@without_our_frames
def send(
    tensor: torch.Tensor,
    dst: Where | None = None,
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
    session, mail, given, target = _ends(tensor, dst, group, tag, group_dst)
    source = given.place
    _deliver(
        session,
        group,
        mail,
        UnreceivedSend(
            source, target.place, is_node(dst) and group is None, tag, _copied(given, target), user_line()
        ),
    )


@without_our_frames
def isend(
    tensor: torch.Tensor,
    dst: Where | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """As `send`, beside the current streams: leave the tensor as it is until the `Work` has been waited for.

    Return at once.
    """
    session, mail, given, target = _ends(tensor, dst, group, tag, group_dst)
    moved: list[DistributedTensor] = []
    source = given.place
    homes = _homes(session, source, target.place)
    events = aside(mail.streams, homes, False, lambda: moved.append(_copied(given, target)))
    _deliver(
        session,
        group,
        mail,
        UnreceivedSend(source, target.place, is_node(dst) and group is None, tag, moved.pop(), user_line()),
    )
    return Work(f"a send from {source} to {target.place}", events, [tensor])


@without_our_frames
def recv(
    tensor: torch.Tensor,
    src: Where | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Write into `tensor` the oldest tensor sent to where it lives, from `src` or from anywhere.

    Return the sender's node, at once.

    Raises `UsageError` where nothing has been sent: a receive that comes before its send is an `irecv`.
    """
    _, mail, into, source = _receiver(tensor, src, group, tag, group_src)
    place = into.place
    found = _matching_send(mail, place, source, tag, into)
    if found is None:
        raise UsageError(
            f"nothing has been sent to {place}{_from(source)} with tag {tag}: waiting for it would never "
            "end, as this program sends it too. Call send() before recv(), or irecv(), which may come first"
        )
    _write(mail, found, into)
    return found.source.node


@without_our_frames
def irecv(
    tensor: torch.Tensor,
    src: Where | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """As `recv`, beside the current streams, and also before the send.

    The next send that matches is written into `tensor`.

    Return at once. The `Work` raises `UsageError` when it is waited for and nothing has been sent.
    """
    session, mail, into, source = _receiver(tensor, src, group, tag, group_src)
    place = into.place
    work = Work(f"a receive on {place}{_from(source)}", None, [tensor])
    found = _matching_send(
        mail, place, source, tag, into, PostedReceive(source, place, tag, into, work, user_line())
    )
    if found is not None:
        _receive(session, group, mail, found, into, work)
    return work


def _ends(
    value: object, dst: Where | None, group: ProcessGroup | None, tag: int, group_dst: int | None
) -> tuple[Session, Mail, DistributedTensor, Residence]:
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
    return session, mail, given, target


def _receiver(
    value: object, src: Where | None, group: ProcessGroup | None, tag: int, group_src: int | None
) -> tuple[Session, Mail, DistributedTensor, Place | int | None]:
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
    return session, mail, given, source


def _place(session: Session, where: object, rank: int | None, names: tuple[str, str], like: Place) -> Place:
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
    otherwise = "cpu" if like.local_device == "cpu" else None
    return on_node(session.places, where, like=like.local_device, otherwise=otherwise)


def _member(group: ProcessGroup, place: Place) -> None:
    if place not in group.ranks:
        raise PlacementError(f"tensor is on {place}, which is not in {group!r}")


def _mail(group: ProcessGroup | None, given: DistributedTensor, tag: int) -> tuple[Session, Mail]:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise UsageError(f"tag must be a number, got {tag!r}")
    holder: Groups | ProcessGroup = (
        groups_of(session_of_log(given._handle.place.node)) if group is None else group_for(group, [given])
    )
    session = session_of(group) if group is not None else session_of_log(given._handle.place.node)
    session.require_open()
    with session.lock:
        mail = holder.mail = holder.mail or Mail()
    return session, mail


def _copied(value: DistributedTensor, target: Residence) -> DistributedTensor:
    """Return a copy at the target, which is not the same place."""
    copy = value.to(target.place)
    assert isinstance(copy, DistributedTensor)
    return copy


def _homes(session: Session, *places: Place) -> Sequence[Residence]:
    return [session.places.residence(place) for place in places]


def _deliver(session: Session, group: ProcessGroup | None, mail: Mail, sent: UnreceivedSend) -> None:
    """Give a tensor that was sent to the receive that waits for it, or keep it for the one that will."""
    with mail.lock:
        wanted = next((w for w in mail.posted if _match(sent, w.target, w.source, w.tag)), None)
        if wanted is None:
            mail.sent.append(sent)
            return
        _require_alike(sent, wanted.tensor, wanted.line)
        mail.posted.remove(wanted)
    _receive(session, group, mail, sent, wanted.tensor, wanted.work)


def _matching_send(
    mail: Mail,
    place: Place,
    source: Place | int | None,
    tag: int,
    into: DistributedTensor,
    otherwise: PostedReceive | None = None,
) -> UnreceivedSend | None:
    with mail.lock:
        found = next((s for s in mail.sent if _match(s, place, source, tag)), None)
        if found is not None:
            _require_alike(found, into, user_line())
            mail.sent.remove(found)
        elif otherwise is not None:
            mail.posted.append(otherwise)
        return found


def _match(sent: UnreceivedSend, place: Place, source: Place | int | None, tag: int) -> bool:
    there = sent.target.node == place.node if sent.anywhere else sent.target == place
    from_there = source is None or (
        sent.source.node == source if isinstance(source, int) else sent.source == source
    )
    return there and from_there and sent.tag == tag


def _require_alike(sent: UnreceivedSend, into: DistributedTensor, line: Line) -> None:
    if sent.value.shape != into.shape or sent.value.dtype != into.dtype:
        raise UsageError(
            "the tensors of a send and its recv must be of one shape and dtype: sent "
            f"{sent.value._handle.spec}, "
            f"received into {into._handle.spec}\n  sent at {line_text(sent.line)}\n  received at "
            f"{line_text(line)}"
        )


def _write(mail: Mail, sent: UnreceivedSend, into: DistributedTensor) -> None:
    try:
        into.copy_(sent.value)
    # This tensor must not be written, but another one may be.
    except BaseException:
        with mail.lock:
            mail.sent.insert(0, sent)
        raise


def _receive(
    session: Session,
    group: ProcessGroup | None,
    mail: Mail,
    sent: UnreceivedSend,
    into: DistributedTensor,
    work: Work,
) -> None:
    events = aside(mail.streams, _homes(session, into.place), False, lambda: _write(mail, sent, into))
    work._mark_begun(events, sent.source.node if group is None else group.ranks[sent.source])


def _from(source: Place | int | None) -> str:
    return "" if source is None else f" from node {source}" if isinstance(source, int) else f" from {source}"
