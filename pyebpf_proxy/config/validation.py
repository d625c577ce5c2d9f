# SPDX-License-Identifier: Apache-2.0
"""Validation of a completed KubeProxyConfiguration: kube-proxy's rules, paths and words (spec/configuration §2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pyebpf_proxy import KUBERNETES_VERSION
from pyebpf_proxy.config import addresses, durations
from pyebpf_proxy.config.model import KubeProxyConfiguration

ROOT = "KubeProxyConfiguration"
MODES = ("iptables", "ipvs", "nftables")
DETECT_LOCAL_MODES = ("BridgeInterface", "ClusterCIDR", "InterfaceNamePrefix", "NodeCIDR", "")

_NOT_NEGATIVE = "must be greater than or equal to 0"
_POSITIVE = "must be greater than 0"


def validate(config: KubeProxyConfiguration) -> list[str]:
    """Every error of ``config``, each ``path: kind: value: message``; empty when it is good."""
    return [f"{ROOT}.{error}" for check in _CHECKS for error in check(config)]


def in_one_line(errors: list[str]) -> str:
    """Several errors as kube-proxy prints them."""
    return errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]"


def _invalid(path: str, value: object, message: str) -> str:
    return f"{path}: Invalid value: {_shown(value)}: {message}"


def _invalid_duration(path: str, nanoseconds: int, message: str) -> str:
    return f"{path}: Invalid value: {durations.format(nanoseconds)}: {message}"


def _unsupported(path: str, value: str, supported: tuple[str, ...]) -> str:
    return f"{path}: Unsupported value: {_shown(value)}: supported values: {', '.join(map(_shown, supported))}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _modes(config: KubeProxyConfiguration) -> Iterator[str]:
    if config.mode not in MODES:
        yield _invalid(
            "Mode.ProxyMode",
            config.mode,
            "must be iptables, ipvs, nftables or blank (blank means the best-available proxy [currently iptables])",
        )


def _masquerade_bits(config: KubeProxyConfiguration) -> Iterator[str]:
    bits = [("KubeProxyIPTablesConfiguration", config.iptables.masquerade_bit)]
    if config.mode == "nftables":
        bits.append(("KubeProxyNFTablesConfiguration", config.nftables.masquerade_bit))
    for section, bit in bits:
        if bit is not None and not 0 <= bit <= 31:
            yield _invalid(f"{section}.MasqueradeBit", bit, "must be within the range [0, 31]")


def _ipvs(config: KubeProxyConfiguration) -> Iterator[str]:
    if config.mode != "ipvs":
        return
    path = "KubeProxyIPVSConfiguration"
    ipvs = config.ipvs
    for name, value in (
        ("TCPTimeout", ipvs.tcp_timeout),
        ("TCPFinTimeout", ipvs.tcp_fin_timeout),
        ("UDPTimeout", ipvs.udp_timeout),
    ):
        if value < 0:
            yield _invalid_duration(f"{path}.{name}", value, _NOT_NEGATIVE)
    for index, cidr in enumerate(ipvs.exclude_cidrs or ()):
        if addresses.parse_cidr(cidr) is None:
            yield _invalid(f"{path}.ExcludeCidrs[{index}]", cidr, "must be a valid CIDR")


def periods(config: KubeProxyConfiguration) -> tuple[int, int]:
    """syncPeriod and minSyncPeriod of the section that the mode selects, in nanoseconds (spec/configuration §3)."""
    if config.mode == "ipvs":
        return config.ipvs.sync_period, config.ipvs.min_sync_period
    if config.mode == "nftables":
        return config.nftables.sync_period, config.nftables.min_sync_period
    return config.iptables.sync_period, config.iptables.min_sync_period


def _periods(config: KubeProxyConfiguration) -> Iterator[str]:
    if config.config_sync_period <= 0:
        yield _invalid_duration("ConfigSyncPeriod", config.config_sync_period, _POSITIVE)
    sync, minimum = periods(config)
    if sync <= 0:
        yield _invalid_duration("SyncPeriod", sync, _POSITIVE)
    if minimum < 0:
        yield _invalid_duration("MinSyncPeriod", minimum, _NOT_NEGATIVE)
    if minimum > sync:
        message = f"must be greater than or equal to {ROOT}.MinSyncPeriod"
        yield _invalid_duration("SyncPeriod", minimum, message)


def _bind_addresses(config: KubeProxyConfiguration) -> Iterator[str]:
    if addresses.parse_ip(config.bind_address) is None:
        yield _invalid("BindAddress", config.bind_address, "not a valid textual representation of an IP address")
    if config.healthz_bind_address:
        yield from _host_port("HealthzBindAddress", config.healthz_bind_address)
    yield from _host_port("MetricsBindAddress", config.metrics_bind_address)


def _host_port(path: str, text: str) -> Iterator[str]:
    parts = addresses.split_host_port(text)
    if parts is None:
        yield _invalid(path, text, "must be IP:port")
        return
    host, port = parts
    if addresses.parse_ip(host) is None:
        yield _invalid(path, host, "must be a valid IP")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        yield _invalid(path, port, "must be a valid port")


def _node_port_addresses(config: KubeProxyConfiguration) -> Iterator[str]:
    wanted = config.node_port_addresses or []
    for index, text in enumerate(wanted):
        if text == "primary":
            if len(wanted) > 1:
                yield _invalid(f"NodePortAddresses[{index}]", text, "can't use both 'primary' and CIDRs")
            return
        if addresses.parse_cidr(text) is None:
            yield _invalid(f"NodePortAddresses[{index}]", text, "must be a valid CIDR")


def _detect_local(config: KubeProxyConfiguration) -> Iterator[str]:
    mode = config.detect_local_mode
    if mode not in DETECT_LOCAL_MODES:
        yield _unsupported("DetectLocalMode", mode, DETECT_LOCAL_MODES)
    path = "DetectLocalConfiguration"
    if mode == "BridgeInterface" and not config.detect_local.bridge_interface:
        yield _invalid(f"{path}.InterfaceName", "", "must not be empty")
    if mode == "InterfaceNamePrefix" and not config.detect_local.interface_name_prefix:
        yield _invalid(f"{path}.InterfacePrefix", "", "must not be empty")
    if mode == "ClusterCIDR" and config.cluster_cidr:
        yield from _cluster_cidrs(f"{path}.ClusterCIDRs", config.cluster_cidr)


def _cluster_cidrs(path: str, text: str) -> Iterator[str]:
    parts = text.split(",")
    networks = [addresses.parse_cidr(part) for part in parts]
    example = "(e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"
    pair = "only one CIDR allowed or a valid DualStack CIDR (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"
    bad = [part for part, network in zip(parts, networks, strict=True) if network is None]
    for part in bad:
        yield _invalid(path, part, f"must be a valid CIDR block {example}")
    if len(parts) > 2 or (not bad and len({n.version for n in networks if n is not None}) != len(parts)):
        yield _invalid(path, text, pair)


def _numbers(config: KubeProxyConfiguration) -> Iterator[str]:
    linux = "KubeProxyLinuxConfiguration"
    conntrack = config.conntrack
    for name, number in (("MaxPerCore", conntrack.max_per_core), ("Min", conntrack.min)):
        if number is not None and number < 0:
            yield _invalid(f"{linux}.KubeProxyConntrackConfiguration.{name}", number, _NOT_NEGATIVE)
    for name, duration in (
        ("TCPEstablishedTimeout", conntrack.tcp_established_timeout),
        ("TCPCloseWaitTimeout", conntrack.tcp_close_wait_timeout),
        ("UDPTimeout", conntrack.udp_timeout),
        ("UDPStreamTimeout", conntrack.udp_stream_timeout),
    ):
        if duration is not None and duration < 0:
            path = f"{linux}.KubeProxyConntrackConfiguration.{name}"
            yield _invalid_duration(path, duration, _NOT_NEGATIVE)
    if config.oom_score_adj is not None and not -1000 <= config.oom_score_adj <= 1000:
        yield _invalid(f"{linux}.OOMScoreAdj", config.oom_score_adj, "must be within the range [-1000, 1000]")
    if config.client_connection.burst < 0:
        yield _invalid("ClientConnection.Burst", config.client_connection.burst, _NOT_NEGATIVE)


def _hidden_metrics(config: KubeProxyConfiguration) -> Iterator[str]:
    wanted = config.show_hidden_metrics_for_version
    release = re.match(r"v(\d+)\.(\d+)", KUBERNETES_VERSION)
    if wanted and release:
        previous = f"{release[1]}.{int(release[2]) - 1}"
        if wanted != previous:
            message = f"--show-hidden-metrics-for-version must be omitted or have the value '{previous}'"
            yield _invalid("ShowHiddenMetricsForVersion", wanted, message)


def _logging(config: KubeProxyConfiguration) -> Iterator[str]:
    logging = config.logging
    if logging.format not in ("text", "json"):
        yield _invalid("logging.format", logging.format, "Unsupported log format")
    if logging.verbosity > 2147483647:
        yield _invalid("logging.verbosity", logging.verbosity, "Must be <= 2147483647")
    for index, entry in enumerate(logging.vmodule or ()):
        if not entry.file_pattern:
            yield f"logging.vmodule[{index}]: Required value: File pattern must not be empty"
        elif any(character in entry.file_pattern for character in "=,"):
            yield _invalid(
                f"logging.vmodule[{index}]", entry.file_pattern, "File pattern must not contain equal sign or comma"
            )


_CHECKS = (
    _masquerade_bits,
    _ipvs,
    _numbers,
    _modes,
    _periods,
    _bind_addresses,
    _node_port_addresses,
    _hidden_metrics,
    _detect_local,
    _logging,
)
