"""Replies to the questions that the reader answers at once."""

from __future__ import annotations

from time import perf_counter_ns, time_ns

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire import messages
from distruntime.wire.codec import failure_fields

from ..collectives.data_channel import report
from ..log.turns import Turns
from ..machine import lost
from ..values.objects import failure
from .address import peer_address, unusable_for_workers
from .config import WorkerConfig
from .report import Reporter
from .session import Session

# The log has so many characters of the reason for which a worker is to end.
_REASON = 300


# Whoever holds the key may ask these, with a session or without one.
OfStranger = messages.AskWorker | messages.AskActivity | messages.AskStacks | messages.StopWorker


class Questions:
    """Answers the questions of all sessions of a worker."""

    def __init__(self, config: WorkerConfig, turns: Turns, reporter: Reporter) -> None:
        self._config, self._turns, self._reporter = config, turns, reporter
        # It says why a holder of the key has asked this worker to end.
        self.stopped = ""

    def of_stranger(self, question: OfStranger) -> messages.Reply:
        """Return the reply to a question that needs no session."""
        return messages.Reply(question.request, self._about_us(question))

    def _about_us(self, question: OfStranger) -> object:
        match question:
            case messages.AskWorker():
                return self._reporter.report()
            case messages.AskActivity():
                return self._reporter.activity()
            case messages.AskStacks():
                return self._reporter.stacks()
            case messages.StopWorker(reason=reason):
                self.stopped = reason[:_REASON] or "a holder of the key has asked for it"
                return self._reporter.who()

    def answer(self, session: Session, question: messages.Question[object]) -> None:
        """Reply, or say why not."""
        try:
            match question:
                # An accelerator's profiler takes a while to begin and to end. So a thread may reply.
                case messages.StartTrace(request=request, most=most):
                    session.start_trace(most, lambda: _reply(session, request, None))
                    return
                case messages.StopTrace(request=request):
                    session.stop_trace(lambda kept: _reply(session, request, kept))
                    return
            session.send(messages.Reply(question.request, self._reply(session, question)))
        except (RuntimeError, OSError) as error:
            op = type(question).__name__
            cause = failure(lost.look(error, "a question"), seq=0, position=0, op=op, operands="")
            session.send(messages.Failed(question.request, failure_fields(cause)))

    def _reply(self, session: Session, question: messages.Question[object]) -> object:
        executor, shelf = session.executor, session.executor.shelf
        match question:
            case messages.AskMemory():
                state = executor.state
                return messages.MemoryHeld(len(state.slots), state.executed, state.poisoned())
            case messages.AskStatus():
                return executor.status()
            case messages.AskTurns():
                return self._turns.report()
            case messages.AskWorker() | messages.AskActivity() | messages.AskStacks() | messages.StopWorker():
                return self._about_us(question)
            case messages.AskPassed(after=after):
                return executor.passed(after)
            case messages.AskChannel(channel=channel):
                return report(channel)
            case messages.AskClock():
                return messages.ClockTimes(perf_counter_ns(), time_ns())
            case messages.TakeTrace(offset=offset):
                return session.tracing.take(offset)
            case messages.ListenForPeers(host=host):
                return self._listen(session, host)
            case messages.ListPublished():
                return shelf.listing()
            case messages.ListVersions(name=name):
                return shelf.versions(name)
            case messages.FindPublished(owner=owner, name=name, token=token):
                return shelf.find(owner, name, token)
            case messages.DropOlder(name=name, version=version):
                return shelf.drop_older(name, version)
            case messages.DropPublished(name=name, version=version):
                return shelf.drop(name, version)
        raise ProtocolError(f"a worker does not answer {type(question).__name__}")

    def _listen(self, session: Session, host: str) -> str:
        """Open a session's channel to other workers; return where it listens."""
        session.host = host
        address = peer_address(self._config, host, session.number)
        try:
            return session.listen(address, self._config.keys)
        except ConfigurationError as error:
            raise unusable_for_workers(address, error) from error


def _reply(session: Session, request: int, value: object) -> None:
    session.send(messages.Reply(request, value))
