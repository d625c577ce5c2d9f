# SPDX-License-Identifier: Apache-2.0
"""Documents to objects: both syntaxes, lists, and the messages about invalid texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from pyebpf_proxy.kube.decode import Decoded, decode_json, decode_yaml
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.objects import EndpointSlice, Service

SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "prod", "labels": {"a": "b"}, "uid": "x", "managedFields": [{"x": 1}]},
    "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "targetPort": "http"}], "selector": {"app": "web"}},
    "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP", "ports": []}]}},
}
SLICE: dict[str, Any] = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "web-x"},
    "addressType": "IPv4",
    "ports": [{"port": 80, "appProtocol": "h2c"}],
    "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"kind": "Pod"}}],
}


def one(text: str) -> Decoded:
    (decoded,) = decode_yaml(text.encode())
    return decoded


def test_json_and_yaml_give_the_same_objects() -> None:
    for document in (SERVICE, SLICE, {"apiVersion": "v1", "kind": "List", "items": [SERVICE, SLICE]}):
        from_json = list(decode_json(json.dumps(document).encode()))
        assert from_json == list(decode_yaml(yaml.safe_dump(document).encode()))
        assert all(decoded.object is not None and not decoded.messages for decoded in from_json)
    assert [str(decoded.key) for decoded in from_json] == ["Service prod/web", "EndpointSlice default/web-x"]


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    text = b"\xef\xbb\xbf" + json.dumps(SERVICE).encode()
    for decode in (decode_json, decode_yaml):
        (decoded,) = decode(text)
        assert str(decoded.key) == "Service prod/web"


def test_json_and_yaml_give_the_same_messages_about_bad_objects() -> None:
    for path, value in (("clusterIP", 7), ("clusterIP", "x"), ("ports", [{"port": "80"}]), ("externalIPs", [[]])):
        document = {**SERVICE, "spec": {**SERVICE["spec"], path: value}}
        (from_json,) = decode_json(json.dumps(document).encode())
        assert from_json == one(yaml.safe_dump(document))
        assert from_json.object is None
        assert from_json.key is not None
        assert from_json.messages[0].startswith(f"Service prod/web: spec.{path}")


def test_defaults_of_the_api_server_are_filled_in() -> None:
    (decoded,) = decode_json(json.dumps(SERVICE).encode())
    assert isinstance(decoded.object, Service)
    assert decoded.object.spec.cluster_ips == ("10.96.0.1",)
    assert decoded.object.spec.ip_families == ("IPv4",)
    (decoded,) = decode_json(json.dumps(SLICE).encode())
    assert isinstance(decoded.object, EndpointSlice)
    assert decoded.object.ports is not None
    assert decoded.object.ports[0].name == ""
    decoded = one(
        "{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIPs: ['fd00::1', 10.96.0.1], ports: []}}"
    )
    assert isinstance(decoded.object, Service)
    assert decoded.object.spec.cluster_ip == "fd00::1"
    assert decoded.object.spec.ip_families == ("IPv6", "IPv4")


def test_items_of_a_typed_list_may_be_bare() -> None:
    bare = {name: value for name, value in SLICE.items() if name not in ("kind", "apiVersion")}
    document = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": [bare, SERVICE]}
    kinds = [decoded.key.kind for decoded in decode_json(json.dumps(document).encode()) if decoded.key]
    assert kinds == ["EndpointSlice", "Service"]
    (decoded,) = decode_json(json.dumps({"apiVersion": "v1", "kind": "List", "items": [bare]}).encode())
    assert decoded.messages == ('object "web-x": kind: missing',)
    assert list(decode_json(b'{"apiVersion": "v1", "kind": "ServiceList", "items": null}')) == []


def test_handwritten_yaml() -> None:
    text = """\ufeff# a comment
---
---
apiVersion: v1
kind: Service
metadata:
  name: web
  creationTimestamp: 2024-01-01T00:00:00Z
  annotations: {sign: =, 7: x, more: 2024-99-99}
