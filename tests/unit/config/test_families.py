# SPDX-License-Identifier: Apache-2.0
"""Warnings about a configuration that does not fit the Node, and which mismatches are fatal (spec/configuration
§5.4).
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from pyebpf_proxy.agent import node_checks
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config.families import FamilyValues, node_port_cidrs, node_ports, wrong_families
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.node_facts import NodeFacts
from tests.support.logs import Log, Message

UNSET = (
    "nodePortAddresses is unset; NodePort connections will be accepted on all local IPs."
    " Consider using `--nodeport-addresses primary`"
)
DUAL = (
    "cluster appears to be dual-stack but nodePortAddresses contains only {} addresses;"
    " NodePort connections will be accepted on all local {} IPs"
)
OTHER = (
    "cluster appears to be {0}-primary but nodePortAddresses contains only {1} addresses;"
    " NodePort connections will be accepted on all local {0} IPs"
)


def ips(*texts: str) -> dict[IPFamily, bytes]:
    found = [ip_address(text) for text in texts]
    return {IPFamily(ip.version): ip.packed for ip in found}


V4, V6 = ips("192.0.2.1"), ips("2001:db8::1")
BOTH, SIX_FIRST = ips("192.0.2.1", "2001:db8::1"), ips("2001:db8::1", "192.0.2.1")


@pytest.mark.parametrize(
    ("words", "node_ips", "expected"),
    [
        ((), BOTH, []),
        (("primary",), BOTH, ["192.0.2.1/32", "2001:db8::1/128"]),
        (("primary",), SIX_FIRST, ["192.0.2.1/32", "2001:db8::1/128"]),
        (("primary",), V6, ["2001:db8::1/128"]),
        (("primary",), {}, []),
        (("primary",), ips("127.0.0.1", "2001:db8::1"), ["2001:db8::1/128"]),
        (("primary",), ips("127.0.0.1", "::1"), []),
        (("10.0.0.0/8", "fd00::/8"), V4, ["10.0.0.0/8", "fd00::/8"]),
    ],
)
def test_the_value_primary(words: tuple[str, ...], node_ips: dict[IPFamily, bytes], expected: list[str]) -> None:
    assert node_port_cidrs(words, node_ips) == expected


@pytest.mark.parametrize(
    ("values", "node_ips", "pods", "expected"),
    [
        (FamilyValues(), V4, [], UNSET),
        (FamilyValues(node_port_addresses=("primary",)), {}, [], UNSET),
        (FamilyValues(node_port_addresses=("primary",)), V4, [], ""),
        (FamilyValues(node_port_addresses=("primary",)), BOTH, ["10.0.0.0/24", "fd00::/64"], ""),
        (FamilyValues(node_port_addresses=("10.0.0.0/8",)), V4, [], ""),
        (
            FamilyValues(node_port_addresses=("10.0.0.0/8",)),
            V4,
            ["10.0.0.0/24", "fd00::/64"],
            DUAL.format("IPv4", "IPv6"),
        ),
        (
            FamilyValues(node_port_addresses=("10.0.0.0/8",), cluster_cidrs=("fd00::/48", "10.0.0.0/8")),
            V4,
            [],
            DUAL.format("IPv4", "IPv6"),
        ),
        (
            FamilyValues(node_port_addresses=("fd00::/8",), exclude_cidrs=("10.0.0.0/8", "fd01::/64")),
            SIX_FIRST,
            [],
            DUAL.format("IPv6", "IPv4"),
        ),
        (
            FamilyValues(node_port_addresses=("primary",), cluster_cidrs=("10.0.0.0/8", "fd00::/48")),
            V4,
            [],
            DUAL.format("IPv4", "IPv6"),
        ),
        (FamilyValues(node_port_addresses=("fd00::/8",)), V4, [], OTHER.format("IPv4", "IPv6")),
        (FamilyValues(node_port_addresses=("10.0.0.0/8",)), V6, [], OTHER.format("IPv6", "IPv4")),
        (FamilyValues(node_port_addresses=("fd00::/8",)), {}, [], OTHER.format("IPv4", "IPv6")),
        (FamilyValues(node_port_addresses=("10.0.0.0/8", "fd00::/8")), V4, ["10.0.0.0/24", "fd00::/64"], ""),
    ],
)
def test_where_node_ports_are_open(
    values: FamilyValues, node_ips: dict[IPFamily, bytes], pods: list[str], expected: str
) -> None:
    finding = node_ports(values, node_ips, [ip_network(text) for text in pods])
    assert ", ".join(finding.texts) == expected
    assert not finding.fatal


def only(cluster: str, field: str, family: str) -> str:
    return f"cluster is {cluster} but {field} contains only {family} addresses"


def of(cluster: str, field: str, family: str) -> str:
    return f"cluster is {cluster} but {field} is {family}"


CLUSTER4, CLUSTER6 = ("10.0.0.0/8",), ("fd00::/48",)


@pytest.mark.parametrize(
    ("values", "primary", "dual", "pods", "expected", "fatal"),
    [
        (FamilyValues(cluster_cidrs=CLUSTER4), 4, True, [], "", False),
        (FamilyValues(cluster_cidrs=()), 6, False, [], "", False),
        (FamilyValues(cluster_cidrs=("",)), 6, False, [], "", False),
        (FamilyValues(cluster_cidrs=CLUSTER6), 4, True, [], only("IPv4-primary", "clusterCIDRs", "IPv6"), False),
        (FamilyValues(cluster_cidrs=CLUSTER4), 6, True, [], only("IPv6-primary", "clusterCIDRs", "IPv4"), False),
        (FamilyValues(cluster_cidrs=CLUSTER6), 4, False, [], only("IPv4-only", "clusterCIDRs", "IPv6"), True),
        (FamilyValues(cluster_cidrs=CLUSTER6 + CLUSTER4), 4, False, [], "", False),
        (
            FamilyValues(cluster_cidrs=CLUSTER6, detect_local_mode="BridgeInterface"),
            4,
            False,
            [],
            only("IPv4-only", "clusterCIDRs", "IPv6"),
            False,
        ),
        (
            FamilyValues(detect_local_mode="NodeCIDR"),
            4,
            True,
            ["fd00::/64"],
            only("IPv4-primary", "node.spec.podCIDRs", "IPv6"),
            True,
        ),
        (FamilyValues(), 6, True, ["10.0.0.0/24"], only("IPv6-primary", "node.spec.podCIDRs", "IPv4"), False),
        (FamilyValues(detect_local_mode="NodeCIDR"), 4, True, ["10.0.0.0/24", "fd00::/64"], "", False),
        (FamilyValues(source_vip="fd00::5"), 4, True, [], of("IPv4-primary", "winkernel.sourceVip", "IPv6"), False),
        (FamilyValues(exclude_cidrs=CLUSTER6), 4, True, [], "", False),
        (FamilyValues(exclude_cidrs=CLUSTER6), 4, False, [], only("IPv4-only", "ipvs.excludeCIDRs", "IPv6"), False),
        (FamilyValues(healthz_address="[fd00::1]:1"), 4, True, [], "", False),
        (
            FamilyValues(healthz_address="[fd00::1]:1"),
            4,
            False,
            [],
            of("IPv4-only", "healthzBindAddress", "IPv6"),
            False,
        ),
        (FamilyValues(healthz_address="[::]:1"), 4, False, [], "", False),
        (FamilyValues(healthz_address=""), 4, False, [], "", False),
        (
            FamilyValues(metrics_address="127.0.0.1:1"),
            6,
            False,
            [],
            of("IPv6-only", "metricsBindAddress", "IPv4"),
            False,
        ),
        (
            FamilyValues(healthz_address="[::1]:1", metrics_address="[::1]:2"),
            4,
            False,
            [],
            f"[{of('IPv4-only', 'healthzBindAddress', 'IPv6')}, {of('IPv4-only', 'metricsBindAddress', 'IPv6')}]",
            False,
        ),
    ],
)
def test_the_other_family_only(
    values: FamilyValues, primary: int, dual: bool, pods: list[str], expected: str, fatal: bool
) -> None:
    cidrs = [ip_network(text) for text in pods]
    finding = wrong_families(values, IPFamily(primary), dual_stack=dual, pod_cidrs=cidrs)
    assert (str(finding) if finding.texts else "") == expected
    assert finding.fatal == fatal


def kernel(folder: Path, ipv6: str) -> Path:
    """A /proc where IPv6 is ``there``, ``off`` or ``missing``."""
    if ipv6 != "missing":
        (folder / "net").mkdir()
        (folder / "net/if_inet6").touch()
        (folder / "sys/net/ipv6/conf/all").mkdir(parents=True)
        (folder / "sys/net/ipv6/conf/all/disable_ipv6").write_text("1\n" if ipv6 == "off" else "0\n")
    return folder


@pytest.mark.parametrize("ipv6", ["there", "off", "missing"])
def test_the_kernel_decides_whether_there_are_both_families(tmp_path: Path, ipv6: str) -> None:
    assert node_checks.has_ipv6(kernel(tmp_path, ipv6)) == (ipv6 == "there")


def test_a_single_stack_node_with_pods_of_the_other_family_does_not_start(tmp_path: Path) -> None:
    values = FamilyValues(cluster_cidrs=CLUSTER6, metrics_address="[::1]:1")
    with pytest.raises(FatalError) as error:
        node_checks.check(values, NodeFacts(node_ips=V4), kernel(tmp_path, "off"))
    assert str(error.value) == (
        "kube-proxy configuration is incorrect: [cluster is IPv4-only but clusterCIDRs contains only IPv6 addresses,"
        " cluster is IPv4-only but metricsBindAddress is IPv6]"
    )


def test_a_primary_family_that_the_kernel_lacks(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match=r'^no support for primary IP family "IPv6"$'):
        node_checks.check(FamilyValues(), NodeFacts(node_ips=V6), kernel(tmp_path, "missing"))


def test_warnings_are_logged_and_do_not_end_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = NodeFacts(node_ips=V4, node_cidrs={IPFamily.IPV6: ip_network("fd00::/64")})
    node_checks.check(FamilyValues(), facts, kernel(tmp_path, "there"))
    output = [UNSET, "cluster is IPv4-primary but node.spec.podCIDRs contains only IPv6 addresses"]
    assert [line.text for line in Log(caplog).lines(level="warning")] == [
        f"{Message.CONFIGURATION_INCOMPLETE} error={error}" for error in output
    ]
