# SPDX-License-Identifier: Apache-2.0
"""The decision table (spec/service-semantics §5, §7, §8) row by row: named packets in, verdict and reason out.

Every row runs in both families, with tc alone and with XDP before tc. The tag for the agent's nft table shows the
endpoint and whether the flow is masqueraded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, PRIORITY_MASQUERADE, PRIORITY_REJECT, SHOT, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

REMOTE, LOCAL = ["remote"], ["local"]


@dataclass(frozen=True)
class Row:
    name: str
    source: str
    destination: str
    expect: str  # an endpoint's name, "drop", "reject" or "untouched"
    masquerade: bool = False
    port: int = 80
    cluster: list[str] = field(default_factory=lambda: ["remote"])
    local: list[str] = field(default_factory=list)
    config: dict[str, int] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    ranges: bool = False
    reason: str = ""


NO_DETECTOR = {"detector4": 0, "detector6": 0}
EXTERNAL_LOCAL = {"external_local": 1}
INTERNAL_LOCAL = {"internal_local": 1}
NODE_PORT = 30080
ROWS = [
    # ClusterIP
    Row("a pod to the ClusterIP", "pod", "cluster_ip", "remote"),
    Row("an outsider to the ClusterIP", "client", "cluster_ip", "remote", masquerade=True),
    Row("an outsider to the ClusterIP, no detector", "client", "cluster_ip", "remote", settings=NO_DETECTOR),
    Row(
        "a pod, no detector, masqueradeAll",
        "pod",
        "cluster_ip",
        "remote",
        True,
        settings={**NO_DETECTOR, "masquerade_all": 1},
    ),
    Row("a pod, masqueradeAll", "pod", "cluster_ip", "remote", True, settings={"masquerade_all": 1}),
    Row(
        "internal policy Local with a local endpoint", "pod", "cluster_ip", "local", local=LOCAL, config=INTERNAL_LOCAL
    ),
    Row(
        "internal policy Local without one",
        "pod",
        "cluster_ip",
        "drop",
        config=INTERNAL_LOCAL,
        reason="DROP_NO_LOCAL_ENDPOINTS",
    ),
    Row(
        "an outsider, internal policy Local", "client", "cluster_ip", "local", True, local=LOCAL, config=INTERNAL_LOCAL
    ),
    Row("external policy Local does not concern the ClusterIP", "pod", "cluster_ip", "remote", config=EXTERNAL_LOCAL),
    # externalIP, VIP, NodePort with policy Cluster
    Row("an outsider to the externalIP", "client", "external_ip", "remote", True),
    Row("an outsider to the VIP", "client", "vip", "remote", True),
    Row("an outsider to the NodePort", "client", "node", "remote", True, port=NODE_PORT),
    Row("a pod to the externalIP", "pod", "external_ip", "remote", True),
    Row("a pod to the VIP", "pod", "vip", "remote", True),
    Row("a pod to the NodePort", "pod", "node", "remote", True, port=NODE_PORT),
    Row("an outsider to the VIP, no detector", "client", "vip", "remote", True, settings=NO_DETECTOR),
    Row(
        "masqueradeAll does not concern a VIP with policy Local",
        "client",
        "vip",
        "local",
        local=LOCAL,
        config=EXTERNAL_LOCAL,
        settings={"masquerade_all": 1},
    ),
    Row("internal policy Local does not concern the VIP", "client", "vip", "remote", True, config=INTERNAL_LOCAL),
    # the same with policy Local
    *(
        row
        for kind, port in (("external_ip", 80), ("vip", 80), ("node", NODE_PORT))
        for row in (
            Row(
                f"an outsider to {kind}, policy Local",
                "client",
                kind,
                "local",
                port=port,
                local=LOCAL,
                config=EXTERNAL_LOCAL,
            ),
            Row(
                f"an outsider to {kind}, policy Local, none here",
                "client",
                kind,
                "drop",
                port=port,
                config=EXTERNAL_LOCAL,
                reason="DROP_NO_LOCAL_ENDPOINTS",
            ),
            Row(
                f"a pod to {kind}, policy Local: short circuit", "pod", kind, "remote", port=port, config=EXTERNAL_LOCAL
            ),
            Row(
                f"a pod to {kind}, policy Local, no detector: like anyone",
                "pod",
                kind,
                "drop",
                port=port,
                config=EXTERNAL_LOCAL,
                settings=NO_DETECTOR,
                reason="DROP_NO_LOCAL_ENDPOINTS",
            ),
            Row(
                f"the node to {kind}, policy Local",
                "unserved_node",
                kind,
                "remote",
                True,
                port=port,
                config=EXTERNAL_LOCAL,
            ),
        )
    ),
    Row("a node address inside the pod range counts as pod", "pod_gateway", "vip", "remote", config=EXTERNAL_LOCAL),
    # no endpoints
    *(
        Row(f"no endpoints, {kind}", "client", kind, "reject", port=port, cluster=[], reason="REJECT_NO_ENDPOINTS")
        for kind, port in (("cluster_ip", 80), ("external_ip", 80), ("vip", 80), ("node", NODE_PORT))
    ),
    Row(
        "no endpoints here but elsewhere, both policies Local",
        "client",
        "cluster_ip",
        "drop",
        cluster=[],
        config={**INTERNAL_LOCAL, "any_endpoints": 1},
        reason="DROP_NO_LOCAL_ENDPOINTS",
    ),
    # hairpin
    Row("an endpoint to its own service", "remote", "cluster_ip", "remote", True),
    Row(
        "an endpoint to its own VIP, policy Local",
        "local",
        "vip",
        "local",
        True,
        cluster=LOCAL,
        local=LOCAL,
        config=EXTERNAL_LOCAL,
    ),
    # no frontend
    Row("the ClusterIP, another port", "pod", "cluster_ip", "untouched", port=81),
    Row("another address", "pod", "elsewhere", "untouched"),
    Row("the NodePort on an address that does not serve it", "client", "unserved_node", "untouched", port=NODE_PORT),
    Row("the NodePort on the unspecified address", "client", "unspecified", "untouched", port=NODE_PORT),
    Row("the same, no endpoints", "client", "unspecified", "untouched", port=NODE_PORT, cluster=[]),
    # there a REJECT and a DROP hold all the same, in iptables mode: kube-proxy refuses in the filter table
    *(
        Row(
            f"a NodePort on an address that does not serve it, {name}, mode {mode}",
            source,
            "unserved_node",
            expect if mode == "iptables" else "untouched",
            port=NODE_PORT,
            cluster=cluster,
            config=config,
            settings={"nft_mode": int(mode == "nftables")},
            reason=reason if mode == "iptables" else "",
        )
        for mode in ("iptables", "nftables")
        for source in ("client", "pod")
        for name, cluster, config, expect, reason in (
            (f"{source}, no endpoints", [], {}, "reject", "REJECT_NO_ENDPOINTS"),
            (f"{source}, none here", REMOTE, EXTERNAL_LOCAL, "drop", "DROP_NO_LOCAL_ENDPOINTS"),
            (f"{source}, internal policy Local, none here", REMOTE, INTERNAL_LOCAL, "untouched", ""),
        )
    ),
    Row(
        "a NodePort on an address that does not serve it, one here",
        "client",
        "unserved_node",
        "untouched",
        port=NODE_PORT,
        local=LOCAL,
        config=EXTERNAL_LOCAL,
    ),
    Row(
        "the NodePort's number on a foreign address, no endpoints",
        "pod",
        "elsewhere",
        "untouched",
        port=NODE_PORT,
        cluster=[],
    ),
    Row("the NodePort's number on a foreign address", "client", "elsewhere", "untouched", port=NODE_PORT),
    Row("the NodePort's number on a service address", "client", "vip", "untouched", port=NODE_PORT),
    # source ranges
    Row("a VIP with ranges, inside", "client", "vip", "remote", True, ranges=True),
    Row("a VIP with ranges, outside", "blocked", "vip", "drop", ranges=True, reason="DROP_SOURCE_RANGE"),
    Row(
        "a VIP with ranges, a pod outside of them",
        "pod",
        "vip",
        "drop",
        ranges=True,
        config=EXTERNAL_LOCAL,
        reason="DROP_SOURCE_RANGE",
    ),
    Row("ranges do not concern the externalIP", "blocked", "external_ip", "remote", True, ranges=True),
    Row("ranges do not concern the ClusterIP", "blocked", "cluster_ip", "remote", True, ranges=True),
    Row("ranges do not concern the NodePort", "blocked", "node", "remote", True, port=NODE_PORT, ranges=True),
    Row("the VIP itself as source", "vip", "vip", "remote", True, ranges=True, config={"vip_source_allowed": 1}),
    Row(
        "the VIP itself as source, the node outside the ranges",
        "vip",
        "vip",
        "drop",
        ranges=True,
        reason="DROP_SOURCE_RANGE",
    ),
    Row(
        "the externalIP as source is no VIP",
        "external_ip",
        "vip",
        "drop",
        ranges=True,
        config={"vip_source_allowed": 1},
        reason="DROP_SOURCE_RANGE",
    ),
    Row(
        "no endpoints and outside the ranges, iptables mode",
        "blocked",
        "vip",
        "reject",
        cluster=[],
        ranges=True,
        reason="REJECT_NO_ENDPOINTS",
    ),
    Row(
        "no endpoints and outside the ranges, nftables mode",
        "blocked",
        "vip",
        "drop",
        cluster=[],
        ranges=True,
        settings={"nft_mode": 1},
        reason="DROP_SOURCE_RANGE",
    ),
]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(hooks: ProgramNode, row: Row, protocol: str) -> None:
    world = hooks
    if row.settings:
        world.load(**row.settings)
    ranges = [f"{world.address('client')}/32" if world.family == 4 else f"{world.address('client')}/128"]
    world.service(row.cluster, row.local, protocol=protocol, ranges=ranges if row.ranges else None, **row.config)
    make = world.tcp if protocol == "tcp" else world.udp

    result = world.run("tc_ethernet", make(row.source, row.destination, row.port), device="nic", mark=0x1)

    assert result.skb is not None
    assert result.skb.mark == 0x1, "marks are other people's"
    assert not world.flows(), "conntrack's entries are netfilter's"
    if row.expect == "drop":
        assert result.retval == SHOT
    else:
        assert result.retval == GO_ON
    if row.expect == "reject":
        assert result.skb.priority == PRIORITY_REJECT
    if row.expect == "untouched":
        assert result.skb.priority == 0
        assert not world.reasons()
    if row.reason:
        assert world.reasons() == {row.reason: 1}
    if row.expect in ("remote", "local"):
        tag = PRIORITY_MASQUERADE if row.masquerade else PRIORITY_BACKEND
        assert result.skb.priority == tag | world.backend_ids[row.expect, 1]
