# SPDX-License-Identifier: Apache-2.0
"""HTTP client for the API server: one connection per channel, each supervised for dead or very slow peers.

urllib3 implements HTTP (pool, TLS, proxies, chunks, gzip). A channel belongs to one thread, which blocks while it
reads. Another thread calls ``Client.look``, which shuts down the sockets of requests that take too long.
"""

from __future__ import annotations

import base64
import io
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.response import BaseHTTPResponse

from pyebpf_proxy import KUBERNETES_VERSION, __version__
from pyebpf_proxy.common.digits import bounded_int
from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api.access import Access
from pyebpf_proxy.kube.api.credentials import Credentials
from pyebpf_proxy.kube.api.environment import proxy_for
from pyebpf_proxy.kube.api.observer import Observer
from pyebpf_proxy.kube.api.timing import Timing
from pyebpf_proxy.kube.api.trouble import (
    HTTP_ERRORS,
    StoppedError,
    TooLongError,
    TroubleError,
    connection_trouble,
    status_trouble,
)

#: More than any answer needs: an endless answer must not exhaust the memory.
MOST_BYTES = 128 * 1024 * 1024

_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # A dead peer is detected after 30 + 3 · 5 s of silence, or after 45 s with unacknowledged data.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
]
# No warning for insecure-skip-tls-verify: the user has chosen it explicitly.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
_USER_AGENT = f"pyebpf-proxy/{__version__} (linux/{platform.machine()}) kubernetes/{KUBERNETES_VERSION.lstrip('v')}"


class _Status(msgspec.Struct):
    message: str = ""


class Client:
    """State shared by all channels to one API server."""

    def __init__(self, access: Access, limiter: Limiter, observer: Observer, timing: Timing | None = None) -> None:
        self.access = access
        self.credentials = Credentials(access)
        self.timing = timing or Timing()
        self.limiter = limiter
        self.observer = observer
        self.stopping = threading.Event()
        self._channels: list[Channel] = []

    def channel(self) -> Channel:
        """A connection for one thread."""
        channel = Channel(self)
        self._channels.append(channel)
        return channel

    def look(self, now: float) -> None:
        """End requests that take too long. Called periodically."""
        for channel in self._channels:
            channel.look(now)

    def stop(self) -> None:
        """Make every waiting thread raise ``StoppedError`` soon."""
        self.stopping.set()
        for channel in self._channels:
            channel.cut("")

    def wait(self, seconds: float) -> None:
        """Wait; ``StoppedError`` if the client is stopped."""
        if self.stopping.wait(seconds):
            raise StoppedError


class Channel:
    """One connection, used by one thread; only ``look`` and ``cut`` may be called from others."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pool: HTTPConnectionPool | None = None
        self._context: object = None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._limit: float | None = None
        self._why = ""
        self._cut = ""

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        permission: str = "",
        limited: bool = True,
    ) -> Answer:
        """Send a request; the caller reads the answer's body. Raises TroubleError for every status but 2xx.

        ``permission``: named in the error for status 403. ``limited``: the request counts against qps and burst.
        """
        client = self._client
        host = client.access.host
        if limited and (delay := client.limiter.take()) >= 0:
            client.observer.limited(method, host, delay)
            client.wait(delay)
        if client.stopping.is_set():
            raise StoppedError
        url = path + ("?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items()) if query else "")
        begin = time.monotonic()
        try:
            pool = self._connect()
            target = urlsplit(client.access.server).path + url
            headers = urllib3.HTTPHeaderDict(client.credentials.headers())
            headers["Accept"] = "application/json"
            headers["User-Agent"] = _USER_AGENT
            if client.access.compression:
                headers["Accept-Encoding"] = "gzip"
            if body is not None:
                headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
            if pool.proxy is not None and client.access.server.startswith("http:"):
                # For plain HTTP, each request names the server to the proxy. For HTTPS, CONNECT has named it before.
                target = f"http://{host}{target}"
                headers["Host"] = host
            self._cut = ""
            self.expect(client.timing.answer, f"no answer within {client.timing.answer:g} s")
            response = pool.urlopen(
                method,
                target,
                body=body,
                headers=headers,
                retries=False,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
                timeout=urllib3.Timeout(connect=client.timing.connect, read=None),
            )
        except TroubleError:
            client.observer.requested(method, host, "<error>", time.monotonic() - begin)
            raise
        except HTTP_ERRORS as error:
            client.observer.requested(method, host, "<error>", time.monotonic() - begin)
            raise self.broken(error) from None
        client.observer.requested(method, host, str(response.status), time.monotonic() - begin)
        answer = Answer(self, response, method, len(body or b""))
        if not 200 <= response.status < 300:
            if response.status == 401:
                client.credentials.refused()
            raise self._status(answer, permission)
        return answer

    def expect(self, seconds: float, why: str) -> None:
        """Cut the connection, with the reason ``why``, if no data arrives within ``seconds``."""
        self._why = why
        self._limit = time.monotonic() + seconds

    def look(self, now: float) -> None:
        """Cut the connection if expected data is overdue."""
        limit = self._limit
        if limit is not None and now >= limit:
            self._limit = None
            self.cut(self._why)

    def cut(self, why: str) -> None:
        """Shut the connection down while its thread reads."""
        with self._lock:
            self._cut = why
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._limit = None
        self.opened(None)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def done(self) -> None:
        """Called when an answer was read completely: the connection may be reused, and no data is expected."""
        self._limit = None

    def opened(self, opened: socket.socket | None) -> None:
        """Remember the socket in use."""
        with self._lock:
            before, self._socket = self._socket, opened
            if before is not None:
                before.close()
            if opened is None:
                self._cut = ""
            elif self._cut or self._client.stopping.is_set():
                # The time was over before the connection was there: resolving a name may take minutes.
                opened.shutdown(socket.SHUT_RDWR)

    def broken(self, error: Exception) -> Exception:
        """The TroubleError for an error of the connection, which is closed; StoppedError if the client is stopped."""
        with self._lock:
            cut = self._cut
        self.close()
        if self._client.stopping.is_set():
            return StoppedError()
        host = self._client.access.host
        if cut:
            return TroubleError(f"{host}: {cut}", shared=True, lost=True)
        return connection_trouble(host, error)

    def _status(self, answer: Answer, permission: str) -> Exception:
        response = answer.response
        message = ""
        try:
            body = answer.read(1024 * 1024)
            message = msgspec.json.decode(body, type=_Status).message
        except (TroubleError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.close()  # the status is sufficient without the body
        try:
            # Also NaN becomes 0: the order of these arguments matters.
            seconds = max(0.0, min(float(response.headers.get("Retry-After", "0")), 60.0))
        except ValueError:
            seconds = 0.0
        reason = response.reason or "no reason given"
        return status_trouble(self._client.access.host, response.status, reason, message, seconds, permission)

    def _connect(self) -> HTTPConnectionPool:
        """The pool of the channel's only connection; recreated when a certificate file has changed."""
        access = self._client.access
        secure = access.server.startswith("https:")
        context = self._client.credentials.context() if secure else None
        if self._pool is not None and context is self._context:
            return self._pool
        self.close()
        self._context = context
        options: dict[str, Any] = {"maxsize": 1, "block": False, "socket_options": _KEEPALIVE}
        if context is not None:
            options["ssl_context"] = context
            if access.tls.insecure:
                options["cert_reqs"] = "CERT_NONE"
                options["assert_hostname"] = False
            if access.tls.server_name:
                # Sent as SNI, also if the certificate is not verified: a server may choose by it who answers.
                options["server_hostname"] = access.tls.server_name
        proxy = access.proxy_url or proxy_for(access.server, os.environ)
        if proxy:
            manager: urllib3.PoolManager = urllib3.ProxyManager(proxy, proxy_headers=_proxy_headers(proxy), **options)
        else:
            manager = urllib3.PoolManager(**options)
        pool = manager.connection_from_url(access.server)
        # The connection to a proxy may be secure although the server is not.
        secure = isinstance(pool, HTTPSConnectionPool)
        pool.ConnectionCls = _secure_connection(self) if secure else _plain_connection(self)
        self._pool = pool
        return pool


