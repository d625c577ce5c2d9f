# SPDX-License-Identifier: Apache-2.0
"""ServiceCIDRs: ranges where nftables mode drops packets to addresses of no Service (spec/service-semantics §9)."""

from __future__ import annotations

from ipaddress import ip_network

import msgspec
import pytest

from pyebpf_proxy.kube.objects import ServiceCIDR
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.planner import Planner, PlanSettings


def cidrs(name: str, *ranges: str) -> Change:
    return Change("ServiceCIDR", "", name, msgspec.convert({"spec": {"cidrs": ranges}}, ServiceCIDR))


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(node_name="node-1"))


def test_the_ranges_of_all_objects_count(planner: Planner) -> None:
    assert planner.facts.service_cidrs == frozenset()
    planner.update([cidrs("kubernetes", "10.96.0.0/16", "fd00:96::/112"), cidrs("more", "10.97.0.0/24")])
    assert planner.facts.service_cidrs == {
        ip_network("10.96.0.0/16"),
        ip_network("fd00:96::/112"),
        ip_network("10.97.0.0/24"),
    }


def test_a_changed_or_deleted_object_removes_its_ranges(planner: Planner) -> None:
    planner.update([cidrs("kubernetes", "10.96.0.0/16"), cidrs("more", "10.97.0.0/24")])
    planner.update([cidrs("more", "10.98.0.0/24")])
    assert planner.facts.service_cidrs == {ip_network("10.96.0.0/16"), ip_network("10.98.0.0/24")}
    planner.update([Change("ServiceCIDR", "", "more", None)])
    assert planner.facts.service_cidrs == {ip_network("10.96.0.0/16")}


def test_an_invalid_range_affects_no_other(planner: Planner) -> None:
    planner.update([cidrs("kubernetes", "10.96.0.0/16", "nonsense", "10.96.0.0/99")])
    assert planner.facts.service_cidrs == {ip_network("10.96.0.0/16")}


def test_the_same_again_is_no_change(planner: Planner) -> None:
    planner.update([cidrs("kubernetes", "10.96.0.0/16")])
    before = planner.facts.service_cidrs
    assert planner.update([cidrs("kubernetes", "10.96.0.0/16")]) == {}
    assert planner.facts.service_cidrs is before