spec: {clusterIP: 2001:10:0:0:0:0:0:1, ports: [{port: 0x50}]}
...
"""
    decoded = one(text)
    assert decoded.messages == ()
    assert decoded.object is not None
    assert decoded.object.metadata.creation_timestamp == "2024-01-01T00:00:00Z"
    # To other readers of YAML 1.1 this is a number to base 60.
    assert decoded.object.spec.cluster_ip == "2001:10:0:0:0:0:0:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: b\nc: [1\nd: 2\n", "line 3: bad YAML: did not find expected ',' or ']'"),
        (b"a: b\n\tc: d\n", "line 2: bad YAML: found a tab character that violates indentation"),
        (b"kind: Service\nmetadata: *nothing\n", "line 2: bad YAML: found undefined alias"),
        (b"kind: !Ref x\n", "line 1: bad YAML: could not determine a constructor for the tag '!Ref'"),
        (b"a: b\nc: \x01\n", "line 2: bad YAML: control characters are not allowed"),
        (b"a: b\nc: \xff\n", "line 2: bad YAML: invalid leading UTF-8 octet"),
        *[
            (f"a: {value}".encode(), "bad YAML: a value is not of the type that its tag names")
            for value in ("!!bool x", "!!int ''", "!!int +", "!!float ''", "!!timestamp x")
        ],
        # These would overflow the stack of the C library and end the process.
        (b"a: 1\nb: " + b"[" * 100_000, "line 2: bad YAML: more than 100 levels of nesting"),
        (b"- " * 100_000, "line 1: bad YAML: more than 100 levels of nesting"),
        (b"".join(b" " * i + b"a:\n" for i in range(3000)), "line 101: bad YAML: more than 100 levels of nesting"),
    ],
)
def test_bad_yaml_is_reported_with_its_line(text: bytes, message: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        list(decode_yaml(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{\n"kind": "Service",\n}', "line 3: bad JSON: trailing comma in object"),
        (b'{"kind": "Service"', "bad JSON: Input data was truncated"),
        (b'{"kind":\n"Serv\xffice"}', "line 2: bad JSON: not UTF-8"),
        (b"---\nkind: Service\n", "line 1: bad JSON: invalid"),
        (b'{"kind": "Service"} {}', "line 1: bad JSON: trailing characters"),
        (b'{"a":' * 100000, "bad JSON: nested too deeply"),
    ],
)
def test_bad_json_is_reported_with_its_line(text: bytes, message: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        list(decode_json(text))
    assert message in str(caught.value)


def test_documents_before_a_bad_one_are_used() -> None:
    documents = decode_yaml(json.dumps(SERVICE).encode() + b"\n---\nx: 1\n---\ny: [\n")
    found = [next(documents), next(documents)]
    with pytest.raises(UnreadableError, match="line 6"):
        next(documents)
    assert [str(decoded.key) for decoded in found if decoded.key] == ["Service prod/web"]


def test_many_brackets_are_not_deep() -> None:
    text = b"---\n".join(json.dumps({**SLICE, "x": [[{}]] * 100}).encode() + b"\n" for _ in range(20))
    assert all(decoded.object is not None for decoded in decode_yaml(text))


def test_an_empty_text_is_no_error() -> None:
    for text in (b"", b"\n", b"# nothing\n", b"---\n---\n"):
        assert list(decode_yaml(text)) == []
    assert list(decode_json(b" \n")) == []


def test_lists_inside_each_other_end() -> None:
    text = b"{apiVersion: v1, kind: List, items: [" * 4 + b"]}" * 4
    (decoded,) = decode_yaml(text)
    assert decoded.messages == ("List: more than 3 lists inside each other",)


def test_a_list_inside_itself_is_refused() -> None:
    """Thousands of references to itself would be thousands to the power of the depth."""
    text = b"apiVersion: v1\nkind: List\nitems: &x\n- {apiVersion: v1, kind: List, items: *x}\n"
    with pytest.raises(UnreadableError, match=r"^line 3: bad YAML: a value contains itself$"):
        list(decode_yaml(text))


def test_keys_of_a_wrong_type() -> None:
    decoded = one(
        "{apiVersion: v1, kind: Service, metadata: {name: web, labels: {1: x}}, spec: {clusterIP: 10.96.0.1}}"
    )
    assert decoded.messages == ("Service default/web: metadata.labels: a key of it: expected str, got int",)


def test_a_bad_value_is_shown_short_and_on_one_line() -> None:
    decoded = one(json.dumps({**SERVICE, "spec": {"clusterIP": "10.96.0.1", "sessionAffinity": "x\n" * 1000}}))
    assert len(decoded.messages[0]) < 200
    assert "\n" not in decoded.messages[0]
