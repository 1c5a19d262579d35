"""Workers that do not meet: what the error says of where they listen for each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import distruntime as dr
from processes import ListeningWorker, stopped


@pytest.mark.slow(reason="starts two daemons")
def test_the_error_says_where_the_workers_listen_and_how_to_try_it(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        workers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            workers.append(ListeningWorker(tmp_path / name, "--listen", "tcp://127.0.0.1:0", "--insecure"))
            stack.callback(workers[-1].stop)
        fresh_session(workers=[worker.address for worker in workers], insecure=True)
        dr.distributed.new_group([0, 1])
        monkeypatch.setenv("DISTRUNTIME_MEET_TIMEOUT", "1")
        with (
            stopped(workers[1].process.pid),
            pytest.raises(dr.errors.ConnectionFailed, match="did not join") as caught,
        ):
            dr.distributed.new_group([0, 1])
        stack.callback(dr.shutdown)
    said = str(caught.value)
    assert "can the workers reach each other? They listen for each other: node 0" in said
    assert said.count("tcp://127.0.0.1:") == 2 and "nc -vz 127.0.0.1 " in said
