"""In a notebook: what its cells show of a session, of its start, and of a long wait."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from processes import PATH

CELLS = [
    """
import os, signal, threading
import torch, distruntime as dr
from distruntime.session.session import active_session
from processes import until
session = dr.init_master_worker(world_size=1, session="notebook")
session
""",
    """
dr.publish("weights", torch.ones(1000, device="remote"))
session
""",
    # The worker is stopped until the wait for it is shown.
    """
x = torch.ones(3, device="remote")
pid, announcer = dr.nodes()[0].pid, active_session().requests.announcer
os.kill(pid, signal.SIGSTOP)
def go_on():
    until(lambda: announcer._shown)
    os.kill(pid, signal.SIGCONT)
threading.Thread(target=go_on).start()
(x + 1).sum().item()
""",
    """
for _ in range(30):
    (x + 1).sum().item()
dr.profiler.stalls()
""",
    # What a function writes while the next cell runs belongs here.
    """
from pathlib import Path
import sys, time
reached = Path(os.environ["DISTRUNTIME_STATE"]) / "reached"
mine = sys.stdout.parent_header["msg_id"]
def says(reached):
    print("first")
    while not reached.exists():
        time.sleep(0.01)
    print("second")
said = dr.remote(says, returns=object)(reached)
""",
    """
write, written = sys.stdout.write, []
def noted(text):
    written.append((sys.stdout.parent_header["msg_id"] == mine, text))
    return write(text)
sys.stdout.write = noted
print("next cell")
reached.touch()
dr.fetch(said)
written
""",
    """
dr.shutdown()
session
""",
]


class Client(nbclient.NotebookClient):
    """Runs a notebook, and keeps what its displays have shown before what they show in the end."""

    def __init__(self, notebook: Any) -> None:
        super().__init__(notebook, timeout=110, kernel_name="python3")
        self.shown: list[str] = []

    def process_message(self, message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append(message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, index)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    client = Client(notebook)
    state = str(tmp_path_factory.mktemp("state"))
    path = os.pathsep.join([*PATH, str(Path(__file__).resolve().parents[1] / "help")])
    client.execute(env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DISTRUNTIME_STATE": state})
    yield client


def outputs(client: Client, cell: int) -> list[Any]:
    found: list[Any] = client.nb.cells[cell]["outputs"]
    return found


def printed(client: Client, cell: int, name: str = "stdout") -> str:
    streams = [one for one in outputs(client, cell) if one["output_type"] == "stream"]
    return "".join(one["text"] for one in streams if one["name"] == name)


def result(client: Client, cell: int, kind: str = "text/html") -> str:
    (found,) = [one["data"][kind] for one in outputs(client, cell) if one["output_type"] == "execute_result"]
    return str(found)


@pytest.mark.slow(reason="starts a notebook, 10 s")
def test_no_cell_says_anything_on_standard_error(client: Client) -> None:
    assert [printed(client, cell, "stderr") for cell in range(len(CELLS))] == [""] * len(CELLS)


def test_the_start_is_shown_as_at_a_terminal(client: Client) -> None:
    shown = printed(client, 0)
    assert re.match(r"starting 1 worker \.* ready in \d+\.\d s\n node  host", shown), shown
    assert "\nnew tensors go to node 0 cpu" in shown


def test_a_session_shows_its_card(client: Client) -> None:
    card = result(client, 0)
    assert "<b>&lt;distruntime session &quot;notebook&quot;, open&gt;</b>" in card
    assert "<td>ready</td>" in card and "<td>nothing</td><td>0</td>" in card
    assert "weights" not in card
    assert "<td>weights</td><td>tensor (1000,) float32</td><td>3.9 KiB</td>" in result(client, 1)
    assert "it was shut down" in result(client, -1) and "<table>" not in result(client, -1)


def test_a_long_wait_is_shown_while_it_lasts_and_says_in_the_end_how_long_it_was(client: Client) -> None:
    waits = [text for text in client.shown if text.startswith("waiting for node 0 (")]
    assert waits and "(Ctrl-C leaves, and loses nothing)" in waits[0]
    (left,) = [
        one["data"]["text/plain"] for one in outputs(client, 2) if one["output_type"] == "display_data"
    ]
    assert re.fullmatch(r"waited \d+\.\d s for node 0 \(.+\)", left)
    assert result(client, 2, "text/plain") == "6.0"


def test_stalls_show_their_advice(client: Client) -> None:
    assert "reads one by one at " in result(client, 3) and result(client, 3).count("<p>") == 1


def test_what_a_function_prints_is_shown_under_the_cell_that_has_called_it(client: Client) -> None:
    # nbclient itself drops what a cell writes when it has ended.
    assert printed(client, 5) == "next cell\n"
    # Its first line may come before that cell begins, or while it runs.
    written = ast.literal_eval(result(client, 5, "text/plain"))
    assert [text for remote, text in written if not remote] == ["next cell", "\n"]
    assert [text for remote, text in written if remote] in (
        ["[node 0] second\n"],
        ["[node 0] first\n", "[node 0] second\n"],
    )
