"""A look at what the collector tracks disturbs nobody who is just building a tuple."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from distruntime.session.holders import tracked, tracked_ids


class Thing:
    pass


class Hashing(type):
    """A metaclass whose hash is a function of Python: threads may change within it."""

    def __hash__(cls) -> int:
        return sum([1, 2, 3])

    def __eq__(cls, other: object) -> bool:
        return cls is other


class Hashed(metaclass=Hashing):
    pass


def test_it_finds_what_is_there() -> None:
    things = [Thing(), Thing()]
    found = tracked({Thing}, gc.get_objects)
    assert set(map(id, found)) == set(map(id, things))
    assert all(type(one) is Thing for one in found)
    assert {*map(id, things), id(things)} <= tracked_ids(gc.get_objects)
    assert tracked({Thing}, partial(gc.get_referrers, Thing)) == found


def test_it_takes_a_generation() -> None:
    gc.collect()
    thing = Thing()
    assert tracked({Thing}, partial(gc.get_objects, 0)) == [thing]
    assert id(thing) in tracked_ids(partial(gc.get_objects, 0))
    gc.collect(0)
    assert tracked({Thing}, partial(gc.get_objects, 0)) == []


def test_a_tuple_that_is_being_built_is_not_held() -> None:
    """Another thread builds tuples of what a generator yields, all the time."""
    hashed = [Hashed() for _ in range(300)]
    raised: list[BaseException] = []
    over = threading.Event()
    built = threading.Event()

    def build() -> None:
        try:
            while not over.is_set():
                # It grows as it is built, and Python resizes it only if nobody else holds it.
                tuple(Thing() for _ in range(50))
                built.set()
        except BaseException as error:
            raised.append(error)
            built.set()

    # Python changes threads as often as it can.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    builder = threading.Thread(target=build)
    builder.start()
    try:
        for _ in range(50):
            built.wait(60)
            if raised:
                break
            built.clear()
            tracked({Thing}, gc.get_objects)
            tracked_ids(gc.get_objects)
            tracked({Thing}, partial(gc.get_referrers, Thing))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        builder.join(60)
    assert not raised, raised
    assert all(type(one) is Hashed for one in hashed)


def test_it_is_not_held_where_a_hook_hears_of_what_python_does() -> None:
    # A hook stays for as long as its process runs.
    code = (
        "import sys; sys.addaudithook(lambda *_: None); import test_tracked; "
        "test_tracked.test_a_tuple_that_is_being_built_is_not_held()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parent)
