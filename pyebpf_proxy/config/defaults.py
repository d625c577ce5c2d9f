# SPDX-License-Identifier: Apache-2.0
"""Defaults of KubeProxyConfiguration (spec/configuration §1.3, §2).

A default replaces Go's zero value, even an explicit one: ``minSyncPeriod: 0s`` becomes 1s. Only pointer fields
(``None`` when absent) keep an explicit zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pyebpf_proxy.config import addresses
from pyebpf_proxy.config.durations import HOUR, MINUTE, SECOND
from pyebpf_proxy.config.model import FlushFrequency, KubeProxyConfiguration, Logging, Section

HEALTHZ_PORT = 10256
METRICS_PORT = 10249

_SectionT = TypeVar("_SectionT", bound=Section)


def with_defaults(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """``config`` with every default filled in, by the rules for a file."""
    bind_address = config.bind_address or "0.0.0.0"
    ip = addresses.parse_ip(bind_address)
    # Any text that is not an IPv4 address gets the IPv6 defaults, even if it is no address at all.
    any_address, loopback = ("0.0.0.0", "127.0.0.1") if ip is not None and ip.version == 4 else ("::", "::1")
    return _fill(
        config,
        {
            "bind_address": bind_address,
            "healthz_bind_address": addresses.append_port(config.healthz_bind_address or any_address, HEALTHZ_PORT),
            "metrics_bind_address": addresses.append_port(config.metrics_bind_address or loopback, METRICS_PORT),
            "client_connection": _fill(
                config.client_connection,
                {},
                {"content_type": "application/vnd.kubernetes.protobuf", "qps": 5.0, "burst": 10},
            ),
            "logging": _logging(config.logging),
            "iptables": _fill(
                config.iptables,
                {},
                {"sync_period": 30 * SECOND, "min_sync_period": 1 * SECOND},
                {"masquerade_bit": 14, "localhost_node_ports": True},
            ),
            "ipvs": _fill(config.ipvs, {}, {"sync_period": 30 * SECOND}),
            "nftables": _fill(
                config.nftables,
                {},
                {"sync_period": 30 * SECOND, "min_sync_period": 1 * SECOND},
                {"masquerade_bit": 14},
            ),
            "conntrack": _fill(
                config.conntrack,
                {},
                {},
                {
                    "max_per_core": 32768,
                    "min": 131072,
                    "tcp_established_timeout": 24 * HOUR,
                    "tcp_close_wait_timeout": 1 * HOUR,
                },
            ),
        },
        {"config_sync_period": 15 * MINUTE},
        {"oom_score_adj": -999},
    )


def _logging(section: Logging) -> Logging:
    values: dict[str, Any] = {
        "options": section.options.model_copy(
            update={
                "text": _fill(section.options.text, {}, {"info_buffer_size": "0"}),
                "json_": _fill(section.options.json_, {}, {"info_buffer_size": "0"}),
            }
        )
    }
    if section.flush_frequency.nanoseconds == 0:
        values["flush_frequency"] = FlushFrequency(5 * SECOND)
    return _fill(section, values, {"format": "text"})


def with_platform_defaults(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Defaults of the platform and the mode; applied before validation (spec/configuration §5.1)."""
    mode = config.mode or "iptables"
    update: dict[str, Any] = {"mode": mode, "detect_local_mode": config.detect_local_mode or "ClusterCIDR"}
    if mode == "nftables" and not config.node_port_addresses:
        update["node_port_addresses"] = ["primary"]
    return config.model_copy(update=update)


def with_effective_values(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Keep some values only in the section of the active mode, and set the others to zero (spec/configuration §3).

    These are ``syncPeriod``, ``minSyncPeriod`` and ``masqueradeAll``; mode ipvs uses ``masqueradeAll`` of ``iptables``.
    kube-proxy stores each of them only once.
    """
    zero = {"sync_period": 0, "min_sync_period": 0}
    mode = config.mode if config.mode in ("ipvs", "nftables") else "iptables"
    iptables, nftables = ({} if mode == name else dict(zero) for name in ("iptables", "nftables"))
    (iptables if mode == "nftables" else nftables)["masquerade_all"] = False
    return config.model_copy(
        update={
            "iptables": config.iptables.model_copy(update=iptables),
            "ipvs": config.ipvs.model_copy(update={} if mode == "ipvs" else zero),
            "nftables": config.nftables.model_copy(update=nftables),
            "port_range": "",
        }
    )


def _fill(
    section: _SectionT,
    values: Mapping[str, Any],
    if_zero: Mapping[str, Any] | None = None,
    if_absent: Mapping[str, Any] | None = None,
) -> _SectionT:
    update = dict(values)
    update.update({name: value for name, value in (if_zero or {}).items() if not getattr(section, name)})
    update.update({name: value for name, value in (if_absent or {}).items() if getattr(section, name) is None})
    return section.model_copy(update=update)
