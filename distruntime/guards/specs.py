"""Whether held tensors have the metadata that they had: `w.t_()` changes them in place.

That is seldom, and there may be hundreds of tensors. So they are compared only if any tensor's have changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from ..log.handle import Handle
from ..operators.proxies import reshapes

_spec = operator.attrgetter("spec")


class Specs:
    """The metadata of the tensors of these handles, as they are now.

    `known` is the last change of any tensor's that they have been compared behind.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.known = reshapes.last
        self._handles, self._specs = handles, [*map(_spec, handles)]

    def hold(self) -> bool:
        """Compare them."""
        last = reshapes.last
        if not all(self.each()):
            return False
        self.known = last
        return True

    def each(self) -> Iterable[bool]:
        """Return of each tensor whether it has the metadata that it had."""
        return map(operator.is_, map(_spec, self._handles), self._specs)
