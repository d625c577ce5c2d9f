# SPDX-License-Identifier: Apache-2.0
"""One HTTP connection. It parses requests, sends answers and enforces limits. h11 implements HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from http import HTTPStatus
from typing import Any, cast

import h11

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.servers.http import Handler, Pool, Request, Response, Source, Sources, http_date

#: The same limit as in Go's net/http.
MAX_HEADER_BYTES = (1 << 20) + 4096
#: While many bytes are buffered, requests larger than this are refused.
SMALL_BYTES = 16 << 10
#: No client needs more header lines; parsing many would be expensive.
MAX_HEADER_LINES = 500
MAX_BODY_BYTES = 64 << 10
#: Seconds for a request to arrive completely, for the next one to begin, and for an answer to be read.
REQUEST_SECONDS = 10.0
IDLE_SECONDS = 120.0
WRITE_SECONDS = 30.0
#: How long the connection of a refused peer stays open, so that it can read the answer, and how much is read of it.
LINGER_SECONDS = 0.5
MOST_IGNORED_BYTES = 64 << 10
#: How many pipelined requests are answered, and how many chunks of a body read, before other connections are served;
#: and the CPU time after which no further request is answered (seconds): a scrape takes much longer than a probe.
TURN = 8
CHUNKS = 64
TURN_SECONDS = 0.002
WRITE_BUFFER = 256 << 10

#: Limit of incomplete data that h11 buffers within a body (a chunk's header, trailers), and how much it gets at a time:
#: for some malformed lines, its time grows with the square of their length.
MAX_INCOMPLETE_BYTES = 1 << 10
#: What no header may contain. h11 also refuses this, but after spaces in a time that grows with the square of their
#: number: 45 minutes for a header of 1 MiB, in which no other thread runs.
_ILLEGAL = re.compile(rb"[\0\v\f]|\r(?!\n)")
#: Overhead of a buffered header line besides its bytes, which h11 stores twice (name as sent and in lower case).
LINE_BYTES = 300
#: Estimated cost of a new connection, and of a refused one (seconds of CPU time).
CONNECTION_SECONDS = 0.0002
REFUSAL_SECONDS = 0.00002

_log = Logger("servers")


class Connection(asyncio.Protocol):
    """The server's side of one connection."""

    def __init__(
        self, handler: Handler, pool: Pool, siblings: set[Connection], sources: Sources, source: Source
    ) -> None:
        """``siblings``: the connections of the same listener; it adds and removes itself."""
        self.source = source
        self._sources = sources
        self._handler = handler
        self._pool = pool
        self._siblings = siblings
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._seen = 0  # no end of a header was found before this offset
        self._parser: h11.Connection | None = None
        self._request: h11.Request | None = None
        self._body = b""
        self._head_bytes = 0  # memory of the current request's header
        self._kept = 0
        self._resting = False
        # Charged with the first answer, or at the end. If it were charged at once, new connections could use up all of
        # a source's share, and none of them would be answered.
        self._owed = CONNECTION_SECONDS
        self._ended = False
        self._writing = True
        self._scheduled = False
        self._refused = False
        self._ignored = 0
        self._deadline = self._loop.time() + REQUEST_SECONDS
        self._transport: asyncio.Transport

    # ---- asyncio's calls ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.source.count(1)
        self._sources.charge_all(self.source, CONNECTION_SECONDS, self._loop.time())
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER)
        self._siblings.add(self)
        self._pool.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.source.count(-1)
        self.source.waiting.pop(self, None)
        self._charge_connection()
        self._keep(0)
        self._buffer.clear()
        self._siblings.discard(self)
        self._pool.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            # A peer that sends without end would occupy a CPU, and is not charged for it.
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED_BYTES:
                self._transport.pause_reading()
            return
        if self._transport.is_closing():
            return
        if not self._buffer and self._request is None:
            self._deadline = self._loop.time() + REQUEST_SECONDS
        self._buffer += data
        self._turn()

    def eof_received(self) -> bool:
        # A peer that has finished sending may still read. Answer complete requests, then close the connection.
        self._ended = True
        if self._refused:
            return False
        self._turn()
        return True

    def pause_writing(self) -> None:
        self._writing = False
        self._deadline = self._loop.time() + WRITE_SECONDS
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writing = True
        self._deadline = self._loop.time() + REQUEST_SECONDS
        if not self._transport.is_closing():
            if not self._resting and not self._refused:
                self._transport.resume_reading()
            self._turn()

    # ---- bounds ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort the connection."""
        self._transport.abort()

    def look(self, now: float) -> None:
        """Abort the connection if it takes too long."""
        if now >= self._deadline:
            self.abort()

    def _keep(self, count: int) -> None:
        self._pool.kept += count - self._kept
        self._kept = count

    def _keep_all(self) -> None:
        """Count all buffered bytes of the current request, here and in the parser."""
        held = len(self._buffer)
        if self._request is not None and self._parser is not None:
            held += self._head_bytes + len(self._body) + len(self._parser.trailing_data[0])
        self._keep(held)

    def _too_much(self) -> bool:
        return len(self._buffer) > MAX_HEADER_BYTES or (
            self._kept > SMALL_BYTES and self._pool.kept > self._pool.kept_bytes
        )

    def _charge_connection(self) -> None:
        if self._owed:
            self.source.charge(self._owed, self._loop.time())
            self._owed = 0.0

    def _must_wait(self) -> bool:
        """Whether the source has used up its share. Then the connection waits, and reads and answers nothing."""
        if not self._resting and (self.source.waiting or self.source.rest(self._loop.time()) > 0):
            self._resting = True
            self._transport.pause_reading()
            self.source.wait(self, self._loop)
        return self._resting

    def go_on(self) -> None:
        """The wait has ended."""
        self._resting = False
        if self._transport.is_closing():
            return
        self._turn(waited=True)
        if not self._resting and self._writing and not self._refused:
            self._transport.resume_reading()

    # ---- requests ----------------------------------------------------------------------------------------------

    def _turn(self, waited: bool = False) -> None:
        """Answer the complete requests, a few at a time. ``waited``: it is this connection's turn."""
        self._scheduled = False
        if self._refused or not self._writing or self._transport.is_closing():
            return
        if not waited and self._must_wait():
            # Data that was read before the pause also counts.
            self._keep_all()
            if self._too_much():
                self._refuse(431)
            return
        before = time.thread_time()
        more = self._answer_some(before + TURN_SECONDS)
        self._sources.charge(self.source, time.thread_time() - before, self._loop.time())
        self._charge_connection()
        if more and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _answer_some(self, end: float) -> bool:
        """Answer a few requests, none after ``end`` of this thread's CPU time. True if there may be more."""
        for _ in range(TURN):
            if self._refused or not self._writing or self._transport.is_closing():
                return False
            if not self._process_one():
                if not self._refused:
                    self._keep_all()
                    if self._request is not None and self._too_much():
                        self._refuse(413)
                if self._ended and not self._refused and not self._scheduled:
                    self._transport.close()
                return False
            self._keep(len(self._buffer))
            if time.thread_time() >= end:
                break
        return True

    def _process_one(self) -> bool:
        """Process one request; False if none is complete."""
        try:
            if self._request is None and not self._head():
                return False
            if not self._read_body():
                return False
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            self._refuse(status if status in (413, 431, 501) else 400)
            return False
        self._answer()
        return True

    def _head(self) -> bool:
        buffer = self._buffer
        if not self._seen:
            # Empty lines before a request are allowed.
            while buffer[:2] == b"\r\n":
                del buffer[:2]
        start = max(0, self._seen - 3)
        ends = [end for mark in (b"\n\r\n", b"\n\n") if (end := buffer.find(mark, start) + len(mark)) >= len(mark)]
        self._keep_all()
        if not ends:
            self._seen = len(buffer)
            if self._too_much():
                self._refuse(431)
            return False
        end = min(ends)
        self._seen = 0
        if end > MAX_HEADER_BYTES or buffer.count(b"\n", 0, end) > MAX_HEADER_LINES:
            self._refuse(431)
            return False
        if _ILLEGAL.search(buffer, 0, end):
            self._refuse(400)
            return False
        self._head_bytes = 2 * end + LINE_BYTES * buffer.count(b"\n", 0, end)
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_INCOMPLETE_BYTES)
        self._parser.receive_data(bytes(buffer[:end]))
        del buffer[:end]
        event = self._parser.next_event()
        if not isinstance(event, h11.Request):
            self._refuse(400)
            return False
        if event.method == b"CONNECT" or not event.http_version.startswith(b"1."):
            self._refuse(501 if event.method == b"CONNECT" else 505)
            return False
        self._request, self._body = event, b""
        return True

    def _read_body(self) -> bool:
        parser = self._parser
        assert parser is not None
        chunks = 0
        while True:
            event: Any = parser.next_event()
            if event is h11.NEED_DATA:
                if parser.they_are_waiting_for_100_continue:
                    self._write(parser.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
                if not self._buffer:
                    return False
                parser.receive_data(bytes(self._buffer[:MAX_INCOMPLETE_BYTES]))
                del self._buffer[:MAX_INCOMPLETE_BYTES]
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > MAX_BODY_BYTES:
                    self._refuse(413)
                    return False
                chunks += 1
                if chunks == CHUNKS:
                    self._scheduled = True
                    self._loop.call_soon(self._turn)
                    return False
            elif isinstance(event, h11.EndOfMessage):
                # The remaining data is the next request.
                self._buffer[:0] = parser.trailing_data[0]
                return True
            else:
                self._refuse(400)
                return False

    def _answer(self) -> None:
        parser, request = self._parser, self._request
        assert parser is not None
        assert request is not None
        # The buffer has the parser's data of the next request.
        self._request = self._parser = None
        self._deadline = self._loop.time() + IDLE_SECONDS
        self._pool.touch(self)
        path, _, query = _origin(request.target.decode("latin-1")).partition("?")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(request.headers))}
        method = request.method.decode("latin-1")
        try:
            answer = self._handler(Request(method, path, query, headers, self._body))
        except Exception:
            _log.internal_error()
            answer = Response(500, (("Content-Type", "text/plain; charset=utf-8"),), b"500 Internal Server Error\n")
        fields = [*answer.headers, ("Date", http_date()), ("Content-Length", str(len(answer.body)))]
        reason = HTTPStatus(answer.status).phrase
        out = parser.send(h11.Response(status_code=answer.status, headers=fields, reason=reason)) or b""
        if method != "HEAD":
            out += parser.send(h11.Data(data=answer.body)) or b""
        out += parser.send(h11.EndOfMessage()) or b""
        self._write(out)
        if parser.our_state is not h11.DONE:
            self._transport.close()

    def _refuse(self, status: int) -> None:
        """Answer a malformed or too large request as Go does, and close the connection."""
        text = f"{status} {HTTPStatus(status).phrase}"
        head = f"HTTP/1.1 {text}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
        self._buffer.clear()
        self._request = self._parser = None
        self._body = b""
        self._keep(0)
        self._write((head + text).encode())
        # Let the peer close the connection, or close it later: closing a socket with unread data discards the answer.
        self._refused = True
        self._deadline = self._loop.time() + LINGER_SECONDS
        if self._transport.can_write_eof() and not self._transport.is_closing():
            try:
                self._transport.write_eof()
            except OSError:
                self._transport.abort()  # the peer was closed already, and has reset the connection

    def _write(self, data: bytes | None) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)


def _origin(target: str) -> str:
    """Path and query of a request's target, which is a whole URL if the client uses this server as a proxy."""
    _, scheme, rest = target.partition("://")
    return target if target.startswith("/") or not scheme else "/" + rest.partition("/")[2]
