# SPDX-License-Identifier: Apache-2.0
"""The addresses of the servers, as sockets take them."""

from __future__ import annotations

import pytest

from pyebpf_proxy.config.defaults import with_defaults, with_platform_defaults
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.config.flags import parse
from pyebpf_proxy.config.model import KubeProxyConfiguration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.000.0.01:1", ("127.0.0.1", 1)),
        ("[::ffff:127.0.0.1]:1", ("127.0.0.1", 1)),
        ("[fd00:0:0::01]:1", ("fd00::1", 1)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::]:1", ("::", 1)),
        # Python's int() takes 4300 digits.
        ("0.0.0.0:" + 5000 * "0" + "1", ("0.0.0.0", 1)),
    ],
)
def test_addresses_that_kube_proxy_accepts_can_be_bound(text: str, expected: tuple[str, int]) -> None:
    config = KubeProxyConfiguration(healthz_bind_address=text, metrics_bind_address=text)
    found = effective(with_platform_defaults(with_defaults(config)), parse([]))
    assert found.healthz_address == found.metrics_address == expected


@pytest.mark.parametrize(
    ("text", "port"),
    [("0.0.0.0:10256", 10256), ("192.0.2.1:10257", 10257), ("127.0.0.1:10256", 0), ("[::1]:10256", 0)],
)
def test_the_health_port_is_known_if_other_hosts_can_reach_it(text: str, port: int) -> None:
    config = KubeProxyConfiguration(healthz_bind_address=text)
    assert effective(with_platform_defaults(with_defaults(config)), parse([])).health_port == port
