"""A master that runs random programs on a cluster in a box, whatever befalls that, until a file says that it
is enough. Each piece of work is compared with an oracle: a program of operations, functions, loaders, ranks
and pipelines with the same one here, `dr.program` and `torch.compile` with what they record.

It prints a line of JSON when a piece begins and when it has ended. `odd` says how it came out: nothing where
all is equal, `raised ...` where it failed. After a failure the next piece is in the same session, or in a new
one.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import distruntime as dr
from compiled_programs import differs
from distruntime.session.session import active_session
from processes import pause
from random_programs import Program, Publisher, Reader, World
from recorded_programs import KINDS, compare, varying_of

# So many calls has a program of `dr.program`, so many operations are timed in a round of soak, and so often
# is a name looked up in a row.
CALLS, TIMED, LOOKS = 12, 2000, 5
# Nodes are all back so many seconds after a failure, at the latest.
BACK = 120.0
RAISED = "raised "
# Compiling takes seconds, so it comes seldom.
_TURNS = (
    *("operations",) * 4,
    "look",
    *("operations",) * 3,
    "recorded",
    "look",
    *("operations",) * 2,
    "compiled",
)
# What is compiled in a round of soak was compiled in the first one. torch 2.13 keeps some 2 MiB of each
# function that is compiled anew, with tensors of this process, too.
_ROUND = ("operations", "operations", "operations", "recorded", "look")


def say(**words: object) -> None:
    sys.stdout.write(json.dumps({"time": time.time(), **words}) + "\n")
    sys.stdout.flush()


def told(error: BaseException) -> str:
    """Return how an error is said."""
    last = "".join(traceback.format_exception(error, limit=-4))[-3000:]
    return f"{RAISED}{type(error).__name__}: {str(error)[:1500]}\n{last}"


class Master:
    """The master: its session, what its programs share, and who publishes beside them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.name = options, str(options["name"])
        self.random = random.Random(options["seed"])
        self.seed = int(options["seed"]) * 1_000_003
        self.folder = Path(options["folder"], self.name)
        self.folder.mkdir(exist_ok=True)
        self.stop = Path(options["folder"], "stop")
        self.world: World | None = None
        self.reader: tuple[str, Reader] = ("", Reader())
        self.publisher: Publisher | None = None
        # Compiled functions serve the next session, too.
        self.functions: dict[tuple[object, ...], Callable[..., Any]] = {}
        self.published = 0
        self.beside: list[str] = []
        self.thread: threading.Thread | None = None

    def piece(self, kind: str, act: Callable[[], str | None], seed: int = 0) -> bool:
        """Do a piece of work and say how it came out; return whether it was right."""
        say(at=kind, seed=seed)
        began = time.monotonic()
        try:
            odd = act() or ""
        except Exception as error:
            odd = told(error)
        say(done=kind, seed=seed, odd=odd, seconds=round(time.monotonic() - began, 2))
        return not odd

    # -- the session

    def open(self) -> bool:
        try:
            dr.nodes()
        except dr.errors.SessionClosed:
            return False
        return True

    def begin(self) -> None:
        dr.init_master_worker(backend="zmq", quiet=True, **self.options["begin"])
        name = self.folder / "session"
        name.with_suffix(".new").write_text(active_session().name, encoding="utf-8")
        name.with_suffix(".new").rename(name)

    def share(self) -> None:
        """Make what programs share, and begin to publish beside them."""
        self.world = World(self.folder)
        self.world.compiled = self.functions
        if self.options["publishes"]:
            made = self.publisher = Publisher(self.world)
            # Versions go on where those of the last world ended: who reads them sees them grow.
            made.count = self.published
            self.thread = threading.Thread(target=self.publish, args=(made,), daemon=True)
            self.thread.start()

    def publish(self, publisher: Publisher) -> None:
        try:
            publisher.run()
        except Exception as error:
            self.beside.append(told(error))

    def abandon(self) -> str:
        """Give up what programs share; return what has befallen the publisher."""
        self.world = None
        if self.publisher is not None and self.thread is not None:
            self.publisher.stop()
            self.thread.join(BACK)
            if self.thread.is_alive():
                return f"the publisher has not ended within {BACK:g} s"
            self.published = self.publisher.count
            self.publisher = None
        found, self.beside = self.beside, []
        return "".join(found)

    def recover(self) -> None:
        """Wait until all nodes are there again, or leave the session."""
        self.piece("beside", self.abandon)
        gc.collect()
        if not self.open() or self.random.random() < 0.5:
            self.piece("end", self.end)
        elif not self.piece("back", self.back):
            self.piece("end", self.end)

    def back(self) -> str:
        deadline = time.monotonic() + BACK
        while away := [node for node in dr.nodes() if node.state not in ("ready", "busy")]:
            if time.monotonic() > deadline:
                return f"not back after {BACK:g} s: {[(n.index, n.state, n.why) for n in away]}"
            pause(0.2)
        self.known()
        return ""

    def known(self) -> None:
        """Have all failures raised here that nobody has read: they were planted, or of what was given up."""
        for _ in range(1000):
            try:
                dr.synchronize(timeout=BACK)
                return
            except (IndexError, torch.linalg.LinAlgError, dr.errors.DistruntimeError):
                pass

    def end(self) -> None:
        self.known()
        # A planted failure of a node that was away may come with the end itself. The session has ended then.
        with suppress(IndexError, torch.linalg.LinAlgError):
            dr.shutdown()

    # -- pieces of work

    def operations(self, seed: int) -> str:
        assert self.world is not None
        program = Program(seed, self.world)
        program.run()
        with suppress(Exception):
            # It may have failed while a trace was on.
            program.end_a_trace()
        if program.wrong:
            say(last=program.said[-8:])
        return "\n".join(one.what for one in program.wrong)

    def recorded(self, seed: int) -> str:
        kind = [*KINDS][seed % len(KINDS)]
        compare(seed, kind, CALLS, varying=varying_of(seed, CALLS))
        return ""

    def compiled(self, seed: int) -> str:
        return differs(seed)

    def look(self, seed: int) -> str:
        """Read what the one that publishes has published last."""
        file = Path(self.options["folder"], self.options["owner"], "session")
        if not file.exists():
            return ""
        owner = "" if self.options["publishes"] else file.read_text(encoding="utf-8")
        if self.reader[0] != owner:
            self.reader = owner, Reader(owner or None)
        for _ in range(LOOKS):
            self.reader[1].look()
        found, self.reader[1].wrong = self.reader[1].wrong, []
        return "\n".join(found)

    def turns(self) -> Iterator[tuple[str, int]]:
        while True:
            for kind in _TURNS:
                self.seed += 1
                yield kind, self.seed

    def chaos(self) -> None:
        """Run pieces until the file is there."""
        turns = self.turns()
        while not self.stop.exists():
            if not self.open():
                # A session that does not begin is tried again, as its user would.
                self.piece("session", self.begin)
            elif self.world is None:
                if not self.piece("world", self.share):
                    self.recover()
            else:
                kind, seed = next(turns)
                if not self.piece(kind, partial(getattr(self, kind), seed), seed) or self.beside:
                    self.recover()
        self.piece("beside", self.abandon)
        if self.open():
            self.piece("end", self.end)

    def soak(self) -> None:
        """Run the same pieces in rounds. The one that publishes stays in its session, another begins and ends
        one in each round.
        """
        stays = self.options["publishes"]
        x = torch.zeros(3)
        while not self.stop.exists():
            right = self.open() or (self.piece("session", self.begin) and self.piece("world", self.share))
            for k, kind in enumerate(_ROUND if right else ()):
                self.piece(kind, partial(getattr(self, kind), self.seed + k), self.seed + k)
            self.known()
            there = x.to(dr.place(0, "cpu"))
            began = time.thread_time()
            for _ in range(TIMED):
                there = there + 1
            issuing = time.thread_time() - began
            dr.synchronize()
            del there
            if not stays:
                self.piece("beside", self.abandon)
                self.piece("end", self.end)
            gc.collect()
            say(round=issuing / TIMED * 1e6)
            sys.stdin.readline()
        if stays:
            self.piece("beside", self.abandon)
            self.piece("end", self.end)


def main(options: dict[str, Any]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    # Failures are part of it, and Dynamo tells of each break.
    logging.disable(logging.WARNING)
    logging.getLogger("distruntime").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # torch's own objects need not be looked through by each collection.
    gc.collect()
    gc.freeze()
    master = Master(options)
    master.soak() if options["soak"] else master.chaos()
    say(ended=os.getpid())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
