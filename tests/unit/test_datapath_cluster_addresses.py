# SPDX-License-Identifier: Apache-2.0
"""Which cluster IPs are known, after any sequence of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.datapath.netfilter.cluster_addresses import ClusterAddresses
from pyebpf_proxy.services.model import Family, Frontend, FrontendKind, Protocol, ServicePort, ServicePortName

A, B = bytes([10, 96, 0, 1]), bytes([10, 96, 0, 2])


def name(number: int) -> ServicePortName:
    return ServicePortName("ns", f"svc{number}", "", Protocol.TCP, Family.IPV4)


def port(number: int, address: bytes | None) -> ServicePort:
    node_port = Frontend(FrontendKind.NODE_PORT, bytes(4), 30000 + number)
    cluster_ip = (Frontend(FrontendKind.CLUSTER_IP, address, 80),) if address else ()
    return ServicePort(name(number), (node_port, *cluster_ip))


def test_an_address_is_known_as_long_as_one_port_has_it() -> None:
    known = ClusterAddresses()
    assert known.apply({name(1): port(1, A), name(2): port(2, A)}) == ({A}, set())
    assert known.apply({name(1): None}) == (set(), set())
    assert known.apply({name(2): port(2, B)}) == ({B}, {A})
    assert known.all == {B}


def test_an_address_that_moves_between_ports_stays() -> None:
    known = ClusterAddresses()
    known.apply({name(1): port(1, A)})
    assert known.apply({name(1): None, name(2): port(2, A)}) == (set(), set())
    assert known.apply({name(3): port(3, A), name(2): None}) == (set(), set())


def test_what_has_no_cluster_ip_changes_nothing() -> None:
    known = ClusterAddresses()
    assert known.apply({name(1): port(1, None), name(9): None}) == (set(), set())


@given(st.lists(st.dictionaries(st.integers(0, 4), st.sampled_from([None, b"", A, B]), max_size=4)))
def test_it_agrees_with_counting_anew(steps: list[dict[int, bytes | None]]) -> None:
    known = ClusterAddresses()
    wanted: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for step in steps:
        added, removed = known.apply(
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
