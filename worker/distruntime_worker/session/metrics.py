"""Health and figures of a worker over HTTP, for Prometheus and for probes.

The threads of this server touch nothing of the worker. They ask for a report and wait, and the reader's
thread, which answers the same question to `distruntime status`, makes one at its next look.
"""

from __future__ import annotations

import hmac
import importlib
import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import final

from distruntime.errors import ConfigurationError
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import WorkerReport

from .report import Reporter

log = logging.getLogger("distruntime.worker")

# A report may be so many seconds old before another one is made.
_FRESH = 0.5
# A request waits so many seconds for a report. A reader that is silent for so long counts as ill.
_PATIENCE = 5.0
# A connection has so many seconds to say what it wants, and there are so many of them at once.
_SILENCE, _MOST = 5.0, 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@final
class Metrics:
    """The server. `look` is for the reader's thread.

    Args:
        host: it listens at this address of the machine.
        port: 0 is any free one.
        keys: whoever reads the figures shows the token of this key. None: the worker has no key, and the
            server is for this machine alone.

    Raises:
        ConfigurationError: the package `prometheus_client` is missing, or the address cannot be used.
    """

    def __init__(self, host: str, port: int, keys: KeyPair | None) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigurationError("got --metrics, which needs a package:  pip install prometheus_client")
        if keys is None and host not in _LOOPBACK:
            raise ConfigurationError(
                f"got --metrics {host}:{port} without a key, so that whoever reaches it could read the "
                "figures: give --key, or leave the host out to serve this machine only"
            )
        self._library = importlib.import_module("prometheus_client")
        self._core = importlib.import_module("prometheus_client.core")
        self._token = keys.token() if keys is not None else ""
        self._made = threading.Condition()
        self._report: WorkerReport | None = None
        self._reported_at = self._looked_at = time.monotonic()
        self._wanted = False
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigurationError(
                f"got --metrics {host}:{port}, where nothing can listen: {error.strerror}. Name another port"
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("health and metrics at http://%s:%d/healthz and /metrics", host, self.port)

    def look(self, reporter: Reporter) -> None:
        """Note that the reader is well, and make a report if somebody waits for one."""
        self._looked_at = time.monotonic()
        if self._wanted:
            with self._made:
                self._report, self._wanted, self._reported_at = reporter.report(), False, time.monotonic()
                self._made.notify_all()

    def close(self) -> None:
        """Close the server. Return when it listens no more."""
        self._server.shutdown()
        self._server.server_close()

    def silent(self) -> float:
        """Return for how many seconds the reader has not looked; 0 where it is well."""
        passed = time.monotonic() - self._looked_at
        return passed if passed > _PATIENCE else 0.0

    def allows(self, authorization: str) -> bool:
        """Whether a request shows the token."""
        said = authorization.removeprefix("Bearer ").strip()
        return not self._token or hmac.compare_digest(said.encode(), self._token.encode())

    def figures(self) -> bytes | None:
        """Return the figures in Prometheus' format; None: the reader makes no report. Block until it does."""
        with self._made:
            asked = time.monotonic()
            if self._report is None or asked - self._reported_at > _FRESH:
                self._wanted = True
                self._made.wait_for(lambda: self._reported_at >= asked, _PATIENCE)
                if self._reported_at < asked:
                    return None
            report = self._report
        if report is None:
            return None
        registry = self._library.CollectorRegistry()
        registry.register(_Collected(self._core, report))
        text: bytes = self._library.generate_latest(registry)
        return text


class _Server(ThreadingHTTPServer):
    """Serves a few connections at a time, and closes the others."""

    daemon_threads = True
    # Somebody may ask while the worker ends.
    block_on_close = False

    def __init__(self, address: tuple[str, int], metrics: Metrics) -> None:
        self.metrics = metrics
        self._places = threading.BoundedSemaphore(_MOST)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: object, client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a stranger who hangs up half-way is no news."""


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /healthz` and `GET /metrics`."""

    server: _Server
    timeout = _SILENCE

    def do_GET(self) -> None:
        """Answer."""
        match self.path.partition("?")[0]:
            case "/healthz":
                silent = self.server.metrics.silent()
                text = f"the reader has not looked for {silent:.0f} s\n" if silent else "ok\n"
                self._send(503 if silent else 200, text.encode())
            case "/metrics" if not self.server.metrics.allows(self.headers.get("Authorization", "")):
                hint = b"show the token of the cluster's key, as `distruntime-worker token` prints it\n"
                self._send(401, hint)
            case "/metrics":
                figures = self.server.metrics.figures()
                self._send(503 if figures is None else 200, figures or b"the reader makes no report\n")
            case _:
                self._send(404, b"there are /healthz and /metrics\n")

    def _send(self, status: int, text: bytes) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape each few seconds would fill the log."""


@final
class _Collected:
    """What the library asks for: each figure with its samples."""

    def __init__(self, core: ModuleType, report: WorkerReport) -> None:
        self._core, self._report = core, report

    def collect(self) -> Iterator[object]:
        """Yield the figures."""
        for name, text, labels, samples in _figures(self._report):
            family = self._core.GaugeMetricFamily(f"distruntime_worker_{name}", text, labels=labels)
            for values, figure in samples:
                family.add_metric(values, figure)
            yield family


_Figure = tuple[str, str, list[str], list[tuple[list[str], float]]]


def _figures(report: WorkerReport) -> Iterator[_Figure]:
    """Yield each figure: its name, what it is, the names of its labels, and its samples."""
    about = [report.host, report.address, report.version, report.torch, report.python]
    yield "info", "What runs here.", ["host", "address", "version", "torch", "python"], [(about, 1.0)]
    yield "up_seconds", "Seconds since the worker has started.", [], [([], report.age)]
    yield "processor_ratio", "Cores that it has used lately.", [], [([], report.processor / 100)]
    yield "sessions", "Sessions that it has.", [], [([], float(len(report.sessions)))]
    devices = report.devices
    for field in ("total", "free", "allocated", "reserved"):
        memory = [([device.name], float(getattr(device, field))) for device in devices]
        yield f"device_memory_{field}_bytes", f"Memory of a device: {field}.", ["device"], memory
    shares = [([d.name], share / 100) for d, share in zip(devices, report.busy) if share is not None]
    yield "device_busy_ratio", "Part of the last second in which a GPU ran kernels.", ["device"], shares
    rows = report.sessions
    values = [([row.name], float(row.values)) for row in rows]
    yield "session_values", "Values that a session holds.", ["session"], values
    queued = [([row.name], float(row.queued)) for row in rows]
    yield "session_queued", "About how many of its instructions have not begun.", ["session"], queued
    running = [([row.name], row.seconds if row.running is not None else 0.0) for row in rows]
    yield "session_running_seconds", "For so long its operator of now has run.", ["session"], running
    away = [([row.name], row.away or 0.0) for row in rows]
    yield "session_without_master_seconds", "For so long its master has been away.", ["session"], away
