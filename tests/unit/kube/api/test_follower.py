# SPDX-License-Identifier: Apache-2.0
"""List and watch: the details of the protocol, against a server that the test controls."""

from __future__ import annotations

import gzip
import itertools
import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api import follower
from pyebpf_proxy.kube.api.access import Access
from pyebpf_proxy.kube.api.client import MOST_BYTES, Client
from pyebpf_proxy.kube.api.follower import FEW_PAGES, LEAST_OF_PAGE, PAGE, PART, RECURRING, Follower
from pyebpf_proxy.kube.api.observer import Silent
from pyebpf_proxy.kube.api.source import MOST_WAITING
from pyebpf_proxy.kube.api.trouble import TroubleError
from pyebpf_proxy.servers.client_metrics import ClientMetrics
from pyebpf_proxy.servers.registry import Gauge
from tests.support.cpu_time import cpu_limit
from tests.support.logs import Message
from tests.support.scripted_api import (
    QUICK,
    Exchange,
    Following,
    Handler,
    ScriptedApi,
    following,
    node,
    service,
    wait_until,
)


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi() as api:
        api.has("nodes", node())
        yield api


END_OF_LIST = {"k8s.io/initial-events-end": "true"}


def refuse_streams(exchange: Exchange) -> None:
    """As a server does that does not support sendInitialEvents."""
    exchange.status(422, "sendInitialEvents: Forbidden")


def test_the_watch_begins_with_the_list(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a"), service("b", "10.96.0.2")], "7")
        exchange.event("DELETED", service("a", version="8"))
        exchange.event("MODIFIED", service("b", "10.96.0.3", version="9"))
        exchange.hold()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"b"})
        assert source.objects["Service", "b"].spec.cluster_ip == "10.96.0.3"
        assert source.names("Node") == {"node1"}
    (asked,) = api.asked("services")
    assert asked.path == "/api/v1/services"
    assert 300 <= int(asked.query.pop("timeoutSeconds")) <= 600
    assert asked.query == {
        "watch": "1",
        "allowWatchBookmarks": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "fieldSelector": "spec.clusterIP!=None",
        "labelSelector": "!service.kubernetes.io/service-proxy-name",
    }
    (asked,) = api.asked("endpointslices")
    assert asked.path == "/apis/discovery.k8s.io/v1/endpointslices"
    assert asked.query["labelSelector"] == "!service.kubernetes.io/headless"
    assert "fieldSelector" not in asked.query
    (asked,) = api.asked("nodes")
    assert asked.query["fieldSelector"] == "metadata.name=node1"
    assert asked.headers["Accept"] == "application/json"


def test_the_first_list_is_delivered_in_parts(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.begin()
        for number in range(1200):
            exchange.event("ADDED", service(f"s{number}", f"10.96.{number // 250}.{number % 250 + 1}"))
        exchange.hold()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: len(source.names("Service")) == 1000)
        assert not source.complete


def test_objects_that_are_not_taken_yet_wait(api: ScriptedApi) -> None:
    source = Following(Access(api.url))
    source.begin()
    wait_until(lambda: len(api.asked("services")) == len(api.asked("endpointslices")) == len(api.asked("nodes")) == 1)
    assert not source.batches
    with source:
        source.until(lambda: source.complete and source.names("Node") == {"node1"})
    # The same requests, not new ones.
    assert len(api.asked("services")) == 1


def test_the_first_list_is_read_only_as_fast_as_it_is_taken(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        services = [service(f"s{number}", f"10.96.{number // 250}.{number % 250 + 1}") for number in range(6000)]
        exchange.initial(services, "7")
        exchange.hold()

    api.script("services", first)
    source = Following(Access(api.url))
    source.busy = 0.1
    with source:
        source.until(lambda: len(source.names("Service")) == 6000)
    # Changes that had arrived when more came, and those.
    assert max(len(batch.changes) for batch in source.batches) < MOST_WAITING + 2 * PART


def test_an_older_server_is_listed_in_pages_and_then_watched(api: ScriptedApi) -> None:
    api.script(
        "services",
        refuse_streams,
        lambda exchange: exchange.listed([service("a")], "5", "next"),
        lambda exchange: exchange.listed([service("b", "10.96.0.2")], "5"),
    )
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"a", "b"})
        source.until(lambda: len(api.asked("services")) == 4)
        assert source.errors() == []
    _, first, second, watch = (exchange.query for exchange in api.asked("services"))
    assert (first["limit"], first["resourceVersion"], first.get("continue")) == ("500", "0", None)
    assert (second["limit"], second.get("resourceVersion"), second["continue"]) == ("500", None, "next")
    assert (watch["watch"], watch["resourceVersion"]) == ("1", "5")
    assert first["labelSelector"] == second["labelSelector"] == watch["labelSelector"]


