# SPDX-License-Identifier: Apache-2.0
"""Follows one resource, like client-go's reflector: list once, then watch; start again after every interruption.

The list is the beginning of the watch (``sendInitialEvents``: one request, one object at a time in memory). Servers
without that feature return it in pages. If the history has expired (410), a new list is read, and only the differences
are delivered. The changes of a list are delivered together when it is complete; those of the first list in parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.kube.api.client import Answer, Client, Pace
from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.api.messages import (
    Bookmark,
    Event,
    Identity,
    Page,
    Status,
    is_earlier,
    read_bookmark,
    read_event,
    read_identity,
    read_page,
    read_status,
)
from pyebpf_proxy.kube.api.resources import Resource
from pyebpf_proxy.kube.api.trouble import GoneError, Log, StoppedError, TooLongError, TroubleError, unexpected
from pyebpf_proxy.kube.decode import ObjectKey
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.source import Change

PAGE = 500
#: A list of more pages than the first number ends with an error if the pages have fewer new objects, on average, than
#: the second. A page may have none, but a server or a proxy could send such pages for ever.
FEW_PAGES, LEAST_OF_PAGE = 100, 10
#: How many events the list at the beginning of a watch may have, in addition to ten for each object.
FEW_EVENTS, MOST_OF_OBJECT = 100_000, 10
#: More objects than a resource has in any cluster.
MOST_OBJECTS = 500_000
#: How many changes of the first list are delivered at once: their plan takes less memory than the objects.
PART = 500
#: Larger than any object that etcd accepts.
MOST_BYTES_OF_EVENT = 64 * 1024 * 1024
#: From how many failures in a row on a failure that is usual is reported.
RECURRING = 3
#: A watch that ends so many seconds before its time, or more, has not ended regularly.
EARLY = 5.0
#: How often a list may follow an expired history without a wait.
MOST_AT_ONCE = 2

_log = Logger("api")

#: Receives changes. The flag is set when all existing objects have been delivered.
Deliver = Callable[[Resource, list[Change], bool], None]


class Follower:
    """Follows one resource. ``run`` needs its own thread; it returns when the client is stopped."""

    def __init__(
        self,
        client: Client,
        resource: Resource,
        deliver: Deliver,
        log: Log,
        unchanged: Callable[[Change], None] = lambda change: None,
    ) -> None:
        """``unchanged`` is called for each valid object of a watch that is as before."""
        self._client = client
        self._resource = resource
        self._deliver = deliver
        self._report_unchanged = unchanged
        self._troubles = log
        self._channel = client.channel()
        self._inventory = Inventory(resource.kind, lambda text: _log.error(text))
        #: The last known resourceVersion; empty: list again.
        self._version = ""
        self._was_listed = False
        #: The watch was interrupted: another server may answer, or this one with an earlier state.
        self._in_doubt = False
        #: An optional resource that the server does not know or permit; this is logged once.
        self._is_refused = False
        self._streams_lists = True
        #: The whole list is too long to be read in one piece; and how many objects are asked for in one.
        self._only_pages = False
        self._limit = PAGE
        self._bookmarks = False
        self._failures = 0
        #: How often the history has expired, each time within ``settle`` after the time before; and the last time.
        self._expired = 0
        self._expired_at = -math.inf
        #: Time of the last outage. A server that starts may forbid everything at first; this is not logged.
        self._lost_at = -math.inf
        self._watching_since: float | None = None

    def look(self, now: float) -> None:
        """Mark the watch as recovered if it has lasted for a while. Called periodically from another thread."""
        since = self._watching_since
        if since is not None and now - since >= self._client.timing.settle:
            self._watching_since = None
            self._failures = self._expired = 0
            self._troubles.well(self._resource.name)

    def run(self) -> None:
        """Follow until stopped."""
        self._set_connected(False)
        try:
            while True:
                try:
                    self._follow_once()
                    self._failures = 0
                except GoneError as gone:
                    _log.debug("history has expired, listing again", resource=self._resource.name, why=str(gone))
                    self._expire()
                except TroubleError as trouble:
                    self._fail(trouble, log=True)
                except StoppedError:
                    raise
                except Exception as error:  # a thread that ends would leave this resource as it is for ever
                    self._version = ""
                    self._fail(unexpected(error), log=True)
        except StoppedError:
            pass
        finally:
            self._channel.close()

    def _follow_once(self) -> None:
        """Like ``_follow``; at its end, report the resource as not connected."""
        try:
            self._follow()
        finally:
            self._watching_since = None
            self._set_connected(False)

    def _set_connected(self, connected: bool) -> None:
        # An optional resource counts from its first list on.
        if connected or self._was_listed or not self._resource.optional:
            self._client.observer.connected(self._resource.name, connected)

    def _expire(self) -> None:
        """List again: at once, unless the server lets the history expire each time, and each list is for nothing."""
        timing, now = self._client.timing, time.monotonic()
        self._version = ""
        self._expired = self._expired + 1 if now - self._expired_at < timing.settle else 1
        self._channel.close()
        self._client.observer.retried(self._resource.name)
        # After a restart of the server this is normal: the first attempt breaks, the second gets 410.
        if self._expired > MOST_AT_ONCE:
            text = "410: the history has expired again, soon after it was listed: check the API server and its etcd"
            self._troubles.failed(self._resource.name, TroubleError(text, code=410))
            self._client.wait(timing.delay(self._expired - MOST_AT_ONCE))
        self._expired_at = time.monotonic()

    def _fail(self, trouble: TroubleError, *, log: bool) -> None:
        self._channel.close()
        self._failures += 1
        self._client.observer.retried(self._resource.name)
        timing = self._client.timing
        delay = max(timing.delay(self._failures), trouble.seconds)
        self._in_doubt |= trouble.lost or trouble.code >= 500
        if trouble.lost:
            self._lost_at = time.monotonic()
            if self._failures == 1 and self._version:
                log = False  # server or load balancer restarts: the next attempt usually succeeds
            else:
                # List again: the next server may use the same resourceVersions for another history.
                self._version = ""
        elif trouble.code in (403, 404):
            if time.monotonic() - self._lost_at < timing.starting:
                log = False
            elif self._resource.optional and not self._was_listed:
                log, delay = False, max(delay, timing.optional)
                if not self._is_refused:
                    self._is_refused = True
                    _log.info("continuing without a resource", resource=self._resource.name, why=str(trouble))
                    self._deliver(self._resource, [], True)
            else:
                delay = max(delay, timing.forbidden)
        elif trouble.usual and self._failures < RECURRING:
            log = False
        elif trouble.code not in (0, 401, 429) and self._failures > 1:
            # As client-go does. It may refuse this resourceVersion for ever, or be another server by now.
            self._version = ""
        if log:
            self._troubles.failed(self._resource.name, trouble)
        self._client.wait(delay)

    # ---- list --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """List and watch, or only watch, until the server ends the watch regularly. Raises TroubleError."""
        if self._version and self._in_doubt:
            self._check_history()
        if not self._version:
            if self._streams_lists:
                try:
                    self._watch(initial=True)
                except TroubleError as trouble:
                    if trouble.code in (0, 401, 403, 404, 410, 429):
                        raise
                    _log.debug("this server lists only in pages", resource=self._resource.name, why=str(trouble))
                    # As in client-go, a server that fails is asked for a stream again.
                    self._streams_lists = trouble.code >= 500
                else:
                    return
            self._list_pages()
        self._watch(initial=False)

    def _check_history(self) -> None:
        """List again if the server's history ends before the last known version: its state is an earlier one.

        The server accepts a watch from a version that it has not reached, and sends no event before that version.
        """
        page = self._page(self._ask({**self._resource.selectors, "limit": "1"}))
        self._in_doubt = False
        now = page.metadata.resource_version
        if is_earlier(now, self._version):
            _log.info(
                "the API server has an earlier state than before, listing again",
                resource=self._resource.name,
                version=now,
                before=self._version,
            )
            self._version = ""

    def _list_pages(self) -> None:
        changes: list[Change] = []
        keys: set[ObjectKey] = set()
        query = {**self._resource.selectors, "limit": str(self._limit)}
        # As in kube-proxy, the first list may come from the server's cache, which returns it as one page.
        first = {} if self._was_listed or self._only_pages else {"resourceVersion": "0"}
        version = token = ""
        pages = 0
        with self._delivering(changes):
            while True:
                pages += 1
                if pages > FEW_PAGES + len(keys) // LEAST_OF_PAGE:
                    raise TroubleError(
                        f"{self._client.access.host} sends page after page of a list that does not end, with fewer than"
                        f" {LEAST_OF_PAGE} new objects each: check proxies between it and this node"
                    )
                try:
                    # The pages of a list count as one request for qps and burst: they are read one after the other.
                    answer = self._ask(query | ({"continue": token} if token else first), limited=not token)
                    page = self._page(answer)
                except GoneError:
                    if not token or "limit" not in query or self._only_pages:
                        raise
                    # The list has expired while it was read: list again, without pages.
                    keys, token, pages = set(), "", 0
                    query = dict(self._resource.selectors)
                    continue
                except TooLongError:
                    if "limit" not in query or (first and not token):
                        # The server has sent the whole list.
                        self._only_pages, first = True, {}
                        keys, token, pages = set(), "", 0
                    elif self._limit < 2 * LEAST_OF_PAGE:
                        raise
                    else:
                        self._limit //= 2
                    query["limit"] = str(self._limit)
                    continue
                for data in page.items or ():
                    self._take(data, changes, keys)
                    self._deliver_part(changes)
                version, token = page.metadata.resource_version, page.metadata.continue_
                if not token:
                    break
            self._listed(changes, keys, version)

    @contextmanager
    def _delivering(self, changes: list[Change]) -> Iterator[None]:
        """Deliver pending changes even if reading fails: the inventory already counts them as delivered."""
        try:
            yield
        finally:
            if changes:
                self._deliver(self._resource, changes[:], False)
                changes.clear()

    def _page(self, answer: Answer) -> Page:
        body = answer.read()
        try:
            page = read_page(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._garbage(error) from None
        if not page.metadata.resource_version:
            raise self._garbage(ValueError("a list without resourceVersion"))
        return page

    def _take(self, data: msgspec.Raw, changes: list[Change], keys: set[ObjectKey]) -> None:
        """Process one object of a list."""
        try:
            read = self._inventory.read(data)
        except UnreadableError as error:
            raise self._garbage(error) from None
        if read.key is not None:
            keys.add(read.key)
            self._check_number(len(keys))
        changes += self._inventory.change(read)

    def _check_number(self, listed: int) -> None:
        """Raise a TroubleError for too many objects. Those of the former list stay until a new one is complete."""
        inventory = self._inventory
        if listed > MOST_OBJECTS or len(inventory) + inventory.refused > 2 * MOST_OBJECTS:
            raise TroubleError(
                f"{self._client.access.host} sends more than {MOST_OBJECTS} objects: the rest is ignored"
            )

    def _take_back(self, event: Event, changes: list[Change], keys: set[ObjectKey]) -> None:
        """An object of the list was deleted before the list was complete."""
        identity = self._identity(event)
        gone = (identity.namespace, identity.name)
        changes += self._inventory.remove(*gone)
        keys.discard(ObjectKey(self._resource.kind, *gone))

    def _deliver_part(self, changes: list[Change]) -> None:
        """Deliver a part of the first list; nothing is programmed before its end. Later lists give one difference."""
        if len(changes) >= PART and not self._was_listed:
            self._deliver(self._resource, changes[:], False)
            changes.clear()

    def _listed(self, changes: list[Change], keys: set[ObjectKey], version: str) -> None:
        changes += self._inventory.keep_only(keys)
        self._version = version
        self._was_listed = True
        self._in_doubt = False
        observer, name = self._client.observer, self._resource.name
        observer.listed(name)
        self._count_bad()
        _log.debug("listed", resource=name, objects=len(keys), changes=len(changes), version=version)
        self._deliver(self._resource, changes[:], True)
        changes.clear()
        self._set_connected(True)
        if self._expired <= MOST_AT_ONCE:
            self._troubles.well(name)  # otherwise, if the watch lasts
        self._watching_since = time.monotonic()

    # ---- watch -------------------------------------------------------------------------------------------------

    def _watch(self, *, initial: bool) -> None:
        timing = self._client.timing
        seconds = timing.watch_seconds()
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if initial:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            query["resourceVersion"] = self._version
        answer = self._ask(query)
        begin = time.monotonic()
        if not initial:
            self._set_connected(True)
            self._watching_since = begin
        changes: list[Change] = []
        keys: set[ObjectKey] | None = set() if initial else None
        total = 0
        with self._delivering(changes):
            for lines in self._lines(answer, begin + seconds + timing.grace, listing=initial):
                for line in lines:
                    event = self._event(line)
                    if keys is None or event.type == "ERROR":
                        self._apply(event, changes)
                    elif self._is_end_of_list(event):
                        self._listed(changes, keys, self._version)
                        keys = None
                    elif event.type in ("ADDED", "MODIFIED"):
                        self._take(event.object, changes, keys)
                        self._deliver_part(changes)
                    elif event.type == "DELETED":
                        self._take_back(event, changes, keys)
                total += len(lines)
                if keys is not None and total > FEW_EVENTS + MOST_OF_OBJECT * len(keys):
                    raise TroubleError(
                        f"{self._client.access.host} sends event after event of a list that does not end, without new"
                        " objects: check proxies between it and this node"
                    )
                if keys is None:
                    if changes:
                        # Deliver events together if they have arrived together.
                        self._deliver(self._resource, changes[:], False)
                        changes.clear()
                    self._failures = 0
                    self._client.observer.received(self._resource.name, time.time())
        host = self._client.access.host
        # A server that shuts down ends its watches early, and the next one may be another server.
        self._in_doubt |= time.monotonic() - begin < seconds - min(EARLY, seconds / 2)
        if keys is not None:
            raise TroubleError(f"{host} closed the connection before the list was complete", shared=True)
        if total == 0 and time.monotonic() - begin < min(1.0, seconds / 2):
            what = f"{host} closes every watch immediately: check proxies between it and this node"
            raise TroubleError(what, shared=True, usual=True)

    def _lines(self, answer: Answer, end: float, *, listing: bool) -> Iterator[list[bytes]]:
        """The complete lines of a stream, in the groups in which they arrive. Sets the timeout for the next data."""
        timing = self._client.timing
        channel = self._channel
        pace: Pace | None = Pace(channel, timing) if listing else None
        if pace is None:
            self._expect_events(end)
        rest = bytearray()  # of a line that is not complete
        for piece in answer.pieces():
            rest += piece
            if b"\n" in piece:
                end_of_lines = rest.rindex(b"\n")
                lines = bytes(memoryview(rest)[:end_of_lines]).split(b"\n")
                del rest[: end_of_lines + 1]
                yield [line for line in lines if line.strip()]
                listing = listing and not self._version_known
            if len(rest) > MOST_BYTES_OF_EVENT:
                raise self._garbage(ValueError(f"an event of more than {MOST_BYTES_OF_EVENT} bytes"))
            if rest or listing:
                # The rest of a list or of an event must arrive at a minimum rate.
                pace = pace or Pace(channel, timing)
                pace.came(len(piece))
            else:
                pace = None
                self._expect_events(end)
        if rest.strip():
            raise self._garbage(ValueError("the stream ends within an event"))

    @property
    def _version_known(self) -> bool:
        return bool(self._version)

    def _expect_events(self, end: float) -> None:
        seconds = end - time.monotonic()
        if self._bookmarks:
            seconds = min(seconds, self._client.timing.bookmarks)
        self._channel.expect(max(seconds, 1.0), "no data for too long: the server or the path to it is down")

    def _event(self, line: bytes) -> Event:
        try:
            return read_event(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._garbage(error) from None

    def _is_end_of_list(self, event: Event) -> bool:
        if event.type != "BOOKMARK":
            return False
        meta = self._bookmark(event).metadata
        if not meta.ends_list:
            return False
        self._version = meta.resource_version
        return True

    def _bookmark(self, event: Event) -> Bookmark:
        try:
            return read_bookmark(event.object)
        except msgspec.DecodeError as error:
            raise self._garbage(error) from None

    def _apply(self, event: Event, changes: list[Change]) -> None:
        """Process one event after the list."""
        if event.type == "BOOKMARK":
            self._bookmarks = True
            self._version = self._bookmark(event).metadata.resource_version or self._version
            return
        if event.type == "ERROR":
            raise self._error(event)
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            raise self._garbage(ValueError(f"an event of type {event.type[:20]}"))
        identity = self._identity(event)
        if event.type == "DELETED":
            changes += self._inventory.remove(identity.namespace, identity.name)
        else:
            try:
                read = self._inventory.read(event.object)
            except UnreadableError as error:
                raise self._garbage(error) from None
            different = self._inventory.change(read)
            changes += different
            if not different and read.key is not None and read.object is not None:
                self._report_unchanged(Change(*read.key, read.object))
        self._count_bad()
        self._version = identity.resource_version or self._version
        self._check_number(len(self._inventory))

    def _identity(self, event: Event) -> Identity:
        try:
            return read_identity(event.object).metadata
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._garbage(error) from None

    def _count_bad(self) -> None:
        self._client.observer.bad(self._resource.kind, self._inventory.refused, self._inventory.in_part)

    def _error(self, event: Event) -> TroubleError:
        try:
            status = read_status(event.object)
        except msgspec.DecodeError:
            status = Status(0, "an error that cannot be read")
        if status.code == 410:
            return GoneError(status.message[:300], code=410)
        return TroubleError(f"the watch ended: {status.code} {status.message[:300]}", shared=True, code=status.code)

    # ---- both --------------------------------------------------------------------------------------------------

    def _ask(self, query: dict[str, str], *, limited: bool = True) -> Answer:
        resource = self._resource
        query = {**resource.selectors, **query} if "watch" in query else query
        return self._channel.request("GET", resource.path, query, permission=resource.permission, limited=limited)

    def _garbage(self, error: Exception) -> TroubleError:
        text = " ".join(str(error).split())[:200]
        return TroubleError(
            f"the answer for {self._resource.name} cannot be parsed ({text}); the rest is ignored", shared=False
        )
