# SPDX-License-Identifier: Apache-2.0
"""Events: their content, series, and the effect of an API server that rejects them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import pytest

from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api import recorder
from pyebpf_proxy.kube.api.access import Access
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.observer import Silent
from pyebpf_proxy.kube.api.recorder import EventRecorder
from pyebpf_proxy.kube.events import ObjectReference
from tests.support.logs import Log
from tests.support.scripted_api import QUICK, Exchange, ScriptedApi, wait_until

NODE = ObjectReference("Node", "", "node1")


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi() as api:
        yield api


@pytest.fixture
def events(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventRecorder]:
    monkeypatch.setattr(recorder, "RETRY_SECONDS", 0.02)
    client = Client(Access(api.url), Limiter(-1, 0), Silent(), QUICK)
    events = EventRecorder(client)
    events.start()
    yield events
    client.stop()
    events.stop()
    events._thread.join(60)
    assert not events._thread.is_alive()


def starting(events: EventRecorder) -> None:
    events.event(NODE, "Normal", "Starting", "StartKubeProxy", "")


def posted(api: ScriptedApi) -> list[Exchange]:
    return [request for request in list(api.requests) if request.method == "POST"]


def test_an_unexpected_error_loses_one_event_only(
    api: ScriptedApi, events: EventRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = EventRecorder._send

    def fails_once(*arguments: object) -> bool:
        monkeypatch.setattr(EventRecorder, "_send", send)
        raise RuntimeError("surprise")

    monkeypatch.setattr(EventRecorder, "_send", fails_once)
    starting(events)
    wait_until(lambda: Log(caplog).lines("surprise"))
    starting(events)
    wait_until(lambda: posted(api))
    Log(caplog).only("unexpected RuntimeError at fails_once")


def test_an_event_on_a_node_is_in_the_default_namespace(api: ScriptedApi, events: EventRecorder) -> None:
    starting(events)
    wait_until(lambda: posted(api))
    (request,) = posted(api)
    assert request.path == "/apis/events.k8s.io/v1/namespaces/default/events"
    body = json.loads(request.body)
    assert re.fullmatch(r"node1\.[0-9a-f]{16}", body["metadata"].pop("name"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", body.pop("eventTime"))
    assert body.pop("reportingInstance").startswith("kube-proxy-")
    assert body == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "default"},
        "reportingController": "kube-proxy",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": "node1"},
        "note": "",
        "type": "Normal",
    }


def test_an_event_on_a_service_is_in_its_namespace(api: ScriptedApi, events: EventRecorder) -> None:
    about = ObjectReference("Service", "shop", "web")
    events.event(about, "Warning", "FailedToStartServiceHealthcheck", "Listen", "é" * 2000)
    wait_until(lambda: posted(api))
    (request,) = posted(api)
    assert request.path == "/apis/events.k8s.io/v1/namespaces/shop/events"
    body = json.loads(request.body)
    assert body["regarding"] == {"apiVersion": "v1", "kind": "Service", "name": "web", "namespace": "shop"}
    assert 1000 < len(body["note"].encode()) <= 1024


def test_a_repeated_event_is_a_series(api: ScriptedApi, events: EventRecorder) -> None:
    for _ in range(5):
        starting(events)
    events.event(NODE, "Normal", "Other", "StartKubeProxy", "")
    wait_until(lambda: len(api.requests) == 3)
    first, again, _ = api.requests
    assert (first.method, again.method) == ("POST", "PATCH")
    assert again.path == f"{first.path}/{json.loads(first.body)['metadata']['name']}"
    assert json.loads(again.body)["series"]["count"] == 2
    assert again.headers["Content-Type"] == "application/merge-patch+json"


def test_a_series_whose_event_has_expired_starts_again(api: ScriptedApi, events: EventRecorder) -> None:
    starting(events)
    wait_until(lambda: posted(api))
    api.script(json.loads(posted(api)[0].body)["metadata"]["name"], lambda exchange: exchange.status(404, "not found"))
    starting(events)
    wait_until(lambda: len(posted(api)) == 2)


def test_a_failed_request_is_repeated(api: ScriptedApi, events: EventRecorder) -> None:
    api.script("events", *[lambda exchange: exchange.status(503, "not now")] * 3)
    starting(events)
    wait_until(lambda: len(posted(api)) == 4)


def test_rejected_events_are_logged_once_and_are_no_failure(
    api: ScriptedApi, events: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    refused = [lambda exchange: exchange.status(403, 'events.events.k8s.io is forbidden: User "x" cannot create')] * 3
    api.script("events", *refused)
    for reason in ("A", "B", "C", "D"):
        events.event(NODE, "Normal", reason, "StartKubeProxy", "")
    wait_until(lambda: len(posted(api)) == 4)
    line = Log(caplog).only()
    assert " reason=A " in f"{line.text} "
    assert 'grant create and patch on events (apiGroup "events.k8s.io") by RBAC' in line.text


def test_recording_never_waits(api: ScriptedApi, events: EventRecorder) -> None:
    api.script("events", lambda exchange: exchange.hold())
    for number in range(recorder.MOST_WAITING * 3):
        events.event(NODE, "Normal", f"Reason{number}", "StartKubeProxy", "")
    api.held.set()
    wait_until(lambda: len(posted(api)) > recorder.MOST_WAITING)


def test_events_of_one_namespace_keep_out_no_other(api: ScriptedApi, events: EventRecorder) -> None:
    """A tenant can cause them faster than the server takes them."""
    api.script("events", lambda exchange: exchange.hold())
    for number in range(recorder.MOST_WAITING * 3):
        about = ObjectReference("Service", "tenant", f"s{number}")
        events.event(about, "Warning", "OverLimit", "Serve", "")
    events.event(ObjectReference("Service", "shop", "web"), "Warning", "OverLimit", "Serve", "")
    api.held.set()
    wait_until(lambda: [request.path for request in posted(api) if "/shop/" in request.path])
    # The server cut the first connection, so its event is sent twice. Another one was taken while it was on its way.
    names = {json.loads(request.body)["metadata"]["name"] for request in posted(api)}
    assert len(names) <= recorder.MOST_OF_NAMESPACE + 2
    assert not events._waiting


def test_events_of_a_namespace_that_the_server_limits_hold_up_no_other(
    api: ScriptedApi, events: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the admission plugin EventRateLimit does. A tenant's Events were tried again for two minutes, each."""
    monkeypatch.setattr(recorder, "RETRY_SECONDS", 600.0)
    waiting = threading.Event()

    def limit(exchange: Exchange) -> None:
        waiting.wait(20)
        exchange.status(429, "limit reached on type Namespace")

    api.script("events", limit)
    events.event(ObjectReference("Service", "tenant", "a"), "Warning", "OverLimit", "Serve", "")
    events.event(ObjectReference("Service", "shop", "web"), "Warning", "OverLimit", "Serve", "")
    waiting.set()
    wait_until(lambda: [request.path for request in posted(api) if "/shop/" in request.path], 20)


def test_an_event_whose_answer_was_lost_is_not_created_twice(
    api: ScriptedApi, events: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """The second attempt finds the Event there, and counts as successful."""
    api.script("events", lambda exchange: exchange.cut(), lambda exchange: exchange.status(409, "already exists"))
    starting(events)
    wait_until(lambda: len(posted(api)) == 2)
    starting(events)
    wait_until(lambda: [request.method for request in list(api.requests)] == ["POST", "POST", "PATCH"])
    Log(caplog).none()


def test_a_status_with_a_body_that_is_nested_too_deeply_ends_no_thread(api: ScriptedApi, events: EventRecorder) -> None:
    deep = b'{"message": "not now", "details": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    api.script("events", lambda exchange: exchange.answer(503, deep))
    starting(events)
    wait_until(lambda: len(posted(api)) == 2, seconds=20)
