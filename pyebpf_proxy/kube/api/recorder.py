# SPDX-License-Identifier: Apache-2.0
"""Writes Events of events.k8s.io/v1 like kube-proxy's recorder: repetitions become a series of the first Event."""

from __future__ import annotations

import queue
import random
import re
import socket
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.kube.api.client import Channel, Client
from pyebpf_proxy.kube.api.trouble import StoppedError, TroubleError, unexpected
from pyebpf_proxy.kube.events import EventType, ObjectReference

#: The reporting controller, as in kube-proxy, so that tools that search for its events find these.
CONTROLLER = "kube-proxy"
#: How many events may wait to be sent, and how many of them may be about objects of one namespace; further ones are
#: dropped.
MOST_WAITING = 100
MOST_OF_NAMESPACE = MOST_WAITING // 4
#: An event later than this many seconds starts a new series. A series is updated at most once in this time.
SERIES_SECONDS = 360.0
TRIES = 12
RETRY_SECONDS = 10.0

_PERMISSION = 'create and patch on events (apiGroup "events.k8s.io")'
_NOTE_BYTES = 1024
_log = Logger("events")


class _Event(NamedTuple):
    about: ObjectReference
    event_type: EventType
    reason: str
    action: str
    note: str
    at: datetime

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies repetitions: they have the same key. The series keeps the note of the first event."""
        return (*self.about, self.event_type, self.reason, self.action)


class _Series:
    def __init__(self, path: str, last: datetime) -> None:
        self.path = path
        self.count = 1
        self.last = last
        self.written = 0.0


class EventRecorder:
    """A ``kube.events.Recorder`` with its own thread and connection; ``start`` creates them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._queue: queue.Queue[_Event | None] = queue.Queue(MOST_WAITING)
        #: By namespace, how many events wait.
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {}
        self._instance = f"{CONTROLLER}-{socket.gethostname()}"
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._failing = False

    def event(self, about: ObjectReference, event_type: EventType, reason: str, action: str, note: str) -> None:
        """Record one event; safe in any thread, never waits."""
        with self._lock:
            if self._waiting[about.namespace] < MOST_OF_NAMESPACE or not about.namespace:
                try:
                    self._queue.put_nowait(_Event(about, event_type, reason, action, note, datetime.now(UTC)))
                    self._waiting[about.namespace] += 1
                    return
                except queue.Full:
                    pass
        self._lost("too many wait", reason)

    def start(self) -> None:
        """Start to send events, including those already recorded."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The client must have been stopped before."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread does not wait for the queue, and will see that the client is stopped

    def _run(self) -> None:
        channel = self._client.channel()
        try:
            while (event := self._queue.get()) is not None:
                with self._lock:
                    self._waiting -= Counter([event.about.namespace])  # removes those that have none left
                try:
                    self._record(channel, event)
                except StoppedError:
                    raise
                except Exception as error:  # without the thread, no Event would be recorded any more
                    self._lost(str(unexpected(error)), event.reason)
        except StoppedError:
            pass
        finally:
            channel.close()

    def _record(self, channel: Channel, event: _Event) -> None:
        now = time.monotonic()
        for key in [key for key, series in self._series.items() if now - series.written >= 2 * SERIES_SECONDS]:
            del self._series[key]
        series = self._series.get(event.key)
        if series is not None and (event.at - series.last).total_seconds() < SERIES_SECONDS:
            series.count += 1
            series.last = event.at
            # Write the first repetition at once, later ones at intervals.
            if series.count > 2 and now - series.written < SERIES_SECONDS:
                return
            change = {"series": {"count": series.count, "lastObservedTime": _micro_time(event.at)}}
            if self._send(channel, "PATCH", series.path, change, event.reason):
                series.written = now
                return
        namespace = event.about.namespace or "default"
        collection = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        name = f"{event.about.name}.{time.time_ns():x}"
        if self._send(channel, "POST", collection, self._body(event, namespace, name), event.reason):
            series = self._series[event.key] = _Series(f"{collection}/{name}", event.at)
            series.written = now

    def _body(self, event: _Event, namespace: str, name: str) -> dict[str, Any]:
        regarding = {"apiVersion": "v1", "kind": event.about.kind, "name": event.about.name}
        if event.about.namespace:
            regarding["namespace"] = event.about.namespace
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": _micro_time(event.at),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": event.action,
            "reason": event.reason,
            "regarding": regarding,
            "note": _cut(event.note),
            "type": event.event_type,
        }

    def _send(self, channel: Channel, method: str, path: str, body: dict[str, Any], reason: str) -> bool:
        """Create or update an event. True if it exists then. An unreachable server is retried for two minutes."""
        for attempt in range(1, TRIES + 1):
            try:
                channel.request(method, path, body=msgspec.json.encode(body), permission=_PERMISSION).read()
            except TroubleError as trouble:
                if method == "PATCH" and trouble.code == 404:
                    return False  # it has expired: the caller creates a new one
                if method == "POST" and trouble.code == 409 and attempt > 1:
                    return True  # the previous attempt created it, but its answer was lost
                again = trouble.code in (0, 401) or trouble.code >= 500
                # The server may limit the Events of one namespace: those of others do not wait for them.
                again |= trouble.code == 429 and self._queue.empty()
                if not again or attempt == TRIES:
                    self._lost(str(trouble), reason)
                    return method == "PATCH"
                self._client.wait(max(trouble.seconds, RETRY_SECONDS * random.uniform(1.0, 1.25)))
            else:
                self._failing = False
                return True
        return False

    def _lost(self, why: str, reason: str) -> None:
        if not self._failing:
            self._failing = True
            _log.error("an Event could not be recorded; later failures are not logged", reason=reason, error=why)


def _micro_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(note: str) -> str:
    """The note on one line; the API server accepts at most 1024 bytes."""
    text = re.sub(r"\s+", " ", note).encode()
    return note if len(note.encode()) <= _NOTE_BYTES else text[: _NOTE_BYTES - 3].decode(errors="ignore") + "…"
