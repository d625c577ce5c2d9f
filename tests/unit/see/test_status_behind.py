# SPDX-License-Identifier: Apache-2.0
"""``status``: for how long an agent may have been behind its source, from its metrics."""

from __future__ import annotations

import pytest

from pyebpf_proxy.see.status import behind

SYNCED = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
QUEUED = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
HEARD = "pyebpf_proxy_api_last_event_timestamp_seconds"
CONNECTED = "pyebpf_proxy_api_connected"
NOW = 1000.0
QUIET = {SYNCED: [900.0, 901.0], QUEUED: [899.0, 899.0], HEARD: [940.0, 950.0, 999.0], CONNECTED: [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({}, 0.0),
        ({HEARD: [], CONNECTED: []}, 0.0),  # manifests
        ({QUEUED: [990.0, 990.0]}, 10.0),
        ({SYNCED: [980.0, 999.0], QUEUED: [990.0, 990.0]}, 10.0),  # one family is synced, the other waits
        ({CONNECTED: [1.0, 0.0, 1.0]}, 60.0),
        ({CONNECTED: [0.0, 0.0, 0.0], HEARD: [700.0, 710.0, 720.0], QUEUED: [990.0, 990.0]}, 300.0),
        ({SYNCED: [0.0, 0.0]}, None),  # no sync yet
        ({SYNCED: []}, None),
        ({QUEUED: []}, None),
    ],
)
def test_behind(changed: dict[str, list[float]], seconds: float | None) -> None:
    assert behind(QUIET | changed, NOW) == seconds
