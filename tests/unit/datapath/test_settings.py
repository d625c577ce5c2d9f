# SPDX-License-Identifier: Apache-2.0
"""Settings of the programs: ranges of source ports, which do not overlap with the kernel's; order of loads; XDP;
NodePorts on loopback; devices of pods.
"""

from __future__ import annotations

import platform
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.common.bpf_constants import NOT_ON_LOOPBACK, ON_ALL_LOOPBACK, ON_OTHER_LOOPBACK
from pyebpf_proxy.config.datapath_model import DatapathConfiguration
from pyebpf_proxy.config.defaults import with_defaults, with_platform_defaults
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.config.flags import parse
from pyebpf_proxy.config.model import DetectLocal, KubeProxyConfiguration
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.datapath.node.plan import ARPHRD_ETHER, Link, State, plan
from pyebpf_proxy.datapath.settings import (
    host_traffic,
    kernel_settings,
    local_ports,
    node_config,
    settings,
    snat_ports,
    with_fast_path_support,
)
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.node_facts import NodeFacts


def test_the_kernels_default_range_is_shared_equally() -> None:
    ports = snat_ports((32768, 60999))
    assert ports is not None
    assert (ports.fast, ports.netfilter) == (range(1024, 32768), range(32768, 65536))


def test_with_low_ephemeral_ports_the_programs_range_ends_below() -> None:
    ports = snat_ports((10000, 65535))
    assert ports is not None
    assert (ports.fast, ports.netfilter) == (range(1024, 10000), range(10000, 65536))
    assert snat_ports((50000, 60000)) == snat_ports((32768, 60999)), "a higher range gives the programs no more ports"


def test_with_too_few_ports_the_programs_get_none() -> None:
    least = snat_ports((1024 + 4096, 65535))
    assert least is not None
    assert len(least.fast) == 4096
    assert snat_ports((1024 + 4095, 65535)) is None
    assert snat_ports((1, 65535)) is None


@given(st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(sorted))
def test_the_port_ranges_do_not_overlap(bounds: list[int]) -> None:
    ports = snat_ports((bounds[0], bounds[1]))
    if ports is None:
        return
    sockets = range(bounds[0], bounds[1] + 1)
    assert max(ports.fast) < min(ports.netfilter)
    assert max(ports.fast) < min(sockets)
    assert len(ports.fast) >= 4096
    assert max(ports.netfilter) == 65535


def test_the_table_supports_the_fast_path_only_if_it_is_on() -> None:
    made = with_fast_path_support(Behaviour(0x4000, drop_invalid=True), True)
    ports = snat_ports(local_ports())
    assert made.prove_new
    assert made.conntrack_ports == (None if ports is None else (ports.netfilter[0], 65535))
    assert with_fast_path_support(made, False) == Behaviour(0x4000, drop_invalid=True)


def test_this_machine_has_a_port_range() -> None:
    first, last = local_ports()
    assert 1 <= first <= last <= 65535


