# SPDX-License-Identifier: Apache-2.0
"""The fixed flows: services that cover each row and note of the rules, under the configurations that affect them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyebpf_proxy.lab.addresses import (
    CLIENT_CIDR,
    NODE_CIDR,
    POD_CIDR,
    Dual,
    cluster_ip,
    node_address,
    pod_gateway,
    vip,
)
from pyebpf_proxy.lab.manifests import Object
from tests.flows.flow import Flow
from tests.flows.objects import End, Port, Svc, nodes

#: Answers without a new outcome in a row: the second of two endpoints is missed once in 65 000 flows.
ENOUGH = 16
MODES = ("iptables", "nftables")
SOURCES = ("toolbox", "local-1", "node1", "client")

LOCAL = {"externalTrafficPolicy": "Local"}
INTERNAL = {"internalTrafficPolicy": "Local"}
READY = [End("local-1"), End("remote-1")]
GONE = {"ready": False, "serving": False, "terminating": True}
LEAVING = {"ready": False, "serving": True, "terminating": True}
STICKY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
WEB = Port(80, "TCP", 8080, "web", 0)


def _ranges(*networks: str) -> dict[str, Any]:
    return {"loadBalancerSourceRanges": list(networks)}


@dataclass
class Scenario:
    """Objects and a configuration. ``config``: top-level fields of the KubeProxyConfiguration, except the mode."""

    name: str
    services: Sequence[Svc]
    config: dict[str, Any] = field(default_factory=dict)
    sources: Sequence[str] = SOURCES
    modes: Sequence[str] = MODES
    #: Addresses of no service (description, address), asked at port 80.
    strangers: Sequence[tuple[str, str]] = ()
    #: Services whose VIPs the node has on its loopback; it also sends requests from these VIPs.
    node_has_vips_of: Sequence[str] = ()

    def objects(self) -> list[Object]:
        return [*nodes(), *(each for service in self.services for each in service.objects())]

    def flows(self) -> Iterator[Flow]:
        for service in self.services:
            yield from service.flows(self.sources, ENOUGH)
        for what, address in self.strangers:
            for source in self.sources:
                for protocol in ("tcp", "udp"):
                    yield Flow(source, what, address, 80, protocol)
        for flow in (flow for service in self._theirs() for flow in service.flows(("node1",), ENOUGH)):
            if " by VIP" in flow.what:
                yield flow._replace(what=f"{flow.what}, from the VIP itself", bound=flow.address)

    def _theirs(self) -> Iterator[Svc]:
        return (service for service in self.services if service.name in self.node_has_vips_of)

    def node_addresses(self) -> list[str]:
        """The other addresses of the node's loopback."""
        return [service.vip.of(family) for service in self._theirs() for family in service.families]


def _policies() -> list[Svc]:
    """Every combination of policies with endpoints on both nodes, only on the other one, or none."""
    found = []
    number = 10
    places: dict[str, list[End]] = {"everywhere": READY, "elsewhere": [End("remote-1"), End("remote-2")], "nowhere": []}
    policies: dict[str, dict[str, Any]] = {"Cluster": {}, "external Local": LOCAL, "internal Local": INTERNAL}
    policies["both Local"] = LOCAL | INTERNAL
    for place, ends in places.items():
        for policy, spec in policies.items():
            name = f"{policy}-{place}".lower().replace(" ", "-")
            found.append(Svc(name, number, [ends], spec=dict(spec)))
            number += 1
    return found


