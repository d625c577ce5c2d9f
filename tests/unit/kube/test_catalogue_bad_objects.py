# SPDX-License-Identifier: Apache-2.0
"""Both sources count invalid objects in the same way (docs/objects.md)."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from pyebpf_proxy.kube.api import inventory
from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.catalogue import Catalogue
from pyebpf_proxy.servers.registry import Gauge
from pyebpf_proxy.servers.source_metrics import SourceMetrics


def a_slice(name: str, *addresses: str, port: int = 80) -> bytes:
    return json.dumps(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4",
            "ports": [{"port": port}],
            "endpoints": [{"addresses": [address]} for address in addresses],
        }
    ).encode()


GOOD, IN_PART, REFUSED = a_slice("a", "10.0.0.1"), a_slice("a", "10.0.0.1", "127.0.0.1", "0.0.0.0"), a_slice("a", "x")


def test_a_folder_counts_objects_by_file() -> None:
    output: list[str] = []
    folder = Catalogue(output.append, output.append)

    def counts() -> dict[str, tuple[int, int]]:
        return {kind: of for kind, of in folder.bad.items() if any(of)}

    folder.read("a.json", GOOD)
    assert folder.bad == dict.fromkeys(("Service", "EndpointSlice", "Node", "ServiceCIDR", "unreadable"), (0, 0))
    folder.read("a.json", IN_PART)
    assert counts() == {"EndpointSlice": (0, 1)}  # an object, however invalid
    assert len(output) == 2
    folder.read("b.json", REFUSED)
    folder.read("b.json", REFUSED)
    assert counts() == {"EndpointSlice": (1, 1)}
    folder.read("c.json", b"{")
    folder.read("d.yaml", b"kind: Service\napiVersion: v1\nmetadata: {name: UPPER}\n---\na: [")
    assert counts() == {"EndpointSlice": (1, 1), "unreadable": (3, 0)}
    folder.read("a.json", GOOD)
    folder.read("c.json", b"")
    folder.remove("d.yaml")
    assert counts() == {"EndpointSlice": (1, 0)}
    folder.read("b.json", GOOD)
    assert counts() == {}


def test_the_api_servers_objects_are_counted_as_they_change() -> None:
    output: list[str] = []
    known = Inventory("EndpointSlice", output.append)

    def read(data: bytes) -> tuple[int, int]:
        known.change(known.read(data))
        return known.refused, known.in_part

    assert read(GOOD) == (0, 0)
    assert read(IN_PART) == (0, 1)
    assert read(REFUSED) == (1, 0)
    assert output[-1].endswith("; its last good state stays")
    assert read(a_slice("b", "127.0.0.1")) == (1, 1)
    known.remove("default", "a")
    assert (known.refused, known.in_part) == (0, 1)
    known.keep_only([])
    assert (known.refused, known.in_part) == (0, 0)


def test_messages_about_an_object_take_no_memory() -> None:
    """A tenant can write many objects of which each causes a hundred messages."""
    known = Inventory("EndpointSlice", lambda text: None)

    def read(number: int) -> None:
        known.change(known.read(a_slice(f"s{number}", *["127.0.0.1"] * 100)))

    read(0)
    tracemalloc.start()
    try:
        for number in range(1, 101):
            read(number)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_errors_in_the_objects_of_one_namespace_give_a_limited_number_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant can change the hundred lines of an object with every update, many times per second."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    output: list[str] = []
    known = Inventory("EndpointSlice", output.append)
    for number in range(100):
        known.read(a_slice("a", f"127.0.0.{number}", *["127.0.0.1"] * 100))
    assert len(output) == inventory.MOST_LINES + 1
    assert output[-1] == "for 10 s no more errors in objects of kind EndpointSlice of namespace default are logged"
    known.read(a_slice("a", "127.0.0.1").replace(b'"name": "a"', b'"name": "a", "namespace": "other"'))
    assert output[-1].startswith("EndpointSlice other/a: ")
    now += inventory.LINES_SECONDS
    known.read(a_slice("b", "127.0.0.1"))
    assert output[-1].startswith("EndpointSlice default/b: ")


def test_what_the_metric_shows() -> None:
    metrics = SourceMetrics()
    metrics.bad("Service", 2, 3)
    metrics.bad("Service", 2, 1)
    (gauge,) = metrics.families
    assert isinstance(gauge, Gauge)
    assert (gauge.get("Service", "refused"), gauge.get("Service", "used_in_part")) == (2, 1)
