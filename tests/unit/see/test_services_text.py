# SPDX-License-Identifier: Apache-2.0
"""``services NAME`` as text."""

from __future__ import annotations

import pytest

from pyebpf_proxy.see import model
from pyebpf_proxy.see.services_text import services_text
from pyebpf_proxy.see.text import Terminal

FRONTEND = model.FrontendView(
    address="10.96.0.10", port=80, protocol="TCP", kind="ClusterIP", service="default/web:http"
)


@pytest.mark.parametrize(
    ("any_endpoints", "words"),
    [(False, "no endpoints: refused (port unreachable)"), (True, "no endpoints here, but on other nodes: dropped")],
)
def test_without_endpoints_in_the_maps(any_endpoints: bool, words: str) -> None:
    """With traffic policy Local, endpoints of other nodes are not in the maps."""
    view = model.ServiceView(
        name="default/web:http",
        namespace="default",
        service="web",
        port="http",
        protocol="TCP",
        family=4,
        id=1,
        config=1,
        frontends=[FRONTEND],
        endpoints=[],
        any_endpoints=any_endpoints,
        internal_traffic_policy="Local",
        external_traffic_policy="Cluster",
        affinity_seconds=0,
        source_ranges=[],
    )
    lines = services_text(model.Services(services=[view]), Terminal(120, False), details=True)
    assert lines[-1].strip() == words
