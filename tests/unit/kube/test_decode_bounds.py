# SPDX-License-Identifier: Apache-2.0
"""Objects with a million entries are bounded before Python objects are created, and others are served (issue 15)."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from pyebpf_proxy.kube import decode, limits
from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.catalogue import MOST_LINES, Catalogue
from pyebpf_proxy.kube.decode import Decoded, decode_json, decode_object, decode_yaml
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.objects import EndpointSlice, Service
from pyebpf_proxy.kube.source import Change, Kind
from pyebpf_proxy.kube.validation import MOST_ENTRIES
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests.support.cpu_time import cpu_limit
from tests.support.fast_lab import slowness

MILLION = 1_000_000
SERVICE = b"""{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "big", "namespace": "tenant"},
 "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": 80}], "loadBalancerSourceRanges": [%s]},
 "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}}"""
SLICE = b"""{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
 "metadata": {"name": "big", "namespace": "tenant", "labels": {"kubernetes.io/service-name": "big"}},
 "ports": [{"name": "", "port": 80}], "endpoints": [%s]}"""
GOOD = b"""{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "good", "namespace": "default"},
 "spec": {"clusterIP": "10.96.0.2", "ports": [{"port": 80}]}}"""
RANGE, ENDPOINT = b'"10.1.2.3/32"', b'{"addresses": ["10.244.1.2"]}'
MIB = 1 << 20


def many(shape: bytes, entry: bytes, count: int) -> bytes:
    """An object with so many entries."""
    return shape % (entry + (b"," + entry) * (count - 1))


MILLIONS: list[tuple[Kind, bytes]] = [
    ("Service", many(SERVICE, RANGE, MILLION)),
    ("EndpointSlice", many(SLICE, ENDPOINT, MILLION)),
]