def _states() -> list[Svc]:
    """The effect of endpoints' conditions, hints and slices."""
    zone = {"zones": ("zone-a",)}
    away = {"zones": ("zone-b",)}
    here, there = {"nodes": ("node1",)}, {"nodes": ("node2",)}
    nowhere = End("local-1", placed=False, **LEAVING)
    cases: list[tuple[str, list[list[End]], dict[str, Any]]] = [
        ("not-ready", [[End("local-1", ready=False), End("remote-1", ready=False)]], {}),
        ("one-not-ready", [[End("local-1", ready=False), End("remote-1")]], {}),
        ("conditions-unset", [[End("local-1", ready=None)]], {}),
        ("all-leaving", [[End("local-1", **LEAVING), End("remote-1", **LEAVING)]], {}),
        ("leaving-and-ready", [[End("local-1", **LEAVING), End("remote-1")]], {}),
        ("leaving-here-ready-there-local", [[End("local-1", **LEAVING), End("remote-1")]], LOCAL | INTERNAL),
        ("leaving-there-local", [[End("remote-1", **LEAVING)]], LOCAL | INTERNAL),
        ("gone", [[End("local-1", **GONE), End("remote-1", **GONE)]], {}),
        ("gone-local", [[End("local-1", **GONE), End("remote-1", **GONE)]], LOCAL | INTERNAL),
        ("leaving-not-serving-and-serving", [[End("local-1", **GONE), End("remote-1", **LEAVING)]], {}),
        ("zone-hints", [[End("local-1", **zone), End("remote-1", **away)]], {}),
        ("zone-hints-elsewhere-only", [[End("local-1", **away), End("remote-1", **away)]], {}),
        ("zone-hints-incomplete", [[End("local-1", **zone), End("remote-1")]], {}),
        ("zone-hints-not-ready", [[End("local-1", ready=False, **zone), End("remote-1", **away)]], {}),
        ("zone-hints-local-policy", [[End("local-1", **away), End("remote-1", **zone)]], LOCAL | INTERNAL),
        ("node-hints", [[End("local-1", **here), End("remote-1", **there)]], {}),
        ("node-hints-before-zone-hints", [[End("local-1", **away, **here), End("remote-1", **zone, **there)]], {}),
        ("node-hints-incomplete", [[End("local-1", **zone, **here), End("remote-1", **away)]], {}),
        ("two-slices", [[End("local-1")], [End("remote-1"), End("remote-2")]], {}),
        ("twice-in-two-slices", [[End("local-1")], [End("local-1"), End("remote-1")]], {}),
        ("twice-leaving-and-ready", [[End("local-1")], [End("local-1", **LEAVING)]], {}),
        ("hairpin-only", [[End("local-1")]], {}),
        ("hairpin-local", [[End("local-1")]], LOCAL | INTERNAL),
        ("host-network", [[End("host")]], {}),
        ("host-network-and-remote-local", [[End("host"), End("remote-1")]], LOCAL),
        ("twice-leaving-nowhere-first", [[nowhere, End("local-1", **LEAVING), End("remote-1")]], LOCAL | INTERNAL),
        ("twice-leaving-here-first", [[End("local-1", **LEAVING), nowhere, End("remote-1")]], LOCAL | INTERNAL),
    ]
    return [Svc(name, 10 + at, ends, spec=dict(spec)) for at, (name, ends, spec) in enumerate(cases)]


def _addresses() -> list[Svc]:
    """Which addresses and ports a service has."""
    tcp = Port(80, "TCP", 8080, "web", 30200)
    other = Port(81, "TCP", 8080, "web", 30201)
    return [
        Svc("cluster-ip-only", 10, [READY], [WEB], external=False, load_balancer=False),
        Svc("no-node-port", 11, [READY], [WEB]),
        Svc("node-port-only", 12, [READY], [Port(80, "TCP", 8080, "web", 30012)], external=False, load_balancer=False),
        Svc("ipv4-only", 13, [READY], families=(4,)),
        Svc("ipv6-only", 14, [READY], families=(6,)),
        Svc("proxied-vip", 15, [READY], ip_mode="Proxy"),
        Svc("vip-mode-vip", 16, [READY], ip_mode="VIP"),
        Svc("external-ip-of-the-node", 17, [READY], [tcp], external_ips=node_address(1), load_balancer=False),
        Svc("vip-of-the-node", 18, [READY], [other], vips=node_address(1), external=False),
        Svc("vip-of-the-gateway", 19, [READY], [Port(82, "TCP", 8081, "web", 30202)], vips=pod_gateway(1)),
        Svc(
            "one-number-two-protocols",
            20,
            [READY],
            [Port(53, "TCP", 8081, "tcp", 30203), Port(53, "UDP", 5354, "udp", 30203)],
        ),
        Svc(
            "two-ports-two-targets", 21, [READY], [Port(80, "TCP", 8080, "a", 30204), Port(81, "TCP", 8081, "b", 30205)]
        ),
        Svc(
            "a-port-the-slice-lacks",
            22,
            [READY],
            [Port(80, "TCP", 8080, "a", 30206), Port(81, "TCP", 8081, "b", 30207)],
            slice_ports=[Port(80, "TCP", 8080, "a")],
        ),
        Svc(
            "protocol-differs-in-the-slice",
            23,
            [READY],
            [Port(80, "TCP", 8080, "a", 30208)],
            slice_ports=[Port(80, "UDP", 5353, "a")],
        ),
        Svc("sticky", 24, [[*READY, End("remote-2")]], spec=dict(STICKY)),
        Svc("sticky-local", 25, [[*READY, End("local-2")]], spec=STICKY | LOCAL | INTERNAL),
    ]


