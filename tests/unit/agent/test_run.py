# SPDX-License-Identifier: Apache-2.0
"""What the agent sets for its own process, and the Events about its start."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from pyebpf_proxy.agent.run import OPEN_FILES, allow_open_files, record_start
from pyebpf_proxy.config.defaults import with_defaults, with_platform_defaults
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.config.flags import parse
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.kube.events import EventType, ObjectReference


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_is_raised(limit: tuple[int, int]) -> None:
    """Tenants' health check node ports must not use up the 1024 descriptors that a process often has."""
    _, hard = limit
    wanted = min(OPEN_FILES, hard) if hard != resource.RLIM_INFINITY else OPEN_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    if hard > OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES + 1, hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OPEN_FILES + 1, hard)


class Events:
    """Keeps Events."""

    def __init__(self) -> None:
        self.found: list[tuple[ObjectReference, EventType, str, str, str]] = []

    def event(self, about: ObjectReference, event_type: EventType, reason: str, action: str, note: str) -> None:
        self.found.append((about, event_type, reason, action, note))


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
def test_the_events_of_a_start(mode: str) -> None:
    """kube-proxy's reasons and actions. Only mode ipvs is deprecated."""
    config = with_platform_defaults(with_defaults(KubeProxyConfiguration(mode=mode, hostname_override="node1")))
    events = Events()
    record_start(effective(config, parse([])), events)
    node = ObjectReference("Node", "", "node1")
    *before, last = events.found
    assert last == (node, "Normal", "Starting", "StartKubeProxy", "")
    assert [event[:4] for event in before] == [(node, "Warning", "IPVSDeprecation", "StartKubeProxy")] * (
        mode == "ipvs"
    )
    assert all("deprecated" in note and "nftables" in note for *_, note in before)
