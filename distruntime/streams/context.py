"""A `with` block whose instructions go to a stream, as `torch.cuda.stream` has it."""

from __future__ import annotations

from types import TracebackType

from ..errors import without_our_frames
from .stream import Stream, expect


class StreamContext:
    """Sets a stream, and with it the current node and device, for a `with` block; see `stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


@without_our_frames
def stream(stream: Stream | None) -> StreamContext:
    """Return a context in which instructions on the stream's device go to it, and new tensors to its device.

    None changes nothing. As in `torch.cuda.stream`, operations on other devices go to these devices' current
    streams.
    """
    return StreamContext(None if stream is None else expect(stream, Stream, "Stream"))
