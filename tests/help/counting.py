"""Count what a call issues."""

from __future__ import annotations

from collections.abc import Callable

from distruntime.session.session import Session


def instructions(session: Session, call: Callable[[], object]) -> int:
    """Return how many instructions a call issues, none of which is its first."""
    node = session.nodes[0]
    with node.lock:
        node.flush()
        node.enough = 1 << 30
        before = len(node.line_table)
        result = call()
        count = len(node.line_table) - before
        node.enough = 0
    del result
    return count