@pytest.mark.parametrize("code", [500, 503, 504])
def test_a_server_that_only_fails_for_a_moment_sends_its_lists_as_watches_later(api: ScriptedApi, code: int) -> None:
    def fail(exchange: Exchange) -> None:
        exchange.status(code, "for a moment")

    api.script("services", fail, fail, lambda exchange: exchange.initial([service("a")], "5"))
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"a"})
    assert ["sendInitialEvents" in exchange.query for exchange in api.asked("services")[:3]] == [True, False, True]


def test_an_expired_page_causes_a_list_without_pages(api: ScriptedApi) -> None:
    api.script(
        "services",
        refuse_streams,
        lambda exchange: exchange.listed([service("a")], "5", "next"),
        lambda exchange: exchange.status(410, "The provided continue parameter is too old"),
        lambda exchange: exchange.listed([service("b", "10.96.0.2")], "9"),
    )
    with following(api) as source:
        # "a" existed before: it was delivered, and is withdrawn.
        source.until(lambda: source.complete and source.names("Service") == {"b"})
    assert "limit" not in api.asked("services")[3].query


def too_long(exchange: Exchange) -> None:
    """An answer of which only the length is read."""
    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MOST_BYTES + 1))


def test_a_list_that_is_too_long_for_one_piece_is_read_in_pages(api: ScriptedApi) -> None:
    """The slices of 32 768 dual-stack Services have 160 MiB, and the server's cache returns them in one piece."""
    api.script(
        "services",
        refuse_streams,
        too_long,
        lambda exchange: exchange.listed([service("a")], "5", "next"),
        too_long,
        lambda exchange: exchange.listed([service("b", "10.96.0.2")], "5", "more"),
        # It expires, and is not read without pages then.
        lambda exchange: exchange.status(410, "The provided continue parameter is too old"),
        lambda exchange: exchange.listed([service("c", "10.96.0.3")], "9"),
    )
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"c"})
        assert source.errors() == []
    asked = [exchange.query for exchange in api.asked("services")][1:7]
    assert [query.get("resourceVersion") for query in asked] == ["0", None, None, None, None, None]
    assert [query.get("continue") for query in asked] == [None, None, "next", "next", "more", None]
    half = str(PAGE // 2)
    assert [query["limit"] for query in asked] == [str(PAGE), str(PAGE), str(PAGE), half, half, half]


def test_pages_that_are_too_long_with_few_objects_are_an_error(api: ScriptedApi) -> None:
    api.script("services", refuse_streams, *[too_long] * 8, lambda exchange: exchange.listed([service("a")], "5"))
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"a"})
        assert source.logged("an answer of more than 128 MiB is not read")
    limits = [int(exchange.query["limit"]) for exchange in api.asked("services")[2:10]]
    assert limits == [500, 250, 125, 62, 31, 15, 15, 15]


def test_a_list_that_expires_and_is_too_long_for_one_piece_is_read_in_pages(api: ScriptedApi) -> None:
    api.script(
        "services",
        refuse_streams,
        lambda exchange: exchange.listed([service("a")], "5", "next"),
        lambda exchange: exchange.status(410, "The provided continue parameter is too old"),
        too_long,
        lambda exchange: exchange.listed([service("b", "10.96.0.2")], "9"),
    )
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"b"})
        assert source.errors() == []
    _, _, _, whole, paged, *_ = api.asked("services")
    assert ("limit" in whole.query, "limit" in paged.query) == (False, True)


@pytest.mark.parametrize("how", ["status", "event"])
def test_expired_history_causes_a_new_list_and_delivers_the_difference(api: ScriptedApi, how: str) -> None:
    def expire(exchange: Exchange) -> None:
        if how == "status":
            exchange.status(410, "too old resource version")
        else:
            exchange.begin()
            exchange.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            exchange.end()

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a"), service("b", "10.96.0.2"), service("c", "10.96.0.3")], "5")
        exchange.end()

    def again(exchange: Exchange) -> None:
        exchange.initial([service("b", "10.96.0.2", version="99"), service("c", "10.96.0.33")], "100")
        exchange.hold()

    api.script("services", first, expire, again)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b", "c"} and len(source.batches) >= 2)
        assert [(change.name, change.object is None) for change in source.changes if change.kind == "Service"] == [
            ("a", False),
            ("b", False),
            ("c", False),
            ("c", False),
            ("a", True),
        ]
        assert source.errors() == []
    assert [exchange.query.get("resourceVersion") for exchange in api.asked("services")] == [None, "5", None]


def test_a_watch_that_ends_properly_is_resumed(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([], "5")
        exchange.event("ADDED", service("a", version="6"))
        exchange.event("BOOKMARK", {"kind": "Service", "metadata": {"resourceVersion": "42"}})
        exchange.end()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: len(api.asked("services")) == 2)
        assert source.errors() == []
    assert api.asked("services")[1].query["resourceVersion"] == "42"


