"""The command `distruntime`, or `python -m distruntime`.

Try it, launch workers and scripts, look at workers and sessions, and show the key that signs.
"""

from __future__ import annotations

import argparse
import code
import gc
import importlib
import importlib.util
import io
import os
import re
import runpy
import signal
import sys
import types
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .command_options import command_parser
from .errors import ConfigurationError, DistruntimeError
from .wire.deadlines import LOOK

if TYPE_CHECKING:
    from .cluster.user_session import Session

_HELLO = """\
torch and dr (distruntime) are imported. Try:  x = torch.randn(3, 3, device="remote")  then  x @ x
"""

# What the demo imports, and the package that brings it.
_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}

# What stands behind a number of bytes shifts it by so many bits.
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def _failed(error: Exception) -> int:
    """Print what went wrong; return the exit status for it."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1


def _look(options: argparse.Namespace) -> int:
    options.timeout = LOOK.get(options.timeout, "--timeout")
    # It imports torch, which takes two seconds.
    looking = importlib.import_module(".looking", __package__)
    status: int = getattr(looking, options.command)(options)
    return status


def _why_slow(options: argparse.Namespace) -> int:
    # It imports torch, which takes two seconds.
    print(repr(importlib.import_module(".timeline.why_slow", __package__).why_slow(options.trace)))
    return 0


def _key() -> int:
    # The module is not imported at the top, because nobody else needs signatures.
    print(importlib.import_module("distruntime.publishing.signing").public_line())
    return 0


def _demo() -> int:
    """Run the example `02_digits.py`, which a wheel has as `demo.py` beside this file."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"the demo needs more packages:  pip install {' '.join(_PACKAGES[name] for name in missing)}",
            file=sys.stderr,
        )
        return 1
    packaged = Path(__file__).with_name("demo.py")
    example = packaged if packaged.exists() else Path(__file__).parents[1] / "examples" / "02_digits.py"
    runpy.run_path(str(example), run_name="__main__")
    return 0


def _begin(options: argparse.Namespace, **more: object) -> Session:
    """Open the session that the options ask for."""
    if not options.workers and not options.listen:
        _expect_workers()
    # The import takes two seconds, and those who ask for help need it not.
    session: Session = importlib.import_module(__package__).init_master_worker(
        backend="zmq",
        world_size=options.world_size,
        workers=options.workers or None,
        listen=options.listen,
        simulate_cuda=options.simulate_cuda,
        key=options.key,
        insecure=options.insecure,
        **more,
    )
    return session


def _comm(options: argparse.Namespace) -> int:
    """Print how fast the collectives are; raise where one is wrong or cannot be."""
    sizes = [_nbytes(text) for text in options.sizes.split(",")]
    with _begin(options, data_channel=options.data_channel):
        # It imports torch, which takes two seconds.
        print(importlib.import_module(".testing.collectives", __package__).check_collectives(sizes=sizes))
    return 0


def _nbytes(text: str) -> int:
    """Return a size such as "16M" in bytes."""
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS:
        number, unit = text, ""
    if not number.isdecimal():
        raise ConfigurationError(f"a size is a number with K, M or G behind it, or none, got {text!r}")
    return int(number) << _UNITS[unit]


def _repl(options: argparse.Namespace) -> int:
    try:
        session = _begin(options)
    except DistruntimeError as error:
        return _failed(error)
    importlib.import_module(".cluster.connect", __package__).lend_to_script()
    torch, distruntime = importlib.import_module("torch"), importlib.import_module(__package__)
    names = {"torch": torch, "dr": distruntime, "session": session}
    try:
        if importlib.util.find_spec("IPython") is None:
            _complete(names)
            code.interact(_HELLO, local=names, exitmsg="")
        else:
            print(_HELLO, end="")
            app = importlib.import_module("IPython.terminal.ipapp").TerminalIPythonApp.instance(user_ns=names)
            app.initialize(["--no-banner", "--no-confirm-exit"])
            # The session began before there was a shell.
            importlib.import_module(".session.interrupts", __package__).watch_shell(app.shell)
            importlib.import_module(".hints", __package__).watch_shell(app.shell)
            app.start()
    finally:
        # Who leaves has had the chance to read what failed, and need not wait for what runs.
        session.shutdown(raise_unread=False)
    return 0


