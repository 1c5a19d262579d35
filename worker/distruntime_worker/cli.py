"""The command line of the worker, its settings from the environment, and logs that programs read."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn, final

from distruntime.errors import ConfigurationError, ConnectionFailed
from distruntime.wire.deadlines import ORPHAN
from distruntime.wire.identity import has_died, process
from distruntime.wire.keys import KeyPair, choose, default_path, warn_of_strangers
from distruntime.wire.scratch import sweep

from .options import keygen_parser, parser, token_parser
from .session.config import WorkerConfig


@final
class JsonLines(logging.Formatter):
    """Writes each record as an object of JSON on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "host": self._host,
            "pid": os.getpid(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


# The variable of `--max-memory` is this with MAX_MEMORY behind it.
_VARIABLE = "DISTRUNTIME_WORKER_"
# These exclude each other, and the command line counts.
_WHERE = frozenset({"listen", "master"})
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# These are no settings of a worker.
_NOT_SETTINGS = frozenset({"help", "version", "local", "once"})


def complete(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the arguments with those of the environment before them. The command line wins.

    Args:
        parser: knows which settings there are.
        arguments: those of the command line.

    Raises:
        ConfigurationError: a variable has what is no value of its setting.
    """
    # A master says all that a worker of its own needs. The other settings are for daemons.
    if {"--local", "--once"} & set(arguments):
        return list(arguments)
    said = {word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")}
    left_out = _NOT_SETTINGS | (_WHERE if said & _WHERE else set())
    words: list[str] = []
    for action in parser._actions:
        for option in action.option_strings:
            name = option.removeprefix("--")
            variable = _VARIABLE + name.upper().replace("-", "_")
            value = environment.get(variable, "")
            if value and option.startswith("--") and name not in left_out:
                words += _words(option, value, action.nargs == 0, variable)
    return [*words, *arguments]


def _words(option: str, value: str, switch: bool, variable: str) -> list[str]:
    """Return the arguments that a setting stands for."""
    if not switch:
        return [f"{option}={value}"]
    if value.lower() not in (*_YES, *_NO):
        raise ConfigurationError(f"${variable}: {option} is true or false, got {value!r}")
    return [option] if value.lower() in _YES else []


log = logging.getLogger("distruntime.worker")

# A worker starts these for `dr.spmd`, `distruntime run` and Inductor. They import torch, which takes long.
_PROCESSES = {"member": ".python.member", "agent": ".python.agent", "compiler": ".programs.compiler"}


def command() -> NoReturn:
    """Be the program `distruntime-worker`."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End this process, but leave out what Python and C++ do last."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter must not be taken apart while a thread is in a kernel, or while one of gloo's frees a
    # tensor. Such a thread asks for the GIL next. Python before 3.14 then ends the thread, its stack is
    # unwound through C++, and the process dies by SIGABRT. A forked worker would also look through all that
    # was imported, and so copy the memory that workers share.
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `distruntime-worker`; return its exit code: 0 after SIGTERM or Ctrl-C, 2 for unusable settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["keygen"]:
            return _keygen(keygen_parser().parse_args(arguments[1:]))
        if module := _PROCESSES.get("".join(arguments[:1])):
            status: int = importlib.import_module(module, __package__).main(arguments[1:])
            return status
        if arguments[:1] == ["token"]:
            return _token(token_parser().parse_args(arguments[1:]))
        known = parser()
        return _serve(known.parse_args(complete(known, arguments)))
    except (ConfigurationError, ConnectionFailed) as error:
        print(f"distruntime-worker: {error}", file=sys.stderr)
        return 2


def _keygen(options: argparse.Namespace) -> int:
    path = options.file or default_path()
    KeyPair.generate().save(path)
    print(f"{path}: made. Copy it to the master and to every worker (mode 0600), and to nobody else.")
    return 0


def _token(options: argparse.Namespace) -> int:
    print(KeyPair.load(options.key or default_path()).token())
    return 0


def _serve(options: argparse.Namespace) -> int:
    # A crash in a kernel leaves its stack on standard error, too.
    handler = logging.StreamHandler(sys.stderr)
    if options.log_format == "json":
        handler.setFormatter(JsonLines())
    logging.basicConfig(
        handlers=[handler],
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    stop, reasons = threading.Event(), list[str]()
    _stop_on_signals(stop, reasons)
    config = configure(options)
    sweep()
    if options.local is not None:
        threading.Thread(
            target=_follow, args=(options.local, stop, reasons), name="follow-master", daemon=True
        ).start()
    asked: str = _daemon().serve(config, stop)
    log.info("stopped: %s", reasons[0] if reasons else asked or "its last session has ended")
    return 0


def _daemon() -> ModuleType:
    """Return the module of the daemon. It imports torch, which takes two seconds."""
    name = f"{__package__}.session.daemon"
    # The nursery has imported it before it forks.
    if name in sys.modules:
        return sys.modules[name]
    # Importing torch makes objects that stay, and looking through them again and again is a tenth of a
    # worker's start.
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def configure(options: argparse.Namespace) -> WorkerConfig:
    """Check the options and fetch the key.

    Raises:
        ConfigurationError: they contradict each other, or the address needs a key and there is none.
    """
    address = options.listen or options.master
    if options.node is not None and options.master is None:
        raise ConfigurationError(
            f"got --node {options.node} with --listen: a listening worker is numbered by its master. Leave "
            "--node out."
        )
    if options.data_address[1] and address.startswith("ipc://"):
        raise ConfigurationError(
            f"got --data-address {options.data_address[0]}:{options.data_address[1]} with {address}: "
            "other workers reach this one over ipc too, and no port is listened at. Leave the port out."
        )
    if options.local is not None:
        keys = _key_from_master()
    else:
        if options.insecure and options.key is not None:
            raise ConfigurationError(
                "got both --key and --insecure: with a key only its holders are let in. Leave one out."
            )
        # Who starts a worker through ssh writes the key to its standard input, and to no file.
        if options.key == Path("-"):
            keys = _key_from_master()
        else:
            keys = choose(address, path=options.key, insecure=options.insecure)
        if options.insecure:
            warn_of_strangers([address])
    return WorkerConfig(
        listen=options.listen,
        master=options.master,
        node=options.node,
        devices=options.devices,
        simulate_cuda=options.simulate_cuda,
        keys=keys,
        threads=options.threads,
        data_host=options.data_address[0],
        data_port=options.data_address[1],
        once=options.once,
        max_memory=options.max_memory,
        functions=not options.no_functions,
        metrics=options.metrics,
    )


def _key_from_master() -> KeyPair | None:
    # stdin is read unbuffered, so that _follow sees all that comes after. A key never travels in argv, which
    # every user of the machine can read.
    words = bytearray()
    while not words.endswith(b"\n"):
        read = os.read(0, 1)
        if not read:
            raise ConfigurationError("got no key on stdin: the master that started this worker is gone")
        words += read
    halves = words.split()
    return KeyPair(bytes(halves[0]), bytes(halves[1])) if len(halves) == 2 else None


def _follow(master: int, stop: threading.Event, reasons: list[str]) -> None:
    """Stop when the master that started this worker is gone: stdin ends, or its process is no more.

    Both are needed: children that the master forked hold the other end of stdin open, and a parent's death is
    not signalled. The master is the parent, or the parent of the nursery that forked this worker.
    """
    identity = process(master)
    while os.getppid() == master or (identity[2] and not has_died(identity)):
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 4096):
            break
    reasons.append("the master that started this worker is gone")
    log.info("%s: stopping", reasons[0])
    stop.set()
    threading.Event().wait(ORPHAN.get())
    # A kernel that hangs must not outlive its master.
    os._exit(1)


def _stop_on_signals(stop: threading.Event, reasons: list[str]) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        first = not reasons
        # Writing the log here could meet the log's own writing half-way.
        reasons.append("Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name)
        # Another signal may come while this one sets the event, whose lock cannot be taken twice.
        if first:
            stop.set()
        # The second Ctrl-C ends a worker that hangs. A second SIGTERM does not: launchers ask all workers to
        # end, and then each while they wait for it. Whatever runs at exit would be left out, such as the
        # removal of this process's folders. Launchers kill a worker that hangs.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