@pytest.mark.parametrize("times", [RECURRING - 1, RECURRING])
def test_a_watch_that_is_closed_at_once_is_reported_if_this_recurs(api: ScriptedApi, times: int) -> None:
    """An API server under load closes the watches of clients that it cannot serve."""

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        exchange.cut()

    def close(exchange: Exchange) -> None:
        exchange.begin()
        exchange.end()

    def go_on(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("ADDED", service("b", "10.96.0.2", version="6"))
        exchange.hold()

    # The first failure in a row is the watch that breaks.
    api.script("services", first, *[close] * (times - 1), go_on)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"a", "b"})
        errors = source.errors()
    assert len(errors) == (times == RECURRING), errors
    assert all("closes every watch immediately" in line for line in errors)


def test_a_broken_watch_is_resumed_without_a_message(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        exchange.cut()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: len(api.asked("services")) == 2)
        assert api.asked("services")[1].query["resourceVersion"] == "5"
        assert source.errors() == []


@pytest.mark.parametrize("how", ["cut", "end", "503"])
def test_a_server_with_an_earlier_state_is_listed_again(api: ScriptedApi, how: str) -> None:
    """etcd was restored from a snapshot: b did not exist yet, a had another address. The server accepts a watch from
    a version that it has not reached, and sends nothing.
    """

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a", "10.96.0.9"), service("b", "10.96.0.2")], "5000")
        exchange.event("BOOKMARK", {"metadata": {"resourceVersion": "10000"}})
        if how == "503":
            wait_until(lambda: time.monotonic() > exchange.begun + float(exchange.query["timeoutSeconds"]))
        exchange.cut() if how == "cut" else exchange.end()

    def again(exchange: Exchange) -> None:
        exchange.initial([service("a", "10.96.0.1")], "900")
        exchange.hold()

    api.version = "900"
    busy = [lambda exchange: exchange.status(503, "overloaded")] if how == "503" else []
    api.script("services", first, *busy, again)
    with following(api, replace(QUICK, watch=(1, 1)) if how == "503" else QUICK) as source:
        source.until(lambda: source.names("Service") == {"a"})
        assert source.objects["Service", "a"].spec.cluster_ip == "10.96.0.1"
        assert source.logged("the API server has an earlier state than before, listing again")
        assert all("503" in line for line in source.errors())
    assert "sendInitialEvents" in api.asked("services")[-1].query
    # The same selection, because the permission and the objects are those of the list.
    (check,) = (each for each in api.checks if each.resource == "services")
    assert check.query["fieldSelector"] == api.asked("services")[0].query["fieldSelector"]


