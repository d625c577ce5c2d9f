# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of all ports: one thread with its own event loop, isolated from the rest of the agent.

The cost of a client is limited: connections, buffered bytes, header lines, requests handled at a time, and the share of
CPU time that this thread takes from the syncing thread. Handlers are plain functions and run in the server's thread.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Literal, cast

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.addresses import join_host_port
from pyebpf_proxy.servers.connection import REFUSAL_SECONDS, Connection
from pyebpf_proxy.servers.http import Handler, Pool, Source, Sources

Network = Literal["tcp", "tcp4", "tcp6"]

BIND_RETRY_SECONDS = 5.0
#: Interval of the check for connections that take too long.
SWEEP_SECONDS = 1.0
BACKLOG = 1024
#: How many new connections are accepted before existing ones are served.
ACCEPTS = 32
#: If a source must wait longer than this (seconds), new connections are refused, however few it has: it may close each
#: at once. If it must wait less, a new connection waits too: a refused client would retry at once.
MOST_REST = 3.0
#: The same for an address of an IPv6 /64 network: what it owes delays the others of the network.
MOST_REST_IN_NETWORK = 0.1
#: The share of a CPU for refusing connections, and the longest wait because of it (seconds).
REFUSALS = 0.15
REFUSAL_WAIT = 0.005

_log = Logger("servers")


class BindError(Exception):
    """An address cannot be bound; the message is Go's: ``listen tcp 1.2.3.4:5: bind: address already in use``."""


def listening_socket(host: str, port: int, network: Network = "tcp") -> socket.socket:
    """A listening socket as in Go: with ``tcp``, both 0.0.0.0 and :: mean all addresses of both families."""
    address = ip_address(host)
    both = network == "tcp" and address.is_unspecified and socket.has_ipv6
    family = socket.AF_INET6 if both or address.version == 6 else socket.AF_INET
    step = "socket"
    try:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            if not both:
                raise
            # The kernel has no IPv6.
            both, family = False, socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            step = "bind"
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
            listener.bind(("::" if both else host, port))
            step = "listen"
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise BindError(f"listen {network} {join_host_port(host, port)}: {step}: {why}") from None
    return listener


class Open:
    """A listening address with its connections. Only for the server's thread."""

    def __init__(self, listener: socket.socket, handler: Handler, pool: Pool, sources: Sources) -> None:
        self._sources = sources
        self._refused_until = 0.0
        self._listener = listener
        self._handler = handler
        self._pool = pool
        self._connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening and abort all connections."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    def _accept(self) -> None:
        local = self._listener.family == socket.AF_UNIX
        if not local and (pause := self._sources.pause(self._loop.time())) > 0:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(pause, self._again)
            return
        for _ in range(ACCEPTS):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptor or memory is available: leave connections in the queue, and retry in a second.
                _log.warning("a connection could not be accepted", error=error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(1, self._again)
                return
            try:
                source = self._source(accepted, peer)
            except OSError:
                accepted.close()  # no memory, for example
                continue
            now = self._loop.time()
            if not local and self._is_refused(source, now):
                accepted.close()
                self._refused_until = max(self._refused_until, now) + REFUSAL_SECONDS / REFUSALS
                continue
            accepted.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(
                self._loop.connect_accepted_socket(functools.partial(self._connection, source), accepted)
            )
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        if self._refused_until > self._loop.time() + REFUSAL_WAIT:
            self._refused_until = 0.0
            self._loop.remove_reader(self._listener)
            self._loop.call_later(REFUSAL_WAIT, self._again)

    def _is_refused(self, source: Source, now: float) -> bool:
        """Whether a source uses so much that a new connection of it is refused."""
        rest = source.rest(now)
        if rest > MOST_REST or (source.network is not None and source.own_rest(now) > MOST_REST_IN_NETWORK):
            return True
        full = not source.own and source.whole.connections >= self._pool.most_of(source)
        # Another one of the source would be closed for it, perhaps just before it is answered.
        return full and (rest > 0 or bool(source.waiting))

    def _source(self, accepted: socket.socket, peer: Any) -> Source:
        # Not by getpeername(): a connection that the peer has already reset has no peer any more, but it costs, too.
        if accepted.family == socket.AF_UNIX:
            return self._sources.of(None, None)
        return self._sources.of(peer[0], accepted.getsockname()[0])

    def _connection(self, source: Source) -> asyncio.Protocol:
        if self._listener.fileno() < 0:
            return _TooLate()
        return Connection(self._handler, self._pool, self._connections, self._sources, source)

    def _again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)


class _TooLate(asyncio.Protocol):
    """Closes a connection that was accepted just before its listener was closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Server:
    """The thread and its loop. Other threads use ``call``; the called function may use ``open`` and ``serve``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._pools: list[Pool] = []
        self._sources = Sources()
        self._opened: list[Open] = []
        self._retries: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Close every socket and end the thread."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=2)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a function on the server's thread. Safe in any thread, even after the server has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def pool(self, limit: int) -> Pool:
        """A new pool of connections; the server enforces its timeouts."""
        pool = Pool(limit)
        self._pools.append(pool)
        return pool

    def open(self, host: str, port: int, handler: Handler, pool: Pool, network: Network = "tcp") -> Open:
        """Listen now; raises BindError. Only in the server's thread."""
        opened = Open(listening_socket(host, port, network), handler, pool, self._sources)
        self._opened.append(opened)
        return opened

    def open_socket(self, listener: socket.socket, handler: Handler, pool: Pool) -> None:
        """Serve a listening socket. Only in the server's thread."""
        self._opened.append(Open(listener, handler, pool, self._sources))

    def close(self, opened: Open) -> None:
        """Close what ``open`` returned."""
        self._opened.remove(opened)
        opened.close()

    def serve(
        self,
        address: tuple[str, int],
        handler: Handler,
        pool: Pool,
        failed: Callable[[str], bool],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen as soon as possible. Safe in any thread.

        After a failure, ``failed`` is called with the reason in the server's thread, and returns whether to retry in
        5 s.
        """

        async def retry() -> None:
            while True:
                try:
                    self.open(*address, handler, pool)
                    ready()
                    return
                except BindError as error:
                    if not failed(str(error)):
                        return
                await asyncio.sleep(BIND_RETRY_SECONDS)

        def begin() -> None:
            task = self._loop.create_task(retry())
            self._retries.add(task)
            task.add_done_callback(self._retries.discard)

        self.call(begin)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_log_exception)
        sweep = self._loop.create_task(self._sweep())
        try:
            self._loop.run_forever()
        finally:
            for opened in self._opened:
                opened.close()
            for task in (sweep, *self._retries):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._loop.time()
            self._sources.forget(now)
            for pool in self._pools:
                for connection in pool:
                    connection.look(now)


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a socket as one line, not as a traceback."""
    error = context.get("exception")
    if isinstance(error, OSError):
        _log.warning("a server's socket failed", error=error.strerror or str(error))
    else:
        _log.error("internal error in the servers", what=context.get("message"), error=repr(error) if error else None)
