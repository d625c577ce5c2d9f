# SPDX-License-Identifier: Apache-2.0
"""Which cluster IPs are known, after any sequence of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.datapath.netfilter.cluster_addresses import ClusterAddresses
from pyebpf_proxy.datapath.netfilter.nft_rules import port_key
from pyebpf_proxy.services.model import Frontend, FrontendKind, IPFamily, Protocol, ServicePort, ServicePortName

NOTHING: tuple[set[bytes], ...] = (set(), set(), set(), set())
A, B = bytes([10, 96, 0, 1]), bytes([10, 96, 0, 2])


def name(number: int) -> ServicePortName:
    return ServicePortName("ns", f"svc{number}", "", Protocol.TCP, IPFamily.IPV4)


def port(number: int, address: bytes | None) -> ServicePort:
    node_port = Frontend(FrontendKind.NODE_PORT, bytes(4), 30000 + number)
    cluster_ip = (Frontend(FrontendKind.CLUSTER_IP, address, 80),) if address else ()
    return ServicePort(name(number), (node_port, *cluster_ip))


def test_an_address_is_known_as_long_as_one_port_has_it() -> None:
    known = ClusterAddresses()
    both, one = port_key(A, Protocol.TCP, 80), port_key(B, Protocol.TCP, 80)
    assert known.apply({name(1): port(1, A), name(2): port(2, A)}) == ({A}, set(), {both}, set())
    assert known.apply({name(1): None}) == NOTHING
    assert known.apply({name(2): port(2, B)}) == ({B}, {A}, {one}, {both})
    assert (known.all, known.ports) == ({B}, {one})


def test_ports_are_distinguished_by_number_and_protocol() -> None:
    known = ClusterAddresses()
    udp = ServicePortName("ns", "svc1", "", Protocol.UDP, IPFamily.IPV4)
    known.apply({name(1): port(1, A)})
    other = ServicePort(name(2), (Frontend(FrontendKind.CLUSTER_IP, A, 81),))
    datagrams = ServicePort(udp, (Frontend(FrontendKind.CLUSTER_IP, A, 80),))
    new = {port_key(A, Protocol.TCP, 81), port_key(A, Protocol.UDP, 80)}
    assert known.apply({name(2): other, udp: datagrams}) == (set(), set(), new, set())


def test_an_address_that_moves_between_ports_stays() -> None:
    known = ClusterAddresses()
    known.apply({name(1): port(1, A)})
    assert known.apply({name(1): None, name(2): port(2, A)}) == NOTHING
    assert known.apply({name(3): port(3, A), name(2): None}) == NOTHING


def test_a_port_without_a_cluster_ip_changes_nothing() -> None:
    known = ClusterAddresses()
    assert known.apply({name(1): port(1, None), name(9): None}) == NOTHING


def test_a_complete_change_removes_all_others() -> None:
    known = ClusterAddresses()
    known.apply({name(1): port(1, A), name(2): port(2, B)})
    gone = port_key(A, Protocol.TCP, 80)
    assert known.apply({name(2): port(2, B)}, complete=True) == (set(), {A}, set(), {gone})


@given(st.lists(st.dictionaries(st.integers(0, 4), st.sampled_from([None, b"", A, B]), max_size=4)))
def test_the_result_equals_a_new_count(steps: list[dict[int, bytes | None]]) -> None:
    known = ClusterAddresses()
    wanted: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for step in steps:
        added, removed, ports_added, ports_removed = known.apply(
            {name(n): None if address is None else port(n, address) for n, address in step.items()}
        )
        for number, address in step.items():
            wanted.pop(number, None)
            if address:
                wanted[number] = address
        assert not added & seen
        assert removed <= seen
        seen = (seen | added) - removed
        assert seen == known.all == set(wanted.values())
        assert known.ports == {port_key(address, Protocol.TCP, 80) for address in seen}
        assert (len(ports_added), len(ports_removed)) == (len(added), len(removed))