def cost(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of CPU time on an idle machine, and the maximum of bytes in Python objects."""
    slow = slowness()
    begun = time.thread_time()
    call()
    took = time.thread_time() - begun
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return took / max(slow, slowness()), tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def is_refused(decoded: Decoded, kind: Kind) -> bool:
    text = f"{kind} tenant/big: one object has more than 200000 values"
    return (str(decoded.key), decoded.object, decoded.messages) == (f"{kind} tenant/big", None, (text,))


@pytest.mark.parametrize(("kind", "data"), MILLIONS, ids=["source ranges", "endpoints"])
def test_a_million_entries_create_no_objects(kind: Kind, data: bytes) -> None:
    """As from the API server, as a file, and in a list whose other objects are used."""
    assert is_refused(decode_object(kind, data), kind)
    seconds, size = cost(lambda: decode_object(kind, data))
    assert (seconds < 0.5, size < MIB) == (True, True), (seconds, size)

    (decoded,) = decode_json(data)
    assert is_refused(decoded, kind)
    seconds, size = cost(lambda: list(decode_json(data)))
    assert (seconds < 0.5, size < MIB) == (True, True), (seconds, size)

    listed = b'{"apiVersion": "v1", "kind": "List", "items": [%s, %s, %s]}' % (GOOD, data, GOOD)
    first, decoded, last = decode_json(listed)
    assert is_refused(decoded, kind)
    assert first == last
    assert isinstance(first.object, Service)
    seconds, size = cost(lambda: list(decode_json(listed)))
    assert (seconds < 0.5, size < MIB) == (True, True), (seconds, size)


@pytest.mark.parametrize(("kind", "data"), MILLIONS, ids=["source ranges", "endpoints"])
def test_the_last_valid_state_stays_unless_others_may_have_its_addresses(kind: Kind, data: bytes) -> None:
    lines: list[str] = []
    inventory = Inventory(kind, lines.append)
    small = many(SERVICE if kind == "Service" else SLICE, RANGE if kind == "Service" else ENDPOINT, 2)
    assert len(inventory.change(inventory.read(small))) == 1
    for removed in ([Change(kind, "tenant", "big", None)] if kind == "Service" else []), []:
        assert inventory.change(inventory.read(data)) == removed
        assert inventory.refused == 1
        assert len(lines) == 1
    what = "it is not served" if kind == "Service" else "its last good state stays"
    assert lines[0].endswith(f"one object has more than 200000 values; {what}")
    assert len(inventory.change(inventory.read(small))) == (kind == "Service"), "it is served again"

    catalogue = Catalogue(lines.append, lines.append)
    catalogue.read("a.json", small)
    assert len(catalogue.changes()) == 1
    catalogue.read("a.json", data)
    assert catalogue.changes() == []


@pytest.mark.parametrize(
    ("kind", "shape", "entry"),
    [("Service", SERVICE, RANGE), ("Service", SERVICE, b'"?"'), ("EndpointSlice", SLICE, ENDPOINT)],
    ids=["source ranges", "bad source ranges", "endpoints"],
)
def test_the_largest_accepted_object_is_bounded(kind: Kind, shape: bytes, entry: bytes) -> None:
    data = many(shape, entry, limits.MOST_VALUES - 20)
    assert limits.MOST_VALUES - 20 < data.count(b",") <= limits.MOST_VALUES
    decoded = decode_object(kind, data)
    assert decoded.object is not None
    assert len(decoded.messages) <= decode.MOST_MESSAGES + 1
    seconds, size = cost(lambda: decode_object(kind, data))
    assert seconds < 3, seconds
    assert size < 96 * MIB, size


def test_a_large_object_with_few_values_is_read() -> None:
    """An annotation is not decoded; it may have any size."""
    data = GOOD.replace(b'"name": "good"', b'"name": "good", "annotations": {"a": "%s"}' % (b"x," * 100_000))
    decoded = decode_object("Service", data)
    assert decoded.object is not None
    assert not decoded.messages


def test_commas_of_annotations_are_no_values() -> None:
    """The API server accepts 256 KiB of them."""
    commas = 262_000
    data = GOOD.replace(b'"name": "good"', b'"name": "good", "annotations": {"a": "%s"}' % (b"," * commas))
    decoded = decode_object("Service", data)
    assert decoded.object is not None
    assert not decoded.messages
    values = b'"spec": {"externalIPs": [%s], ' % b",".join([b'"1::"'] * (limits.MOST_VALUES + 1))
    assert decode_object("Service", data.replace(b'"spec": {', values)).object is None
    endless = data.replace(b"," * commas, b"," * MILLION)
    assert decode_object("Service", endless).object is None, "no API server accepts it"


def test_a_service_that_grows_too_large_keeps_no_address_of_another() -> None:
    """A tenant's Service frees its NodePort, or ClusterIP, and has 200 000 values from then on."""

    def service(namespace: str, node_port: int, created: int, external_ips: int = 0) -> bytes:
        port = {"port": 80, "nodePort": node_port}
        spec = {"clusterIP": f"10.96.0.{created}", "ports": [port], "externalIPs": ["1::"] * external_ips}
        metadata = {"name": "a", "namespace": namespace, "creationTimestamp": f"2026-01-0{created}T00:00:00Z"}
        return json.dumps({"metadata": metadata, "spec": {"type": "NodePort", **spec}}).encode()

    inventory, planner = Inventory("Service", lambda text: None), Planner(PlanSettings("node1"))
    for data in (
        service("tenant", 30080, 1),
        service("tenant", 30081, 1, external_ips=limits.MOST_VALUES),
        service("victim", 30080, 2),
    ):
        planner.update(inventory.change(inventory.read(data)))
    assert not planner.conflicts
    assert [name.namespace for name in planner.names] == ["victim"]


def test_a_number_of_more_than_64_bits_is_refused_in_every_service() -> None:
    """Also in a Service that is not served and so not checked: it could be decoded, but not encoded again."""
    lines: list[str] = []
    inventory = Inventory("Service", lines.append)
    data = b'{"metadata": {"name": "a"}, "spec": {"type": "ExternalName", "ports": [{"port": 99999999999999999999}]}}'
    assert inventory.change(inventory.read(data)) == []
    assert lines == ["Service default/a: spec.ports[0].port: 99999999999999999999: expected int <= 9223372036854775807"]


def test_each_family_keeps_some_of_its_source_ranges() -> None:
    """A family without a range would be open to every source."""
    ranges = b",".join([RANGE] * (MOST_ENTRIES + 5) + [b'"2001:db8::/64"'])
    decoded = decode_object("Service", SERVICE % ranges)
    assert isinstance(decoded.object, Service)
    kept = decoded.object.spec.load_balancer_source_ranges
    assert kept is not None
    assert (len(kept), kept[0], kept[-1]) == (MOST_ENTRIES + 1, "10.1.2.3/32", "2001:db8::/64")
    number = MOST_ENTRIES + 6
    assert decoded.messages == (
        f"Service tenant/big: spec.loadBalancerSourceRanges: {number} are more than {MOST_ENTRIES}:"
        " the others are left out",
    )


def test_many_errors_of_one_object_are_shortened_to_a_hundred_lines() -> None:
    decoded = decode_object("Service", many(SERVICE, b'"?"', 1000))
    assert len(decoded.messages) == 101
    # The 1000 entries, and that the address is open to every source.
    assert decoded.messages[-1] == "Service tenant/big: 901 more"


YAML = """apiVersion: v1
kind: Service
metadata: {name: big, namespace: tenant}
spec:
  clusterIP: 10.96.0.9
  ports: [{port: 80}]
  loadBalancerSourceRanges:
"""


def test_a_million_entries_in_yaml_are_not_read_to_the_end() -> None:
    text = (YAML + "  - 10.1.2.3/32\n" * MILLION).encode()

    def read() -> None:
        with pytest.raises(UnreadableError, match=r"^line \d+: one object has more than 200000 values$"):
            list(decode_yaml(text))

    seconds, size = cost(read)
    assert seconds < 8, seconds
    assert size < 300 * MIB, size


def objects_in_yaml(count: int, entries: int) -> Iterator[str]:
    """A List of so many Services, each with so many ranges."""
    yield "apiVersion: v1\nkind: List\nitems:\n"
    for number in range(count):
        yield f"- apiVersion: v1\n  kind: Service\n  metadata: {{name: s{number}}}\n"
        yield f"  spec: {{clusterIP: 10.96.1.{number}, ports: [{{port: 80}}], loadBalancerSourceRanges: ["
        yield ", ".join(["10.1.2.3/32"] * entries) + "]}\n"


def test_the_limit_in_yaml_is_of_each_object_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_VALUES", 1000)
    decoded = list(decode_yaml("".join(objects_in_yaml(5, 900)).encode()))
    assert [each.object is not None for each in decoded] == [True] * 5
    documents = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "data": dict.fromkeys(map(str, range(400)), "x")})
    assert [each.ignored for each in decode_yaml(f"{documents}\n---\n{documents}".encode())] == ["v1/ConfigMap"] * 2
    for text in ("".join(objects_in_yaml(5, 1001)), YAML + "  - 10.1.2.3/32\n" * 1001):
        with pytest.raises(UnreadableError):
            list(decode_yaml(text.encode()))