def _source_ranges() -> list[Svc]:
    """loadBalancerSourceRanges, in both families unless the name differs."""
    client, pods, node = CLIENT_CIDR, POD_CIDR, NODE_CIDR
    no_client = ("192.168.77.0/24", "fd00:77::/64")
    cases: list[tuple[str, list[End], dict[str, Any]]] = [
        ("only-client", READY, _ranges(*client)),
        ("only-pods", READY, _ranges(*pods)),
        ("only-node", READY, _ranges(*node)),
        ("none", READY, _ranges(*no_client)),
        ("everybody", READY, _ranges("0.0.0.0/0", "::/0")),
        ("ipv4-ranges-only", READY, _ranges(client[0])),
        ("ipv6-ranges-only", READY, _ranges(client[1])),
        ("many", READY, _ranges("10.0.0.0/9", *no_client, "198.51.100.2/32", "2001:db8:2::2/128")),
        ("client-and-local", READY, _ranges(*client) | LOCAL),
        ("pods-and-local", READY, _ranges(*pods) | LOCAL),
        ("none-and-local", READY, _ranges(*no_client) | LOCAL),
        ("only-client-no-endpoints", [], _ranges(*client)),
        ("none-no-endpoints", [], _ranges(*no_client)),
        ("none-elsewhere-local", [End("remote-1")], _ranges(*no_client) | LOCAL),
    ]
    return [Svc(f"allow-{name}", 10 + at, [ends], spec=spec) for at, (name, ends, spec) in enumerate(cases)]


def _here() -> list[Svc]:
    """For pods of the other node: between two of them, answers without masquerade would not pass this node."""
    here = [End("local-1"), End("local-2")]
    return [
        Svc("here", 10, [here]),
        Svc("here-local", 11, [here], spec=LOCAL | INTERNAL),
        Svc("here-pods-allowed", 12, [here], spec=_ranges(*POD_CIDR)),
        Svc("here-nowhere", 13),
    ]


def _sctp() -> list[Svc]:
    """SCTP with packets that the test builds: rows, ranges and affinity once each."""
    cases: list[tuple[str, list[End], dict[str, Any]]] = [
        ("plain", READY, {}),
        ("local", READY, LOCAL | INTERNAL),
        ("elsewhere", [End("remote-1")], LOCAL | INTERNAL),
        ("nowhere", [], {}),
        ("hairpin", [End("local-1")], {}),
        ("only-client", READY, _ranges(*CLIENT_CIDR)),
        ("none-no-endpoints", [], _ranges("192.168.77.0/24", "fd00:77::/64")),
        ("sticky", READY, dict(STICKY)),
    ]
    return [
        Svc(f"sctp-{name}", 10 + at, [ends], [Port(36412, "SCTP", 3868, "s1ap", 30300 + at)], spec=spec)
        for at, (name, ends, spec) in enumerate(cases)
    ]


def _unusual() -> list[Svc]:
    """Objects that do not count, or count partly."""
    here, there = [End("local-1")], [End("remote-1")]
    return [
        Svc("another-proxy", 10, [READY], labels={"service.kubernetes.io/service-proxy-name": "other"}),
        Svc("headless-slices", 11, [READY], slice_labels={"service.kubernetes.io/headless": ""}),
        Svc("no-ipv6-slices", 12, [READY], slice_families=(4,)),
        Svc("no-slices", 13),
        Svc("hints-without-annotation", 14, [[End("local-1", zones=("zone-a",)), End("remote-1", zones=("zone-b",))]]),
        Svc("annotation-without-hints", 15, [READY], annotations={"service.kubernetes.io/topology-mode": "Auto"}),
        Svc("distribution-without-hints", 16, [READY], spec={"trafficDistribution": "PreferSameNode"}),
        Svc("not-ready-published", 17, [[End("local-1", ready=False)]], spec={"publishNotReadyAddresses": True}),
        Svc("endpoint-of-no-node-local", 18, [[End("local-1", placed=False), End("remote-1")]], spec=LOCAL | INTERNAL),
        Svc(
            "ports-differ-by-slice",
            19,
            [here, there],
            [Port(80, "TCP", 8080, "web", 30219)],
            ports_of_slice={1: [Port(80, "TCP", 8081, "web")]},
        ),
        Svc("one-vip-proxied", 20, [READY], second_vip="Proxy"),
        Svc("two-vips-with-ranges", 21, [READY], spec=_ranges(*CLIENT_CIDR), second_vip="VIP"),
        Svc(
            "external-ip-at-a-node-port",
            22,
            [here],
            [Port(30223, "TCP", 8080, "web")],
            external_ips=node_address(1),
            load_balancer=False,
        ),
        Svc(
            "node-port-at-an-external-ip",
            23,
            [there],
            [Port(80, "TCP", 8081, "web", 30223)],
            external=False,
            load_balancer=False,
        ),
    ]


