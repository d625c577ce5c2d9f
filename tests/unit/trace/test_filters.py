# SPDX-License-Identifier: Apache-2.0
"""FILTER words of ``trace``: their meaning for views and for the programs; and messages about unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QuestionError
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePortName
from pyebpf_proxy.trace.filters import FIELDS, Filter, FilterNames


def name(service: str, port: str, family: IPFamily = IPFamily.IPV4) -> ServicePortName:
    return ServicePortName("default", service, port, Protocol.TCP, family)


KNOWN = FilterNames(
    {name("web", "http"): 1, name("web", "dns"): 2, name("web", "http", IPFamily.IPV6): 3, name("shop", "http"): 4},
    {"new_flow_fast": 1, "new_flow_netfilter": 2, "drop_source_range": 3, "drop_rewrite_failed": 4, "stack_hops": 5},
    {"eth0": 2, "cni0": 3},
)
ALL = (1 << 64) - 1


def decision(**fields: Any) -> model.Decision:
    known: dict[str, Any] = {
        "time": "2026-01-01T00:00:00.000000Z",
        "hook": "tc",
        "device": "eth0",
        "process": "",
        "pid": 0,
        "protocol": "TCP",
        "source": "198.51.100.2:40000",
        "destination": "203.0.113.10:80",
        "service": "default/web:http",
        "endpoint": "10.244.2.10:8080",
        "source_name": "kube-system/dns.0",
        "endpoint_name": "default/web-1",
        "backend": 1,
        "path": "fast",
        "masquerade": False,
        "masqueraded_as": "",
        "verdict": "served",
        "reason": "new_flow_fast",
    }
    return model.Decision(**(known | fields))


@pytest.mark.parametrize(
    ("words", "wanted", "other"),
    [
        ("web", {"services": (1, 2, 3)}, {"service": "default/shop:http"}),
        ("default/web:http", {"services": (1, 3)}, {"service": "default/web:dns"}),
        ("service=we", {"services": (1, 2, 3)}, {"service": "default/shop:http"}),
        ("198.51.100.2", {"family": 4, "address": bytes([198, 51, 100, 2]).ljust(16, b"\0")}, {"source": "10.0.0.1:1"}),
        ("10.244.2.10:8080", {"family": 4}, {"endpoint": "10.244.2.10:8081"}),
        ("client=198.51.100.2", {"family": 4}, {"source": "10.0.0.1:1", "destination": "198.51.100.2:80"}),
        ("endpoint=web-1", {}, {"endpoint_name": "default/web-2"}),
        ("client=kube-system/dns.0", {}, {"source_name": "default/dns.0"}),
        ("address=default/web-1", {}, {"endpoint_name": ""}),
        ("port=8080", {"port": 8080}, {"endpoint": "10.244.2.10:80"}),
        ("tcp", {"protocol": 6}, {"protocol": "UDP"}),
        ("eth0", {"device": 2}, {"device": "cni0"}),
        ("path=fast", {"reasons": 1 << 1 | 1 << 4}, {"reason": "new_flow_netfilter"}),
        ("new_flow", {"reasons": 1 << 1 | 1 << 2}, {"reason": "stack_hops"}),
        ("reason=new_flow_fast,drop", {"reasons": 1 << 1 | 1 << 3 | 1 << 4}, {"reason": "stack_hops"}),
        ("tcp web eth0", {"protocol": 6, "services": (1, 2, 3), "device": 2}, {"device": "cni0"}),
    ],
)
def test_words(words: str, wanted: dict[str, Any], other: dict[str, Any]) -> None:
    chosen = Filter(words.split(), KNOWN)
    assert wanted.items() <= chosen.wanted.items()
    assert chosen.fits(decision())
    assert not chosen.fits(decision(**other))


def test_pods_are_distinguished_from_addresses() -> None:
    assert Filter(["endpoint=web-1"], KNOWN).names_pods
    for word in ("web", "endpoint=10.244.2.10", "client=fd00::1", "endpoint=10.244.2.10:8080"):
        assert not Filter([word], KNOWN).names_pods
    for wrong in ("10.244.2", "10.244.2.10:http", "Web_1"):
        with pytest.raises(QuestionError, match=f"^{wrong} is not an ADDRESS or ADDRESS:PORT"):
            Filter([f"endpoint={wrong}"], KNOWN)


def test_ipv6_with_a_port() -> None:
    chosen = Filter(["client=[2001:db8::0:2]:40000"], KNOWN)
    assert chosen.wanted["family"] == 6
    assert chosen.fits(decision(source="[2001:db8::2]:40000"))
    assert not chosen.fits(decision(source="[2001:db8::2]:40001"))


def test_only_the_reader_filters_by_process() -> None:
    chosen = Filter(["process=curl"], KNOWN)
    assert chosen.wanted == {"reasons": ALL}
    assert chosen.fits(decision(process="curl", pid=7))
    assert Filter(["process=7"], KNOWN).fits(decision(process="curl", pid=7))
    assert not chosen.fits(decision())


def test_services_are_renumbered() -> None:
    chosen = Filter(["web:http"], KNOWN)
    assert chosen.renumber({name("web", "http"): 9, name("shop", "http"): 1})["services"] == (9,)
    # No service at all must not mean any; services beyond the room are left to the reader.
    assert len(chosen.renumber({})["services"]) == 1
    many = {name("web", "http", IPFamily.IPV4)._replace(namespace=f"n{i}"): i for i in range(20)}
    assert Filter(["n3/web"], KNOWN._replace(services=many)).wanted["services"] == (3,)
    ports = {name("web", f"p{i}"): i for i in range(1, 20)}
    assert Filter(["web"], KNOWN._replace(services=ports)).wanted["services"] == ()


@pytest.mark.parametrize(
    ("word", "output"),
    [
        ("servce=web", f"decisions have no field servce: {', '.join(FIELDS)}; did you mean service or device?"),
        ("default/wbe", "no Service is called default/wbe; did you mean default/web?"),
        ("nonsense", "nonsense is not an address, service, protocol, path, reason or device"),
        ("reason=stack_hpos", "there is no reason stack_hpos; did you mean stack_hops?"),
        ("device=eth9", "there is no device eth9; did you mean eth0?"),
        ("protocol=icmp", "there is no protocol icmp: TCP, UDP, SCTP"),
        ("path=direct", "there is no path direct: fast, netfilter, socket"),
        ("port=70000", "70000 is not a port (1 to 65535)"),
        pytest.param("port=" + "9" * 5000, "9" * 5000 + " is not a port (1 to 65535)", id="5000 digits"),
        ("client=10.0.0", "10.0.0 is not an ADDRESS or ADDRESS:PORT"),
        ("port=", "port= needs a value"),
    ],
)
def test_unknown_words(word: str, output: str) -> None:
    with pytest.raises(QuestionError) as raised:
        Filter([word], KNOWN)
    assert str(raised.value) == output