def _run(options: argparse.Namespace) -> int:
    """Run a script or a module as Python would, in a session that ends with it."""
    missing = _missing(options)
    if missing:
        print(missing, file=sys.stderr)
        return 2
    distruntime = importlib.import_module(__package__)
    # An address of ssh's may have commas in its options.
    addresses = re.split(r",(?=[a-z]+://)", options.workers) if options.workers else None
    # The workers of a named session outlive this process, so it does not fork them.
    if not addresses and not options.session:
        _expect_workers()
    if options.torchrun:
        return _torchrun(options, addresses)
    try:
        session = distruntime.init_master_worker(
            backend="zmq",
            world_size=_world_size(options, addresses, 1),
            workers=addresses,
            session=options.session,
            resume="auto" if options.session else False,
            simulate_cuda=options.simulate_cuda,
            key=options.key,
            insecure=options.insecure,
            # The whole process is the script's: who asks for this means the workers, whatever GPUs are here.
            as_cuda="force all" if options.all else "force" if options.as_cuda else False,
        )
    except DistruntimeError as error:
        return _failed(error)
    importlib.import_module(".cluster.connect", __package__).lend_to_script()
    # What was imported stays, and nothing of the script's is there yet. So each later collection passes over
    # torch, as does the last one: a script that does nothing ends 0.8 s sooner (2026-11, 2 cores).
    gc.freeze()
    try:
        # Python puts these in the first place of the path, too. There `python -m distruntime` has the folder
        # that it was started in, where a script of Python's own would not look for modules.
        if not options.module and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
        sys.path.insert(0, "" if options.module else str(Path(options.script).resolve().parent))
        sys.argv = [options.script, *options.arguments]
        sys.excepthook = _tell_of_script
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            _run_file(options.script)
    finally:
        found = importlib.import_module(".cluster.as_cuda", __package__).summary()
        try:
            if options.session and distruntime.is_initialized():
                session.detach()
            else:
                session.shutdown(raise_unread=sys.exc_info()[0] is None)
        finally:
            if found:
                importlib.import_module(".session.screen", __package__).voice(None)(found + "\n")
    return 0


def _run_file(script: str) -> None:
    """Run a script as Python's main module, whose file is a whole path, also after a change of the folder."""
    path = os.path.abspath(script)
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _missing(options: argparse.Namespace) -> str:
    """Say that there is no such script or module, or return nothing. Import nothing."""
    # With torchrun's flags it may be a program, and those who run it look for it.
    if options.torchrun:
        return ""
    here = f"({os.getcwd()})"
    if options.module:
        before = list(sys.path)
        sys.path.insert(0, "")
        try:
            first = options.script.partition(".")[0]
            found = first != "" and importlib.util.find_spec(first) is not None
        finally:
            sys.path[:] = before
        text = f"got -m {options.script}, and there is no such module here {here}"
    else:
        found = os.path.exists(options.script)
        text = (
            f"got the script {options.script!r}, and there is no such file here {here}. Name a script of "
            "Python, or -m and a module"
        )
    return "" if found else text


def _tell_of_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does for a script: its traceback begins in the script."""
    ours = str(Path(__file__).parent) + os.sep, "<frozen runpy>", runpy.__file__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _world_size(options: argparse.Namespace, addresses: list[str] | None, usual: int) -> int | None:
    """Return how many workers are started, or None where they are there, or somebody else starts them."""
    if options.world_size is None and not addresses and not _has_workers():
        return usual
    size: int | None = options.world_size
    return size


def _expect_workers() -> None:
    """Let workers of this machine start while this process still imports torch, if there will be some."""
    if not _has_workers():
        importlib.import_module(".cluster.local_workers", __package__).expect_workers()


def _has_workers() -> bool:
    """Whether the environment names workers, as `distruntime launch` does for its script."""
    return bool(os.environ.get("DISTRUNTIME_LISTEN") or os.environ.get("DISTRUNTIME_WORKERS"))


def _torchrun(options: argparse.Namespace, addresses: list[str] | None) -> int:
    """Run a script under torchrun's agents on workers; return the exit code."""
    distruntime = importlib.import_module(__package__)
    torchrun = importlib.import_module(".python.torchrun", __package__)
    if options.as_cuda or options.simulate_cuda:
        given = "--as-cuda" if options.as_cuda else "--simulate-cuda"
        print(
            f"got {given} and {options.torchrun[0][0]}: a script of torchrun runs on the workers, where "
            f'"cuda" means their own GPUs. Leave {given} out',
            file=sys.stderr,
        )
        return 2
    session = None
    try:
        _, most = torchrun.nodes_of(options.torchrun)
        session = distruntime.init_master_worker(
            backend="zmq",
            world_size=_world_size(options, addresses, most),
            workers=addresses,
            key=options.key,
            insecure=options.insecure,
            quiet=True,
        )
        status: int = torchrun.run_script(options.torchrun, options.script, options.arguments, options.module)
        return status
    except DistruntimeError as error:
        return _failed(error)
    finally:
        if session is not None:
            session.shutdown(raise_unread=False)


def _complete(names: dict[str, object]) -> None:
    """Give the prompt lines that can be edited and completed, as Python's own has.

    Some builds of Python have neither of the two modules.
    """
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline").parse_and_bind("tab: complete")
        importlib.import_module("readline").set_completer(
            importlib.import_module("rlcompleter").Completer(names).complete
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command_parser(__doc__)
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "comm":
                return _comm(options)
            case "key":
                return _key()
            case "status" | "stop" | "top" | "sessions" | "stacks":
                return _look(options)
            case "why-slow":
                return _why_slow(options)
    except (DistruntimeError, AssertionError) as error:
        return _failed(error)
    match options.command:
        case "demo":
            return _demo()
        case "repl":
            return _repl(options)
        case "run":
            return _run(options)
        case "launch":
            status: int = importlib.import_module(".launch", __package__).launch(options)
            return status
    parser.print_help()
    return 0


def command() -> int:
    """Be the program: end quietly when whoever reads the output has gone, as `head` does."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A shell shows this of a program that SIGPIPE has ended. The signal itself stays ignored, because it
        # would also end a session whose sockets break.
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(command())