def test_a_server_whose_history_goes_on_is_not_listed_again(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "9")
        exchange.cut()

    def go_on(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("ADDED", service("b", "10.96.0.2", version="10"))
        wait_until(lambda: time.monotonic() > exchange.begun + float(exchange.query["timeoutSeconds"]))
        exchange.end()

    api.version = "10"
    api.script("services", first, go_on)
    with following(api, replace(QUICK, watch=(1, 1))) as source:
        source.until(lambda: len(api.asked("services")) == 3)
        assert source.names("Service") == {"a", "b"}
        assert [request.query.get("resourceVersion") for request in api.asked("services")] == [None, "9", "10"]
        # A watch that ends regularly leaves no doubt.
        assert len([check for check in api.checks if check.resource == "services"]) == 1


def test_a_restarted_server_without_history_causes_no_message(api: ScriptedApi) -> None:
    """The watch breaks, the next one is refused (410), and the list succeeds: no message, and no wait."""

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        exchange.cut()

    def again(exchange: Exchange) -> None:
        exchange.initial([service("b", "10.96.0.2")], "50")
        exchange.hold()

    api.script("services", first, lambda exchange: exchange.status(410, "too old resource version"), again)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b"})
        assert source.errors() == []


def test_a_history_that_expires_again_and_again_is_listed_with_pauses_and_one_line(api: ScriptedApi) -> None:
    """Each list succeeds, and each watch ends with 410 after an event: nothing else would slow this down."""
    moments = []

    def expire(exchange: Exchange) -> None:
        moments.append(time.monotonic())
        exchange.initial([service("a")], "5")
        exchange.event("BOOKMARK", {"metadata": {"resourceVersion": "6"}})
        message = f"too old resource version: 6 ({len(moments)})"
        exchange.event("ERROR", {"kind": "Status", "code": 410, "message": message})
        exchange.end()

    api.script("services", *[expire] * 8)
    api.has("services", service("a"))
    with following(api, replace(QUICK, backoff=(0.2, 0.4), settle=1.0)) as source:
        source.until(lambda: len(moments) == 8 and len(api.asked("services")) == 9)
        # Two at once, then pauses of at least 0.2 s, and twice that later.
        assert moments[-1] - moments[2] > 1.5
        assert all("410: the history has expired again" in line for line in source.errors())
        source.until(lambda: source.logged(Message.RESOURCE_BACK))
        assert_reported_in_turns(source)
        assert source.names("Service") == {"a"}


def test_an_event_in_tiny_chunks_takes_little_memory(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MOST_BYTES_OF_EVENT", 512 << 10)

    def drip(exchange: Exchange) -> None:
        exchange.begin()
        for _ in range(40):
            exchange.raw(b"2\r\nxx\r\n" * 10_000)

    api.script("services", drip)
    tracemalloc.start()
    try:
        with following(api) as source:
            source.until(lambda: source.errors())
            assert "an event of more than 524288 bytes" in source.errors()[0]
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("how", ["status", "event"])
def test_a_server_that_does_not_continue_the_watch_is_listed_again(api: ScriptedApi, how: str) -> None:
    """A server whose etcd was restored answers so until its versions have caught up."""

    def refuse(exchange: Exchange) -> None:
        message = "Too large resource version: 500, current: 12"
        if how == "status":
            exchange.status(504, message)
        else:
            exchange.begin()
            exchange.event("ERROR", {"kind": "Status", "code": 504, "message": message})
            exchange.end()

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "500")
        exchange.cut()

    def restored(exchange: Exchange) -> None:
        if "resourceVersion" in exchange.query:
            refuse(exchange)
            return
        exchange.initial([service("b", "10.96.0.2")], "12")
        exchange.hold()

    api.script("services", first, *[restored] * 10)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b"})
    assert [exchange.query.get("resourceVersion") for exchange in api.asked("services")] == [None, "500", None]


@pytest.mark.parametrize("text", ["nan", "-5", "-inf", "soon"])
def test_a_strange_retry_after_is_no_time(api: ScriptedApi, text: str) -> None:
    api.script("services", lambda exchange: exchange.status(503, "not now", {"Retry-After": text}))
    with pytest.raises(TroubleError, match="answers 503: not now") as caught:
        Client(Access(api.url), Limiter(-1, 0), Silent(), QUICK).channel().request("GET", "/api/v1/services")
    assert caught.value.seconds == 0


GARBAGE = {
    "no JSON": b"\x00\xff\x00garbage\n",
    "half an event": b'{"type": "ADDED", "object": {"metadata": {"na\n',
    "no event": b'["a", "list"]\n',
    "an object that is a text": b'{"type": "ADDED", "object": "text"}\n',
    "deep": b'{"type": "ADDED", "object": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "unknown type": b'{"type": "EXPLODED", "object": {}}\n',
}


def assert_reported_in_turns(source: Following) -> None:
    """Each error begins a new trouble. On a machine that stalls, a watch that fails later lasts for ``settle``, so it
    counts as recovered, and its end is another trouble.
    """
    errors = {*source.errors()}
    told = [line in errors for line in source.logged() if line in errors or Message.RESOURCE_BACK in line]
    assert told == [number % 2 == 0 for number in range(len(told))], source.lines


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_logged_once_and_loses_no_object(api: ScriptedApi, what: str) -> None:
    def broken(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("ADDED", service("b", "10.96.0.2", version="6"))
        exchange.chunk(GARBAGE[what])
        exchange.hold()

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        exchange.end()

    def right(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("ADDED", service("c", "10.96.0.3", version="8"))
        exchange.hold()

    api.script("services", first, broken, broken, broken, right)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"a", "b", "c"})
        source.until(lambda: source.logged(Message.RESOURCE_BACK))
        errors = source.errors()
        assert errors
        assert all("services" in line for line in errors)
        assert_reported_in_turns(source)
        assert sum(change.name == "b" for change in source.changes) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_a_list_that_is_cut_short_deletes_nothing(api: ScriptedApi, streams: bool) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a"), service("b", "10.96.0.2")], "5")
        exchange.event("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
        exchange.end()

    def short(exchange: Exchange) -> None:
        if streams:
            exchange.begin()
            exchange.event("ADDED", service("a"))
            exchange.end()
        else:
            exchange.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"metadata": {}, "items": [')

    api.script("services", first, *([] if streams else [refuse_streams]), short)
    api.has("services", service("a"), service("b", "10.96.0.2"), service("c", "10.96.0.3"))
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"a", "b", "c"})
        assert not any(change.object is None for change in source.changes)


def test_nothing_is_complete_before_all_three_are_listed(api: ScriptedApi) -> None:
    for resource in ("services", "endpointslices", "nodes"):
        with ScriptedApi() as other:
            other.has("nodes", node())
            other.script(resource, lambda exchange: exchange.hold())
            with following(other, replace(QUICK, answer=60)) as source:
                kinds = {"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node"}
                source.until(lambda other=other: len(other.requests) == 4)  # type: ignore[misc]
                source.until(lambda r=resource: r == "nodes" or source.names("Node"))  # type: ignore[misc]
                assert not source.complete, kinds[resource]
                other.held.set()
                source.until(lambda: source.complete)


def test_the_source_waits_for_addresses_of_the_node(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([node(address=None)], "5")
        api.held.wait(20)
        exchange.event("MODIFIED", node())
        exchange.cut()

    api.script("nodes", first)
    with following(api, replace(QUICK, node=60)) as source:
        source.until(lambda: source.names("Node"))
        assert not source.complete
        api.held.set()
        source.until(lambda: source.complete)
        assert source.objects["Node", "node1"].status.addresses[0].address == "192.0.2.1"


@pytest.mark.parametrize(("there", "what"), [(True, "be assigned IPs"), (False, "exist")])
def test_the_wait_for_the_node_is_limited(api: ScriptedApi, there: bool, what: str) -> None:
    api.has("nodes", *([node(address=None)] if there else []))
    with following(api) as source:
        source.until(lambda: source.complete)
        assert source.logged(f"timed out waiting for the Node to {what}")


def test_an_address_of_the_node_that_is_no_ip_is_left_out(api: ScriptedApi) -> None:
    """The API server accepts it. Without its Node, the agent would have neither addresses nor a zone, and not be
    healthy."""
    odd = node()
    odd["status"]["addresses"].insert(0, {"type": "InternalIP", "address": "node1.example.com"})
    api.has("nodes", odd)
    metrics = ClientMetrics()
    with following(api, observer=metrics) as source:
        source.until(lambda: source.complete)
        assert source.names("Node") == {"node1"}
        (line,) = source.errors()
        assert 'Node node1: status.addresses[0].address: "node1.example.com" is not an IP address: left out' in line
        assert bad_objects(metrics)["Node"] == (0, 1)


def test_a_node_whose_only_address_is_no_ip_is_waited_for(api: ScriptedApi) -> None:
    api.has("nodes", node(address="node1.example.com"))
    with following(api) as source:
        source.until(lambda: source.complete)
        assert source.logged("timed out waiting for the Node to be assigned IPs")
        assert source.names("Node") == {"node1"}


def test_lists_may_be_compressed(api: ScriptedApi) -> None:
    def compressed(exchange: Exchange) -> None:
        assert exchange.headers["Accept-Encoding"] == "gzip"
        items = [service(f"s{i}", f"10.96.1.{i}") for i in range(200)]
        body = gzip.compress(json.dumps({"metadata": {"resourceVersion": "3"}, "items": items}).encode())
        exchange.answer(200, body, {"Content-Encoding": "gzip"})

    api.script("services", refuse_streams, compressed)
    with following(api) as source:
        source.until(lambda: len(source.names("Service")) == 200)


def test_a_huge_object_is_read(api: ScriptedApi) -> None:
    huge = service("huge")
    huge["metadata"]["annotations"] = {"much": "x" * 10_000_000}

    def first(exchange: Exchange) -> None:
        exchange.initial([huge], "5")
        exchange.event("ADDED", service("small", "10.96.0.2", version="6"))
        exchange.hold()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"huge", "small"})


