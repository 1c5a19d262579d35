"""Sizes, counts and what others say, as text for people."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (" B", " KiB", " MiB", " GiB", " TiB")
_COUNTS = ("", " K", " M", " B", " T")


def size_text(nbytes: float) -> str:
    """Return "8.0 GiB"."""
    return _scaled(nbytes, 1024, _BYTES)


def count_text(number: float) -> str:
    """Return "1.5 M"."""
    return _scaled(number, 1000, _COUNTS)


def span(seconds: float) -> str:
    """Return "3 h 12 m", "2 m 5 s" or "7 s"."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} m"
    return f"{seconds // 60:.0f} m {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"


def printable(text: str) -> str:
    """Return a text of somebody else's, in which nothing moves a terminal's cursor or changes its colours."""
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in text)


def writable(text: str, stream: object) -> str:
    """Return a text that a stream takes, whatever its encoding is."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        plain = text.replace("…", "...").replace("×", "x")
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def operator_text(name: str) -> str:
    """Return an operator's name as people say it: "aten.mm" for "aten::mm.default"."""
    return printable(name).removesuffix(".default").replace("::", ".")


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    unit = 0
    while number >= base and unit < len(units) - 1:
        number, unit = number / base, unit + 1
    return f"{number:.0f}{units[0]}" if unit == 0 else f"{number:.1f}{units[unit]}"