SLICE_IN_YAML = """apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{port: 80}]
"""
A_LIST = "{apiVersion: v1, kind: List, items: "
ALIASES = {
    "of lists": SLICE_IN_YAML + f"endpoints: [&e {{addresses: [&a 10.244.1.1{', *a' * 30_000}]}}{', *e' * 30_000}]",
    "of objects": f"{A_LIST}[&a {A_LIST}[&b {A_LIST}[{{kind: Some}}]}}{', *b' * 10_000}]}}{', *a' * 10_000}]}}",
    "merged": "\n".join(
        (
            f"a: &a {{{', '.join(f'k{i}: x' for i in range(1000))}}}",
            f"b: &b {{<<: [*a{', *a' * 10_000}]}}",
            f"c: &c {{<<: [*b{', *b' * 10_000}]}}",
        )
    ),
}


@pytest.mark.parametrize("text", ALIASES.values(), ids=ALIASES)
def test_aliases_in_yaml_create_no_objects(text: str) -> None:
    """A file of 200 KB stood for 10⁹ values."""

    def read() -> None:
        with pytest.raises(UnreadableError, match=r"^line \d+: aliases add more than 200000 values$"):
            list(decode_yaml(text.encode()))

    seconds, size = cost(read)
    assert seconds < 4, seconds
    assert size < 50 * MIB, size


def test_a_few_aliases_are_used() -> None:
    text = SLICE_IN_YAML + "endpoints: [{addresses: [&a 10.244.1.1], conditions: &c {ready: false}}"
    text += ", {addresses: [*a], conditions: *c}" * 999 + "]"
    (decoded,) = decode_yaml(text.encode())
    assert isinstance(decoded.object, EndpointSlice)
    endpoints = decoded.object.endpoints or ()
    assert len(endpoints) == 1000
    assert {(each.addresses, each.conditions.ready if each.conditions else None) for each in endpoints} == {
        (("10.244.1.1",), False)
    }


def million(value: bytes) -> bytes:
    """A JSON list of so many values."""
    return b"[" + (value + b",") * (MILLION - 1) + value + b"]"


