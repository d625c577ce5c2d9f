# SPDX-License-Identifier: Apache-2.0
"""An API server that a test controls to the byte; and a source that follows it, with what it delivered and logged.

For details of the protocol that the real server shows only by chance. It sends the scripted answers. Watches without a
script stay open and silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api.access import Access
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.observer import Observer, Silent
from pyebpf_proxy.kube.api.source import ApiSource
from pyebpf_proxy.kube.api.timing import Timing
from pyebpf_proxy.kube.source import Batch, Change
from tests.support.logs import Log

DEADLINE = 60.0
#: Short enough for tests, long enough for a busy machine.
QUICK = Timing(
    connect=5,
    answer=5,
    # Longer than a busy machine stalls; no test of this server is about slow answers.
    window=20.0,
    window_bytes=4096,
    backoff=(0.02, 0.1),
    forbidden=0.05,
    settle=0.3,
    node=0.3,
    look=0.05,
)

Object = dict[str, Any]
Handler = Callable[["Exchange"], None]


class Exchange:
    """One request, and the methods to answer it."""

    def __init__(self, handler: http.server.BaseHTTPRequestHandler, api: ScriptedApi, body: bytes) -> None:
        parts = urlsplit(handler.path)
        self.method = handler.command
        self.path = parts.path
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.headers = handler.headers
        self.body = body
        self.begun = time.monotonic()
        self._handler = handler
        self._api = api

    @property
    def resource(self) -> str:
        return self.path.rpartition("/")[2]

    def answer(self, code: int, body: bytes | Object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._handler.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self._handler.send_header(name, value)
        self._handler.send_header("Content-Length", str(len(data)))
        self._handler.end_headers()
        self._handler.wfile.write(data)

    def status(self, code: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.answer(code, {"kind": "Status", "code": code, "message": message}, headers)

    def begin(self) -> None:
        """Begin a chunked answer."""
        self._handler.send_response(200)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def chunk(self, data: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, kind: str, item: Object) -> None:
        self.chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def end(self) -> None:
        """End the chunked answer properly."""
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close the connection now."""
        self._handler.close_connection = True

    def raw(self, data: bytes) -> None:
        """Send bytes without HTTP framing."""
        self._handler.wfile.write(data)
        self._handler.close_connection = True

    def hold(self) -> None:
        """Send nothing more until the server is stopped or ``release`` is called."""
        self._api.held.wait(DEADLINE)
        self.cut()

    def initial(self, items: list[Object], version: str) -> None:
        """The list at the beginning of a watch."""
        self.begin()
        for item in items:
            self.event("ADDED", item)
        annotations = {"k8s.io/initial-events-end": "true"}
        self.event("BOOKMARK", {"metadata": {"resourceVersion": version, "annotations": annotations}})

    def listed(self, items: list[Object], version: str, more: str = "") -> None:
        self.answer(200, {"kind": "List", "metadata": {"resourceVersion": version, "continue": more}, "items": items})


class ScriptedApi:
    """``with ScriptedApi() as api``. ``script(resource, handler, …)``: the answers to the next requests, in order."""

    def __init__(self) -> None:
        self.requests: list[Exchange] = []
        #: The resourceVersion that the server has reached, and the requests that asked only for it, without a script.
        self.version = "1000000"
        self.checks: list[Exchange] = []
        self.held = threading.Event()
        self._scripts: dict[str, deque[Handler]] = defaultdict(deque)
        self._default: dict[str, list[Object]] = defaultdict(list)
        self._lock = threading.Lock()
        api = self

        class Requests(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 0

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                with contextlib.suppress(OSError):
                    api._serve(Exchange(self, api, body))

            do_POST = do_PATCH = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Requests)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> ScriptedApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def has(self, resource: str, *items: Object) -> None:
        """What requests without a script get."""
        self._default[resource] = list(items)

    def script(self, resource: str, *handlers: Handler) -> None:
        with self._lock:
            self._scripts[resource].extend(handlers)

    def asked(self, resource: str) -> list[Exchange]:
        with self._lock:
            return [request for request in self.requests if request.resource == resource]

    def _serve(self, exchange: Exchange) -> None:
        if exchange.query.get("limit") == "1":
            self.checks.append(exchange)
            exchange.listed([], self.version)
            return
        with self._lock:
            self.requests.append(exchange)
            scripts = self._scripts[exchange.resource]
            handler = scripts.popleft() if scripts else self._quiet
        handler(exchange)

    def _quiet(self, exchange: Exchange) -> None:
        if "sendInitialEvents" in exchange.query:
            exchange.initial(self._default[exchange.resource], "1")
            exchange.hold()
        elif "watch" in exchange.query:
            exchange.begin()
            exchange.hold()
        elif exchange.method == "GET":
            exchange.listed(self._default[exchange.resource], "1")
        else:
            exchange.answer(201, {})


