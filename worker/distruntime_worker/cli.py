"""The command line of the worker."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

from distruntime.errors import ConfigurationError, ConnectionFailed
from distruntime.version import __version__
from distruntime.wire.deadlines import ORPHAN
from distruntime.wire.identity import has_died, process
from distruntime.wire.keys import KeyPair, choose, default_path, warn_of_strangers

from .session.config import WorkerConfig

log = logging.getLogger("distruntime.worker")

# A log file grows to so many bytes, and so many older ones are kept.
_LOG_BYTES, _LOG_FILES = 10_000_000, 3


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
            return _keygen(_keygen_parser().parse_args(arguments[1:]))
        if arguments[:1] in (["member"], ["agent"]):
            # A worker starts these for `dr.spmd` and `distruntime run`. They import torch, which takes two
            # seconds.
            status: int = importlib.import_module(f"{__package__}.python.{arguments[0]}").main(arguments[1:])
            return status
        return _serve(_parser().parse_args(arguments))
    except (ConfigurationError, ConnectionFailed) as error:
        print(f"distruntime-worker: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distruntime-worker",
        description="Hold tensors and run operations for a distruntime master.",
        epilog="`distruntime-worker keygen [FILE]` makes the key that the master and all workers share.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="listen for masters on ADDRESS: tcp://host:port (port 0: any free one) or ipc://path",
    )
    where.add_argument("--master", metavar="ADDRESS", help="connect to the master that listens on ADDRESS")
    parser.add_argument("--node", type=_count, metavar="K", help="ask that master for node number K")
    parser.add_argument(
        "--devices",
        type=_names,
        default=(),
        metavar="D,D",
        help="offer only these devices, by the names that torch has for them there (default: all)",
    )
    parser.add_argument(
        "--simulate-cuda",
        type=_count,
        default=0,
        metavar="N",
        help="simulate N GPUs with CPU tensors",
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the file with the cluster's key (default: $DISTRUNTIME_KEY or ~/.config/distruntime/key); "
        "-: read it from standard input, both halves in one line",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="use no key: whoever reaches the address may run code here"
    )
    parser.add_argument(
        "--threads",
        type=_count,
        default=0,
        metavar="N",
        help="run torch's kernels with N threads (default: torch chooses)",
    )
    parser.add_argument(
        "--max-memory",
        type=_memory,
        metavar="SIZE",
        help=(
            "limit the memory of one session on each device: 8GiB, or 50%% of the device (default: no limit)"
        ),
    )
    parser.add_argument(
        "--no-functions",
        action="store_true",
        help="run operators only: refuse the functions of masters (dr.remote), and unpickle nothing",
    )
    parser.add_argument(
        "--data-address",
        type=_host_and_port,
        default=("", 0),
        metavar="HOST[:PORT]",
        help=(
            "the address at which other workers reach this one (default: the worker finds it out, and takes "
            "any free port)"
        ),
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="write the log to this file too; at 10 MB it becomes FILE.1, and three old ones are kept",
    )
    parser.add_argument("--version", action="version", version=f"distruntime {__version__}")
    # local_workers.py passes this: the worker ends with its last session.
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    # local_workers.py passes this: the master with this process id started the worker. It writes the key to
    # stdin, and keeps stdin open for as long as it lives.
    parser.add_argument("--local", type=int, metavar="PID", help=argparse.SUPPRESS)
    return parser


def _keygen_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distruntime-worker keygen",
        description="Make the key that the master and all workers of a cluster share.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="write the key to FILE (default: $DISTRUNTIME_KEY or ~/.config/distruntime/key)",
    )
    return parser


def _keygen(options: argparse.Namespace) -> int:
    path = options.file or default_path()
    KeyPair.generate().save(path)
    print(f"{path}: made. Copy it to the master and to every worker (mode 0600), and to nobody else.")
    return 0


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(
        handlers=_log_handlers(options.log_file),
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    stop, reasons = threading.Event(), list[str]()
    _stop_on_signals(stop, reasons)
    config = configure(options)
    if options.local is not None:
        threading.Thread(
            target=_follow, args=(options.local, stop, reasons), name="follow-master", daemon=True
        ).start()
    _daemon().serve(config, stop)
    log.info("stopped: %s", reasons[0] if reasons else "its last session has ended")
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


def _log_handlers(file: Path | None) -> list[logging.Handler]:
    """Return where the log goes. A crash in a kernel leaves its stack on standard error in any case."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(
                RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
            )
        except OSError as error:
            raise ConfigurationError(
                f"got --log-file {file}: {error.strerror or error}. Name a file that can be written."
            ) from error
    return handlers


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
        # Writing the log here could meet the log's own writing half-way.
        reasons.append("Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name)
        stop.set()
        # The second signal ends a worker that hangs.
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {value}, expected 0 or more")
    return value


def _memory(text: str) -> int | float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]i?B|B|%)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a size with its unit, as 8GiB, 512MiB or 16GB, or a part, as 50%"
        )
    number, unit = float(found[1]), found[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected more than 0% and at most 100%")
        return number / 100
    size = int(number * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]))
    if size < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}: no session could hold anything")
    return size


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, "0"
    if not port.isdigit() or int(port) > 65535 or not host:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected HOST or HOST:PORT, as 10.0.0.7:29500 or [fe80::1]:29500"
        )
    return host.strip("[]"), int(port)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected names of devices with commas between. Leave --devices out to offer all"
        )
    return names