TOO_LARGE = "one object has more than 200000 values"
UNUSUAL = {
    "a list": (million(b"[]"), "a list is not an object"),
    "a text": (b'"' + b"," * MILLION + b'"', "a text is not an object"),
    "a list as kind": (b'{"kind": %s}' % million(b"[]"), "object: kind: missing"),
    "a list as version": (b'{"kind": "Service", "apiVersion": %s}' % million(b"[]"), "Service: apiVersion: missing"),
    "a list as UID": (
        b'{"kind": "Service", "apiVersion": "v1", "metadata": {"name": "a", "uid": %s}}' % million(b"[]"),
        f"Service default/a: {TOO_LARGE}",
    ),
    "a list as item": (b'{"kind": "List", "items": [%s]}' % million(b"[]"), "a list is not an object"),
}


@pytest.mark.alone
@pytest.mark.parametrize(("data", "message"), UNUSUAL.values(), ids=UNUSUAL)
def test_a_million_values_in_unusual_places_create_no_objects(data: bytes, message: str) -> None:
    """A file of 64 MiB took 2 GB."""
    (decoded,) = decode_json(data)
    assert (decoded.object, decoded.messages) == (None, (message,))
    seconds, size = cost(lambda: list(decode_json(data)))
    assert (seconds < 0.5, size < 2 * MIB) == (True, True), (seconds, size)


def test_items_that_are_no_list_are_ignored_as_in_a_small_object() -> None:
    (decoded,) = decode_json(b'{"kind": "ServiceList", "apiVersion": "v1", "items": {"a": %s}}' % million(b"0"))
    assert decoded.ignored == "v1/ServiceList"


@pytest.mark.alone
@pytest.mark.parametrize("shape", [b"[%s0]", b'{"kind": "List", "apiVersion": "v1", "items": [%s0]}'])
def test_a_file_of_the_largest_size_with_short_values_is_refused(shape: bytes) -> None:
    data = shape % (b"0," * (32 * MIB))

    def read() -> None:
        with pytest.raises(UnreadableError, match=r"^the file has more than 4000000 values; split the file into seve"):
            list(decode_json(data))

    seconds, size = cost(read)
    assert (seconds < 1, size < MIB) == (True, True), (seconds, size)


@pytest.mark.parametrize("items", ["\n" + "- 0\n" * 2000, " [" + "[], " * 2000 + "]"], ids=["numbers", "lists"])
def test_items_of_a_list_in_yaml_are_not_read_to_the_end(items: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an object of its own; 64 MiB of them took 16 GB."""
    monkeypatch.setattr(limits, "MOST_VALUES_OF_DOCUMENT", 1000)
    with pytest.raises(UnreadableError, match=r"^line \d+: one YAML document has more than .*, or write JSON$"):
        list(decode_yaml(f"kind: List\nitems:{items}".encode()))


def test_the_documents_of_a_yaml_file_are_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    good = "---\n" + YAML + "  - 10.1.2.3/32\n"
    assert len(list(decode_yaml((good * 100).encode()))) == 100
    monkeypatch.setattr(limits, "MOST_VALUES_OF_FILE", 200)
    with pytest.raises(UnreadableError, match=r"^line \d+: the file has more than 4000000 values; split the file into"):
        list(decode_yaml((good * 100).encode()))
    monkeypatch.setattr(limits, "MOST_DOCUMENTS", 10)
    assert len(list(decode_yaml(("--- 0\n" * 10).encode()))) == 10
    with pytest.raises(UnreadableError, match=r"^the file has more than 200000 documents; split the file into several"):
        list(decode_yaml(("--- 0\n" * 11).encode()))


def test_a_file_of_errors_gives_a_limited_number_of_lines() -> None:
    lines: list[str] = []
    notes: list[str] = []
    catalogue = Catalogue(lines.append, notes.append)
    catalogue.read("a.json", b'{"apiVersion": "v1", "kind": "List", "items": [%s0]}' % (b"0," * 2999))
    assert len(lines) == MOST_LINES + 1
    assert lines[-2:] == ["a.json: 0 is not an object", "a.json: 2000 more errors"]
    kinds = ",".join(f'{{"kind": "K{number}"}}' for number in range(3000))
    catalogue.read("b.json", f'{{"apiVersion": "v1", "kind": "List", "items": [{kinds}]}}'.encode())
    assert len(notes) == MOST_LINES


@pytest.mark.parametrize("name", ["a." * 500_000 + "-", "a" * 1_000_000 + "-", "/" * 1_000_000])
def test_a_name_of_a_megabyte_takes_little_time(name: str) -> None:
    """Python's other threads wait for a regular expression: the agent changed nothing for half a second."""
    entry = json.dumps({"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": name}}).encode()
    with cpu_limit(0.1):
        decoded = decode_object("EndpointSlice", SLICE % entry)
    assert decoded.object is not None
    assert len(decoded.messages) == 1