class Following:
    """A running source: the batches that it delivered, the resulting objects, and the lines that it logged."""

    def __init__(
        self,
        access: Access,
        timing: Timing = QUICK,
        node: str = "node1",
        observer: Observer | None = None,
        waits_for_cidrs: bool = False,
    ) -> None:
        self.client = Client(access, Limiter(-1, 0), observer or Silent(), timing)
        self.batches: list[Batch] = []
        self.lines: list[str] = []
        #: How many seconds the receiver of a batch takes.
        self.busy = 0.0
        self._source = ApiSource(self.client, node, waits_for_cidrs=waits_for_cidrs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._handler = _Lines(self.lines)

    def begin(self) -> None:
        """Start reading; batches are not taken yet."""
        self._source.start()

    def __enter__(self) -> Following:
        logger = logging.getLogger("pyebpf_proxy")
        logger.addHandler(self._handler)
        self._level = logger.level
        logger.setLevel(logging.INFO)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        logger = logging.getLogger("pyebpf_proxy")
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)
        assert not self._thread.is_alive()

    @property
    def complete(self) -> bool:
        return any(batch.complete for batch in self.batches)

    @property
    def changes(self) -> list[Change]:
        return [change for batch in list(self.batches) for change in batch.changes]

    @property
    def objects(self) -> dict[tuple[str, str], Any]:
        """By kind and name."""
        there: dict[tuple[str, str], Any] = {}
        for change in self.changes:
            if change.object is None:
                del there[change.kind, change.name]
            else:
                there[change.kind, change.name] = change.object
        return there

    def names(self, kind: str) -> set[str]:
        return {name for each, name in self.objects if each == kind}

    def logged(self, *parts: str) -> list[str]:
        """Lines of the log that contain all of these parts."""
        return [str(line) for line in Log(self.lines).lines(*parts)]

    def troubles(self) -> Mapping[str, str]:
        return self._source.troubles()

    def errors(self) -> list[str]:
        """Warnings and errors of the log."""
        return [str(line) for line in Log(self.lines).lines() if line.level in ("warning", "error")]

    def until(self, condition: Callable[[], object], seconds: float = DEADLINE) -> None:
        wait_until(condition, seconds, lambda: "\n".join(map(str, [*self.lines, *self.changes[-20:]])))

    def _run(self) -> None:
        async def main() -> None:
            self._task = asyncio.current_task()
            with contextlib.suppress(asyncio.CancelledError):
                await self._source.run(self._take)

        self._loop.run_until_complete(main())
        self._loop.close()

    def _take(self, batch: Batch) -> None:
        self.batches.append(batch)
        time.sleep(self.busy)

    _task: Any = None


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        self._lines.append(f"{record.levelname.lower()} {record.getMessage()} {fields}")


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE, more: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s\n{more()}"
        time.sleep(0.01)


@contextlib.contextmanager
def following(api: ScriptedApi, timing: Timing = QUICK, observer: Observer | None = None) -> Iterator[Following]:
    with Following(Access(api.url), timing, observer=observer) as source:
        yield source


def service(name: str, address: str = "10.96.0.1", version: str = "1", **spec: Any) -> Object:
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "default", "resourceVersion": version},
        "spec": {"clusterIP": address, "ports": [{"port": 80, "protocol": "TCP"}], **spec},
    }


def node(name: str = "node1", address: str | None = "192.0.2.1") -> Object:
    addresses = [{"type": "InternalIP", "address": address}] if address else []
    return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}, "status": {"addresses": addresses}}