def deep(depth: int) -> bytes:
    return b'{"f:a": ' * depth + b"{}" + b"}" * depth


def managed(fields: bytes) -> bytes:
    """A Service as a tenant may create it: the API server keeps ``managedFields`` as the client sends them."""
    item = service("deep", "10.96.0.2", version="6")
    item["metadata"]["managedFields"] = [{"manager": "tenant", "fieldsV1": "FIELDS"}]
    return json.dumps(item).encode().replace(b'"FIELDS"', fields)


# Around the recursion limit, some parsers of one event fail and some do not.
@pytest.mark.parametrize(
    "fields",
    [
        *(deep(depth) for depth in (*range(930, 1000, 7), 9_000)),
        rb'{"f:\ud800": {}}',
        rb'{"f:\udc00\\": %s}' % deep(9_000),
    ],
    ids=lambda fields: f"{fields[:12]}-{len(fields)}",
)
@pytest.mark.parametrize("how", ["list", "pages", "watch"])
def test_an_object_with_unusual_managed_fields_is_used_and_holds_up_no_other(
    api: ScriptedApi, how: str, fields: bytes
) -> None:
    item = managed(fields)

    def watch(exchange: Exchange) -> None:
        exchange.begin()
        if how == "watch":
            exchange.event("BOOKMARK", {"metadata": {"resourceVersion": "5", "annotations": END_OF_LIST}})
        exchange.chunk(b'{"type": "ADDED", "object": ' + item + b"}\n")
        exchange.event("ADDED", service("z", "10.96.0.3", version="7"))
        if how == "watch":
            exchange.chunk(b'{"type": "DELETED", "object": ' + item + b"}\n")
        else:
            exchange.event("BOOKMARK", {"metadata": {"resourceVersion": "7", "annotations": END_OF_LIST}})
        exchange.hold()

    def page(exchange: Exchange) -> None:
        after = json.dumps(service("z", "10.96.0.3")).encode()
        exchange.answer(200, b'{"metadata": {"resourceVersion": "7"}, "items": [%s, %s]}' % (item, after))

    api.script("services", *([refuse_streams, page] if how == "pages" else [watch]))
    with following(api) as source:
        source.until(lambda: source.names("Service") == ({"z"} if how == "watch" else {"deep", "z"}))
        assert [change.name for change in source.changes if change.kind == "Service"][:2] == ["deep", "z"]
        assert source.errors() == []


