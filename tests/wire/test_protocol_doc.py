"""`docs/protocol.md` says what `distruntime/wire/messages.py` does: every message, field and word."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from distruntime.wire import messages

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|")
]


@pytest.mark.parametrize(
    "number, message", list(enumerate(messages.MESSAGES)), ids=[m.__name__ for m in messages.MESSAGES]
)
def test_a_message_has_one_row_with_its_number_sender_and_fields(number: int, message: type) -> None:
    rows = [row for row in ROWS if row[1] == f"`{message.__name__}`"]
    assert len(rows) == 1, f"docs/protocol.md has {len(rows)} rows for {message.__name__}, expected one"
    (row,) = rows
    assert row[0] == str(number)
    assert re.findall(r"`(\w+)`", row[3]) == [field.name for field in fields(message)]
    sender = {
        "Master to worker": "master",
        "Worker to master": "worker",
        "Either way": "both",
        "Worker to worker": "peers",
        "Master or worker to worker": "both, peers",
    }
    assert row[2] == sender[(message.__doc__ or "").partition(":")[0]]
    assert row[4]


def test_the_page_has_no_row_for_a_message_that_is_not() -> None:
    names = {message.__name__ for message in messages.MESSAGES}
    assert {row[1].strip("`") for row in ROWS if len(row) == 5 and re.fullmatch(r"\d+", row[0])} == names


def test_the_words_of_the_log_have_their_rows() -> None:
    words = {
        name: value
        for name, value in vars(messages).items()
        if name.isupper() and isinstance(value, int) and name != "PROTOCOL"
    }
    rows = {row[1].strip("`"): row[0].removeprefix("from ") for row in ROWS if len(row) == 3}
    assert {name: str(value) for name, value in words.items()} == {name: rows.get(name) for name in words}


def test_the_page_names_the_protocol_number_and_the_fields_of_a_failure() -> None:
    assert f"Protocol number **{messages.PROTOCOL}**" in PAGE
    assert ", ".join(f"`{field.name}`" for field in fields(messages.Failure)) in PAGE
