# SPDX-License-Identifier: Apache-2.0
"""Names of pods, stored compactly and found again."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.kube.decode import decode_document
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.see.filters import means
from pyebpf_proxy.services import pods
from pyebpf_proxy.services.planner import Planner, PlanSettings

NAMES = st.text(string.ascii_lowercase + string.digits + "-.", min_size=1, max_size=20)


@given(st.lists(st.one_of(st.just(""), NAMES, NAMES.map(lambda rest: f"web-7d9f8b6c5-{rest}")), max_size=12))
def test_packed_names_are_found_again(names: list[str]) -> None:
    assert list(pods.unpacked(pods.packed(names))) == (names if any(names) else [])


def test_names_of_a_replica_set_store_only_their_suffix() -> None:
    names = [f"checkout-frontend-7d9f8b6c5-{i:05d}" for i in range(100)]
    assert len(pods.packed(names)) < 7 * len(names)


def made_slice(namespace: str, name: str, *endpoints: dict[str, Any]) -> Change:
    document = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }
    (found,) = decode_document(document)
    assert found.key is not None, found.messages
    return Change("EndpointSlice", namespace, name, found.object)


def endpoint(address: str, kind: str = "Pod", name: str | None = None) -> dict[str, Any]:
    target = {} if name is None else {"targetRef": {"kind": kind, "name": name, "namespace": "any", "uid": "1"}}
    return {"addresses": [address], **target}


@pytest.fixture
def planner() -> Planner:
    found = Planner(PlanSettings(node_name="node1"))
    found.update(
        [
            # The middle one is invalid: the names must not shift.
            made_slice(
                "shop",
                "web-a",
                endpoint("10.0.0.1", name="web-1"),
                endpoint("127.0.0.1", name="bad"),
                endpoint("10.0.0.2"),
            ),
            made_slice("test", "web-b", endpoint("10.0.0.3", name="web-3"), endpoint("10.0.0.4", "Node", "node4")),
        ]
    )
    return found


def test_the_planner_finds_the_pod_of_an_address(planner: Planner) -> None:
    asked = [bytes((10, 0, 0, last)) for last in range(1, 6)]
    assert planner.pods(asked) == {asked[0]: "shop/web-1", asked[2]: "test/web-3"}


def test_a_tenant_does_not_rename_the_pods_of_others(planner: Planner) -> None:
    """Its slice names the address, too."""
    address = bytes((10, 0, 0, 1))
    planner.update([made_slice("tenant", "x", endpoint("10.0.0.1", name="web-7"))])
    planner.update([made_slice("shop", "web-c", endpoint("10.0.0.1", name="web-1"))])
    both = "shop/web-1 or tenant/web-7"
    assert planner.pods([address]) == {address: both}
    assert [means(name, both) for name in ("web-1", "tenant/web-7", "web", "shop/web-7")] == [True, True, False, False]
    planner.update([made_slice("tenant", f"y{i}", endpoint("10.0.0.1", name=f"z{i}")) for i in range(100)])
    assert planner.pods([address]) == {address: f"{both} or tenant/z0"}


def test_a_changed_name_is_known(planner: Planner) -> None:
    planner.update([made_slice("shop", "web-a", endpoint("10.0.0.1", name="web-9"))])
    assert planner.pods([bytes((10, 0, 0, 1))]) == {bytes((10, 0, 0, 1)): "shop/web-9"}