def _strangers() -> list[tuple[str, str]]:
    """Addresses of no Service, and unserved ports of service addresses (spec/service-semantics §9)."""
    found: list[tuple[str, str]] = []
    for family in (4, 6):
        found += [
            ("a cluster IP of no service", cluster_ip(99).of(family)),
            ("a VIP of no service", vip(99).of(family)),
            ("a VIP at a port it does not have", vip(10).of(family)),
            ("an externalIP at a port it does not have", vip(110).of(family)),
            ("a VIP in mode Proxy", vip(12).of(family)),
            ("the node at an unused port", node_address(1).of(family)),
        ]
    return found


def _vips_of_the_node() -> list[Svc]:
    """A node that has a VIP may use it as source (§7)."""
    return [
        Svc("own-only-node", 10, [READY], spec=_ranges(*NODE_CIDR)),
        Svc("own-only-client", 11, [READY], spec=_ranges(*CLIENT_CIDR)),
        Svc("own-everybody-local", 12, [READY], spec=_ranges("0.0.0.0/0", "::/0") | LOCAL),
        Svc("own-plain", 13, [READY]),
        Svc("not-own", 14, [READY], spec=_ranges(*NODE_CIDR)),
    ]


def _few() -> list[Svc]:
    """A few services that a configuration may treat differently."""
    return [
        Svc("plain", 10, [READY]),
        Svc("local", 11, [READY], spec=LOCAL | INTERNAL),
        Svc("elsewhere", 12, [[End("remote-1")]], spec=dict(LOCAL)),
        Svc("hairpin", 13, [[End("local-1")]]),
        Svc("nowhere", 14),
    ]


def all_scenarios(mode: str) -> list[Scenario]:
    """Every fixed scenario of a mode."""
    return [scenario for scenario in _scenarios() if mode in scenario.modes]


def _scenarios() -> list[Scenario]:
    pods = ",".join(POD_CIDR)
    detector = {"clusterCIDR": pods}
    found = [
        Scenario("policies", _policies(), detector),
        Scenario("endpoint states", _states(), detector),
        Scenario("hairpin placed nowhere", [Svc("hairpin", 10, [[End("local-1", placed=False)]])], detector),
        Scenario("addresses", _addresses(), detector),
        Scenario("source ranges", _source_ranges(), detector),
        Scenario("policies without a detector", _policies(), {}),
        Scenario("source ranges without a detector", _source_ranges()[:4], {}),
    ]
    bridge = {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod0"}}
    prefix = {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}}
    configs: dict[str, dict[str, Any]] = {
        "cluster CIDR of IPv4 only": {"clusterCIDR": POD_CIDR[0]},
        "cluster CIDR that holds the node": {"clusterCIDR": "0.0.0.0/1,::/0"},
        "detector: node CIDR": {"detectLocalMode": "NodeCIDR"},
        "detector: interface": bridge,
        "detector: interface prefix": prefix,
        "NodePorts on the primary address": detector | {"nodePortAddresses": ["primary"]},
        "NodePorts towards pods only": detector | {"nodePortAddresses": list(_gateways())},
        "NodePorts of IPv6 only": detector | {"nodePortAddresses": [NODE_CIDR[1]]},
        "NodePorts everywhere": detector | {"nodePortAddresses": ["0.0.0.0/0", "::/0"]},
        "NodePorts on loopback and one address": detector | {"nodePortAddresses": ["127.0.0.0/8", NODE_CIDR[0]]},
    }
    found += [Scenario(name, _few(), config) for name, config in configs.items()]
    found.append(Scenario("SCTP", _sctp(), detector))
    found.append(Scenario("unusual objects", _unusual(), detector))
    plain = [Port(8000, "TCP", 8080, "web")]
    strange = [Svc("known", 10, [READY], plain), Svc("proxied", 12, [READY], plain, ip_mode="Proxy")]
    found.append(Scenario("addresses without an entry", strange, detector, strangers=_strangers()))
    names = ("own-only-node", "own-only-client", "own-everybody-local", "own-plain")
    found.append(Scenario("VIPs that the node has", _vips_of_the_node(), detector, node_has_vips_of=names))
    detectors = {"cluster CIDR": detector, "node CIDR": {"detectLocalMode": "NodeCIDR"}, "bridge": bridge}
    detectors["interface prefix"] = prefix
    for name, config in detectors.items():
        found.append(Scenario(f"pods of another node, by {name}", _here(), config, sources=("remote-1",)))
    for mode in MODES:
        everything = detector | {mode: {"masqueradeAll": True}}
        found.append(Scenario("masquerade all", _few(), everything, modes=(mode,)))
    found.append(
        Scenario(
            "no localhost NodePorts",
            _few(),
            detector | {"iptables": {"localhostNodePorts": False}},
            modes=("iptables",),
        )
    )
    return found


def _gateways() -> Dual:
    gateway = pod_gateway(1)
    return Dual(f"{gateway.v4}/32", f"{gateway.v6}/128")