@pytest.mark.parametrize(("machine", "weak"), [("x86_64", False), ("aarch64", True)])
def test_the_programs_know_whether_loads_are_reordered(
    monkeypatch: pytest.MonkeyPatch, machine: str, weak: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    config = with_platform_defaults(with_defaults(KubeProxyConfiguration()))
    found = settings(effective(config, parse([])), NodeFacts())
    assert found.weak_memory == weak


@pytest.mark.parametrize(("devices", "generic"), [([], False), (["eth0"], True)])
def test_the_mode_of_xdp_counts_only_with_devices(devices: list[str], generic: bool) -> None:
    """Without devices the programs have no map of them, which they would use in this mode."""
    config = with_platform_defaults(with_defaults(KubeProxyConfiguration()))
    own = DatapathConfiguration(xdp_devices=devices, xdp_mode="generic")
    found = settings(effective(config, parse([]), own), NodeFacts())
    assert (found.xdp, found.xdp_generic) == (bool(devices), generic)


@pytest.mark.parametrize(
    ("mode", "socket_lb", "sockets", "table"),
    [
        ("iptables", "node", ON_ALL_LOOPBACK, ON_ALL_LOOPBACK),
        ("iptables", "off", ON_ALL_LOOPBACK, ON_ALL_LOOPBACK),
        ("ipvs", "node", ON_ALL_LOOPBACK, ON_OTHER_LOOPBACK),
        ("ipvs", "off", ON_OTHER_LOOPBACK, ON_OTHER_LOOPBACK),
        ("nftables", "off", NOT_ON_LOOPBACK, NOT_ON_LOOPBACK),
    ],
)
def test_nftables_serves_loopback_only_with_route_localnet(
    mode: str, socket_lb: Literal["node", "off"], sockets: int, table: int
) -> None:
    config = with_platform_defaults(with_defaults(KubeProxyConfiguration(mode=mode)))
    found = effective(config, parse([]), DatapathConfiguration(socket_lb=socket_lb))
    assert settings(found, NodeFacts()).localhost_node_ports == sockets
    assert host_traffic(found, NodeFacts()).localhost_node_ports == table


@pytest.mark.parametrize(
    ("names", "ips", "expected"),
    [
        (["primary"], {IPFamily.IPV4: bytes([192, 0, 2, 1])}, NOT_ON_LOOPBACK),
        (["primary"], {IPFamily.IPV6: bytes(15) + b"\2"}, ON_ALL_LOOPBACK),
        (["primary"], {}, ON_ALL_LOOPBACK),
        (["primary"], {IPFamily.IPV4: bytes([127, 0, 0, 1])}, ON_ALL_LOOPBACK),
        (["::/0"], {IPFamily.IPV4: bytes([192, 0, 2, 1])}, ON_ALL_LOOPBACK),
    ],
    ids=["an address", "only IPv6", "no address", "a loopback address", "another list"],
)
def test_primary_on_a_node_without_an_ipv4_address_serves_loopback(
    names: list[str], ips: dict[IPFamily, bytes], expected: int
) -> None:
    """As in kube-proxy, whose list is then empty: every address serves NodePorts."""
    facts = NodeFacts(ips)
    for mode in ("iptables", "ipvs", "nftables"):
        config = with_platform_defaults(with_defaults(KubeProxyConfiguration(mode=mode, node_port_addresses=names)))
        found = effective(config, parse([]))
        assert settings(found, facts).localhost_node_ports == (NOT_ON_LOOPBACK if mode == "nftables" else expected)
        assert kernel_settings(found, facts).route_localnet == (mode == "iptables" and bool(expected))
        if mode == "iptables":
            assert host_traffic(found, facts).localhost_node_ports == expected


@pytest.mark.parametrize(
    ("mode", "name", "devices"),
    [
        ("iptables", "pod1", {"pod1"}),
        ("iptables", "pod", set()),
        ("iptables", "pod+", {"pod1", "pod+1", "pod*1"}),
        ("ipvs", "pod+", {"pod1", "pod+1", "pod*1"}),
        ("iptables", "pod++", {"pod+1"}),
        ("iptables", "+", {"pod1", "pod+1", "pod*1", "eth0"}),
        ("iptables", "pod*", set()),
        ("nftables", "pod*", {"pod1", "pod+1", "pod*1"}),
        ("nftables", "pod**", {"pod*1"}),
        ("nftables", "*", {"pod1", "pod+1", "pod*1", "eth0"}),
        ("nftables", "pod+", set()),
    ],
)
def test_the_bridge_interface_may_end_with_the_wildcard_of_the_mode(mode: str, name: str, devices: set[str]) -> None:
    """kube-proxy copies the text into its rules, where iptables and nftables have different wildcards."""
    assert pods_devices(mode, "BridgeInterface", DetectLocal(bridge_interface=name)) == devices


@pytest.mark.parametrize(("mode", "prefix"), [("iptables", "pod+"), ("nftables", "pod*")])
def test_an_interface_name_prefix_has_no_wildcard(mode: str, prefix: str) -> None:
    section = DetectLocal(interface_name_prefix=prefix, bridge_interface="eth+")
    assert pods_devices(mode, "InterfaceNamePrefix", section) == {f"{prefix}1"}


def test_other_modes_ignore_the_names_of_devices() -> None:
    section = DetectLocal(interface_name_prefix="pod", bridge_interface="pod+")
    assert pods_devices("iptables", "ClusterCIDR", section) == set()


def pods_devices(mode: str, detect_local_mode: str, section: DetectLocal) -> set[str]:
    config = KubeProxyConfiguration(mode=mode, detect_local_mode=detect_local_mode, detect_local=section)
    found = effective(with_platform_defaults(with_defaults(config)), parse([]))
    links = {index: Link(index, name, ARPHRD_ETHER) for index, name in enumerate(("pod1", "pod+1", "pod*1", "eth0"), 2)}
    devices = plan(State(links), node_config(found, NodeFacts())).devices
    return {links[index].name for index, device in devices.items() if device.pod_source}


def test_the_seeds_of_permits_differ_at_each_start() -> None:
    """A tenant who knew them could choose an address whose flows give permits for a frontend of another."""
    config = with_platform_defaults(with_defaults(KubeProxyConfiguration()))
    found = [settings(effective(config, parse([])), NodeFacts()) for _ in range(2)]
    seeds = [seed for each in found for seed in (each.permit_seed, each.permit_seed6)]
    assert len(set(seeds)) == 4
    assert all(seed & 1 and seed >> 32 for seed in seeds)