BAD = {
    "port": (service("bad", ports=[{"port": -1}]), "spec.ports[0].port: -1 is not a port"),
    "protocol": (service("bad", ports=[{"port": 1, "protocol": "X"}]), 'spec.ports[0].protocol: "X" is not TCP'),
    "address": (service("bad", "10.96.0.999"), 'spec.clusterIP: "10.96.0.999" is not an IP address'),
    "type": (service("bad", ports={"port": 1}), "spec.ports: a mapping: expected array"),
    "null": (service("bad") | {"spec": None}, "spec"),
}


def bad_objects(metrics: ClientMetrics) -> dict[str, tuple[float, float]]:
    """Rejected objects, and objects that are used in part, by kind."""
    gauge = next(of for of in metrics.families if isinstance(of, Gauge) and of.name == "pyebpf_proxy_bad_objects")
    kinds = ("Service", "EndpointSlice", "Node")
    return {kind: (gauge.get(kind, "refused"), gauge.get(kind, "used_in_part")) for kind in kinds}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("streams", [True, False])
def test_a_bad_object_is_named_once_and_affects_no_other(api: ScriptedApi, what: str, streams: bool) -> None:
    bad, message = BAD[what]
    others = [service("a"), service("z", "10.96.0.2")]
    if not streams:
        api.script("services", refuse_streams)
    api.has("services", others[0], bad, others[1])
    metrics = ClientMetrics()
    with following(api, observer=metrics) as source:
        source.until(lambda: source.complete)
        assert source.names("Service") == {"a", "z"}
        (line,) = source.errors()
        assert f"Service default/bad: {message}" in line
        assert bad_objects(metrics) == {"Service": (1, 0), "EndpointSlice": (0, 0), "Node": (0, 0)}


def test_an_object_that_becomes_invalid_keeps_its_last_valid_state(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        for version in ("6", "7"):
            exchange.event("MODIFIED", service("a", "nonsense", version=version))
        exchange.event("MODIFIED", service("a", "10.96.0.9", version="8"))
        exchange.hold()

    api.script("services", first)
    metrics = ClientMetrics()
    with following(api, observer=metrics) as source:
        source.until(lambda: source.names("Service") and source.objects["Service", "a"].spec.cluster_ip == "10.96.0.9")
        source.until(lambda: bad_objects(metrics).get("Service") == (0, 0))
        assert [change.object is None for change in source.changes if change.kind == "Service"] == [False, False]
        (line,) = source.errors()
        assert "its last good state stays" in line


@pytest.mark.parametrize("how", ["bad value", "bad type", "too large"])
def test_the_last_valid_state_of_a_deleted_object_does_not_stay_for_another_of_its_name(
    api: ScriptedApi, how: str
) -> None:
    """Service "a" is deleted and created again while nothing is watched; the new one is invalid."""

    def with_uid(item: dict[str, Any], uid: str) -> dict[str, Any]:
        return {**item, "metadata": {**item["metadata"], "uid": uid}}

    another = with_uid(service("a", "nonsense" if how == "bad value" else "10.96.0.1", version="99"), "u-2")
    if how == "bad type":
        another["spec"]["ports"][0]["port"] = "80"
    elif how == "too large":
        another["spec"]["externalIPs"] = ["1"] * 200_001
    same = with_uid(service("b", "nonsense", version="98"), "u-3")

    def first(exchange: Exchange) -> None:
        exchange.initial([with_uid(service("a"), "u-1"), with_uid(service("b", "10.96.0.2"), "u-3")], "5")
        exchange.end()

    def again(exchange: Exchange) -> None:
        exchange.initial([another, same], "100")
        exchange.hold()

    api.script("services", first, lambda exchange: exchange.status(410, "too old resource version"), again)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b"} and len(source.errors()) == 2)
        assert ["its last good state stays" in line for line in source.errors()] == [False, True]
        assert source.objects["Service", "b"].spec.cluster_ip == "10.96.0.2"


def test_irrelevant_changes_are_not_delivered(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        noted = service("a", version="6")
        noted["metadata"]["annotations"] = {"some": "note"}
        exchange.event("MODIFIED", noted)
        exchange.event("ADDED", service("b", "10.96.0.2", version="7"))
        exchange.hold()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"a", "b"})
        assert sum(change.name == "a" for change in source.changes) == 1
        unchanged = [change for batch in source.batches for change in batch.unchanged]
        assert [(change.kind, change.name) for change in unchanged] == [("Service", "a")]