class Answer:
    """An answer whose body is read piece by piece, or as a whole."""

    def __init__(self, channel: Channel, response: BaseHTTPResponse, method: str, sent: int) -> None:
        self.response = response
        self._channel = channel
        self._method = method
        self._sent = sent
        self._timing = channel._client.timing

    def pieces(self) -> Iterator[bytes]:
        """The decompressed body in pieces. Raises TroubleError. The caller sets the timeouts by ``expect``."""
        read = self.response.read1
        while True:
            try:
                piece = read(65536)
            except HTTP_ERRORS as error:
                raise self._channel.broken(error) from None
            if not piece:
                break
            yield piece
        if self._channel._cut or self._channel._client.stopping.is_set():
            raise self._channel.broken(ConnectionAbortedError())
        self._channel.done()

    def read(self, most: int = MOST_BYTES) -> bytes:
        """The whole body. TroubleError if reading fails or is too slow; TooLongError if the body is too long."""
        # One buffer: of an answer in chunks of a byte or two, a list of pieces would take thirty times its size.
        body = io.BytesIO()
        total = 0
        length = self.response.headers.get("Content-Length", "")
        if length.isdecimal() and bounded_int(length, most + 1) > most:
            raise self._too_long(most)
        pace = Pace(self._channel, self._timing)
        for piece in self.pieces():
            total += body.write(piece)
            pace.came(len(piece))
            if total > most:
                raise self._too_long(most)
        client = self._channel._client
        client.observer.transferred(self._method, client.access.host, self._sent, total)
        return body.getvalue()

    def _too_long(self, most: int) -> TooLongError:
        self._channel.close()
        return TooLongError(f"an answer of more than {most >> 20} MiB is not read", shared=True)


class Pace:
    """Enforces a minimum rate of a transfer; otherwise the connection is cut."""

    def __init__(self, channel: Channel, timing: Timing) -> None:
        self._channel = channel
        self._timing = timing
        self._bytes = 0
        self._expect()

    def came(self, size: int) -> None:
        """Record received bytes."""
        self._bytes += size
        if self._bytes >= self._timing.window_bytes:
            self._bytes = 0
            self._expect()

    def _expect(self) -> None:
        timing = self._timing
        self._channel.expect(
            timing.window,
            f"it answers too slowly: less than {timing.window_bytes // 1024} KiB in {timing.window:g} s",
        )


def _proxy_headers(url: str) -> Mapping[str, str]:
    """The credentials in a proxy's URL, as headers: urllib3 ignores them there."""
    parts = urlsplit(url)
    if parts.username is None and parts.password is None:
        return {}
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _secure_connection(channel: Channel) -> type[HTTPSConnection]:
    class Connection(HTTPSConnection):
        def _new_conn(self) -> socket.socket:
            made = super()._new_conn()
            # Keep a duplicate of the descriptor: the TLS socket takes over the original.
            channel.opened(made.dup())
            return made

    return Connection


def _plain_connection(channel: Channel) -> type[HTTPConnection]:
    class Connection(HTTPConnection):
        def _new_conn(self) -> socket.socket:
            made = super()._new_conn()
            channel.opened(made.dup())
            return made

    return Connection
