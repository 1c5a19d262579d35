"""Sessions survive their connections: whatever happens to the network, each instruction runs once, and what waits gets its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from cut_training import Trouble, counted, same, train, whole_words
from distruntime.session import active_session
from distruntime.wire.keys import KeyPair
from network import Network
from processes import until
from test_security import ListeningWorker

SILENCE = 0.5  # seconds after which a worker is called unreachable here
STEPS = 30
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningWorker]:
    folder = tmp_path_factory.mktemp("cuts")
    KeyPair.generate().save(folder / "key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTRUNTIME_UNREACHABLE", str(SILENCE))
        started = ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0", "--key", str(folder / "key"))
    yield started
    started.stop()
    assert "Traceback" not in started.text()


@pytest.fixture
def network(daemon: ListeningWorker) -> Iterator[Network]:
    with Network(daemon.address) as made:
        yield made


@pytest.fixture
def attach(daemon: ListeningWorker, network: Network, fresh_session: Start) -> Start:
    """Opens a session with the daemon, by way of the network."""

    def begin(**options: Any) -> Any:
        session = fresh_session(
            **{"workers": [network.address], "key": daemon.log.parent / "key", "unreachable": SILENCE, "grace": 120, **options}
        )
        whole_words()
        return session

    return begin


@pytest.fixture(scope="module")
def undisturbed(daemon: ListeningWorker) -> list[torch.Tensor]:
    dr.shutdown()
    dr.init_master_worker(workers=[daemon.address], key=daemon.log.parent / "key", timeout=60)
    whole_words()
    result = train(STEPS)
    dr.shutdown()
    return result


def unreachable(node: int = 0) -> None:
    until(lambda: active_session().nodes[node].state == "unreachable")


@pytest.mark.parametrize("seed", range(20))
def test_a_training_through_a_bad_network_ends_as_an_undisturbed_one(
    attach: Start, network: Network, undisturbed: list[torch.Tensor], seed: int
) -> None:
    attach()
    with Trouble(network, seed, STEPS) as trouble:
        same(train(STEPS, trouble), undisturbed)
    counted()