def test_another_trigger_time_of_a_slice_is_delivered(api: ScriptedApi) -> None:
    """kube-proxy measures it even if nothing that a proxy reads has changed."""

    def a_slice(version: str, **annotations: str) -> dict[str, Any]:
        metadata = {"name": "a-1", "namespace": "default", "resourceVersion": version, "annotations": annotations}
        return {"metadata": metadata, "addressType": "IPv4", "endpoints": [], "ports": []}

    trigger = "endpoints.kubernetes.io/last-change-trigger-time"

    def first(exchange: Exchange) -> None:
        exchange.initial([a_slice("4", **{trigger: "2026-11-21T05:38:20Z"})], "5")
        exchange.event("MODIFIED", a_slice("6", **{trigger: "2026-11-21T05:38:20Z", "other": "note"}))
        exchange.event("MODIFIED", a_slice("7", **{trigger: "2026-11-21T05:38:30Z", "other": "note"}))
        exchange.hold()

    api.script("endpointslices", first)
    with following(api) as source:
        source.until(lambda: [change.name for change in source.changes].count("a-1") == 2)
        unchanged = [change for batch in source.batches for change in batch.unchanged]
        assert [(change.kind, change.name) for change in unchanged] == [("EndpointSlice", "a-1")]


def test_an_object_that_is_deleted_before_the_list_is_complete_is_gone(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("ADDED", service("a"))
        exchange.event("ADDED", service("b", "10.96.0.2"))
        exchange.event("DELETED", service("a", version="8"))
        end = {"resourceVersion": "9", "annotations": {"k8s.io/initial-events-end": "true"}}
        exchange.event("BOOKMARK", {"kind": "Service", "apiVersion": "v1", "metadata": end})
        exchange.hold()

    api.script("services", first)
    with following(api) as source:
        source.until(lambda: source.complete)
        assert source.names("Service") == {"b"}


def test_an_unexpected_error_does_not_end_the_thread(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Follower._listed
    failures = [ValueError("unknown value")]

    def fail(self: Follower, *of: Any) -> None:
        if self._resource.name == "services" and failures:
            raise failures.pop()
        listed(self, *of)

    monkeypatch.setattr(Follower, "_listed", fail)
    api.has("services", service("a"))
    with following(api) as source:
        source.until(lambda: source.complete and source.names("Service") == {"a"})
        assert any("unexpected ValueError" in error for error in source.errors())


def test_a_source_that_waits_for_lists_and_the_node_does_not_spin(api: ScriptedApi) -> None:
    """The wait for the Node's addresses has timed out, but a list has not arrived yet."""
    api.has("nodes")
    api.script("services", lambda exchange: exchange.hold())
    with following(api, replace(QUICK, answer=60, node=0.1)) as source:
        source.until(lambda: len(api.requests) == 4)
        time.sleep(0.5)
        with cpu_limit(0.2, time.process_time):
            time.sleep(1)
        assert not source.complete
        api.held.set()
        source.until(lambda: source.complete)
        assert source.logged("timed out waiting for the Node to exist")


@pytest.mark.parametrize("code", [403, 404])
@pytest.mark.parametrize("waits", [False, True])
def test_the_agent_works_without_service_cidrs(api: ScriptedApi, code: int, waits: bool) -> None:
    """An older server does not know them, and an older role does not permit them: no failure, and no alert."""
    api.script("servicecidrs", *(lambda exchange: exchange.status(code, "no such resource") for _ in range(9)))
    metrics = ClientMetrics()
    with Following(Access(api.url), observer=metrics, waits_for_cidrs=waits) as source:
        source.until(lambda: source.complete)
        source.until(lambda: source.logged("continuing without a resource", "servicecidrs", str(code)))
        assert source.errors() == []
        assert source.troubles() == {}
        connected = next(each for each in metrics.families if "api_connected" in str(each.collect().name))
        assert {sample.labels["resource"] for sample in connected.collect().samples} == {
            "services",
            "endpointslices",
            "nodes",
        }
        assert len(api.asked("servicecidrs")) == 1


def test_service_cidrs_count_for_a_complete_source_only_if_it_waits_for_them(api: ScriptedApi) -> None:
    for waits in (False, True):
        with ScriptedApi() as other:
            other.has("nodes", node())
            other.script("servicecidrs", lambda exchange: exchange.hold())
            with Following(Access(other.url), replace(QUICK, answer=60), waits_for_cidrs=waits) as source:
                source.until(lambda other=other: len(other.requests) == 4)  # type: ignore[misc]
                if waits:
                    source.until(lambda s=source: s.names("Node"))  # type: ignore[misc]
                    assert not source.complete
                    other.held.set()
                source.until(lambda: source.complete)


def test_service_cidrs_that_were_known_and_are_refused_later_are_a_failure(api: ScriptedApi) -> None:
    def first(exchange: Exchange) -> None:
        exchange.initial([], "5")
        exchange.cut()

    api.script("servicecidrs", first, *(lambda exchange: exchange.status(403, "no longer") for _ in range(99)))
    with Following(Access(api.url), replace(QUICK, starting=0.0)) as source:
        source.until(lambda: "servicecidrs" in source.troubles())
        assert source.logged("a resource cannot be watched", "servicecidrs", "no longer")


def only_pages(api: ScriptedApi, again: list[Handler]) -> None:
    """Objects a and b are listed, the history expires, and ``again`` answers the next lists."""
    api.script(
        "services",
        refuse_streams,
        lambda exchange: exchange.listed([service("a"), service("b", "10.96.0.2")], "5"),
        lambda exchange: exchange.status(410, "too old resource version"),
        *again,
        lambda exchange: exchange.listed([service("b", "10.96.0.2"), service("c", "10.96.0.3")], "9"),
    )


@pytest.mark.parametrize("objects", [0, 1], ids=["empty pages", "the same object"])
def test_a_list_whose_pages_do_not_end_is_given_up_with_one_line(api: ScriptedApi, objects: int) -> None:
    """Without a limit, the resource would never be followed again."""
    pages = 2 * FEW_PAGES

    def page(number: int) -> Handler:
        items = [service("a")] * objects
        return lambda exchange: exchange.listed(items, "7", f"token{number}")

    only_pages(api, [page(number) for number in range(pages)])
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b", "c"})
        (line,) = source.errors()
        assert "sends page after page of a list that does not end, with fewer than 10 new objects each: check" in line
        source.until(lambda: source.logged(Message.RESOURCE_BACK))
        # What was there has stayed until the list that succeeded.
        assert [(change.name, change.object is None) for change in source.changes if change.kind == "Service"] == [
            ("a", False),
            ("b", False),
            ("c", False),
            ("a", True),
        ]
    lists = [exchange.query.get("continue") for exchange in api.asked("services") if "watch" not in exchange.query]
    assert lists.count(None) == 1 + 1 + 2  # the first list, two attempts that are given up, and the last one
    assert len(lists) == 1 + pages + 1


def test_a_list_that_expires_again_and_again_within_its_pages_waits(api: ScriptedApi) -> None:
    """After the first time it is asked for in one piece. An answer in pages that expires again is expired history."""
    again: list[Handler] = []
    for number in range(5):
        again += [
            lambda exchange, number=number: exchange.listed([service("a")], "7", f"token{number}"),  # type: ignore[misc]
            lambda exchange: exchange.status(410, "The provided continue parameter is too old"),
        ] * 2
    only_pages(api, again)
    begin = time.monotonic()
    with following(api, replace(QUICK, backoff=(0.2, 0.4), settle=10.0)) as source:
        source.until(lambda: source.names("Service") == {"b", "c"})
        assert time.monotonic() - begin > 1.0
        (line,) = source.errors()
        assert "410: the history has expired again" in line


def test_a_list_with_many_pages_is_read(api: ScriptedApi) -> None:
    count = 3 * FEW_PAGES
    names = [f"s{number}" for number in range(count * LEAST_OF_PAGE)]
    again: list[Handler] = []
    for page in range(count):
        items = [service(name) for name in names[page * LEAST_OF_PAGE :][:LEAST_OF_PAGE]]
        token = f"token{page}" if page < count - 1 else ""
        again.append(lambda exchange, items=items, token=token: exchange.listed(items, "7", token))  # type: ignore[misc]

    def watch(exchange: Exchange) -> None:
        exchange.begin()
        exchange.hold()

    only_pages(api, [*again, watch])
    with following(api) as source:
        source.until(lambda: source.names("Service") == {*names})
        assert source.errors() == []


@pytest.mark.parametrize("how", ["pages", "stream", "watch"])
def test_objects_without_end_are_not_kept(api: ScriptedApi, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MOST_OBJECTS", 100)
    numbers = itertools.count()

    def some() -> list[dict[str, Any]]:
        return [service(f"s{next(numbers)}") for _ in range(50)]

    def pages(exchange: Exchange) -> None:
        exchange.listed(some(), "7", "more")

    def events(exchange: Exchange) -> None:
        exchange.begin()
        while True:  # until the agent closes the connection
            for item in some():
                exchange.event("ADDED", item)

    def first(exchange: Exchange) -> None:
        exchange.initial([service("a")], "5")
        exchange.end()

    scripts = {"pages": [refuse_streams, *[pages] * 200], "stream": [events] * 200, "watch": [first, *[events] * 200]}
    api.script("services", *scripts[how])
    # A watch that lasts for ``settle`` counts as recovered, so the next one that fails is reported again.
    with following(api, replace(QUICK, settle=60.0)) as source:
        source.until(lambda: source.errors())
        time.sleep(0.5)
        (line,) = source.errors()
        assert "sends more than 100 objects: the rest is ignored" in line
        assert len(source.names("Service")) < 250


def test_a_list_of_events_for_one_object_is_given_up(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FEW_EVENTS", 1000)

    def endless(exchange: Exchange) -> None:
        exchange.begin()
        for number in range(100_000):
            exchange.event("MODIFIED", service("a", version=str(number)))

    api.script("services", endless)
    api.has("services", service("b"))
    with following(api) as source:
        source.until(lambda: source.names("Service") == {"b"})
        (line,) = source.errors()
        assert "sends event after event of a list that does not end, without new objects: check proxies" in line
