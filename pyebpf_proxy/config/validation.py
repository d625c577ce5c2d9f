# SPDX-License-Identifier: Apache-2.0
"""Validation of a completed KubeProxyConfiguration: kube-proxy's rules, paths and messages (spec/configuration §2)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pyebpf_proxy import KUBERNETES_VERSION
from pyebpf_proxy.config import addresses, durations, gotext, quantities
from pyebpf_proxy.config.gates import Gates
from pyebpf_proxy.config.model import KubeProxyConfiguration, Logging

ROOT = "KubeProxyConfiguration"
MODES = ("iptables", "ipvs", "nftables")
DETECT_LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "")

LOG_FORMATS = ("text", "json")
_MAX_VERBOSITY = (1 << 31) - 1
_NOT_NEGATIVE = "must be greater than or equal to 0"
_POSITIVE = "must be greater than 0"


def validate(config: KubeProxyConfiguration, cluster_cidrs: Sequence[str] | None = None) -> list[str]:
    """Every error of ``config``, as ``path: kind: value: message``; empty if it is valid.

    ``cluster_cidrs`` overrides the split ``clusterCIDR``: a flag may give a list with one empty string.
    """
    if cluster_cidrs is None:
        cluster_cidrs = config.cluster_cidr.split(",") if config.cluster_cidr else ()
    errors = [error for check in _CHECKS for error in check(config)]
    errors += _detect_local(config, cluster_cidrs)
    return list(dict.fromkeys(f"{ROOT}.{error}" for error in errors))


def in_one_line(errors: list[str]) -> str:
    """Errors on one line, as kube-proxy prints them."""
    return errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]"


def _invalid(path: str, value: object, message: str) -> str:
    return f"{path}: Invalid value: {_shown(value)}: {message}"


def _invalid_duration(path: str, nanoseconds: int, message: str) -> str:
    return f'{path}: Invalid value: "{durations.format(nanoseconds)}": {message}'


def _unsupported(path: str, value: str, supported: tuple[str, ...]) -> str:
    return f"{path}: Unsupported value: {_shown(value)}: supported values: {', '.join(map(_shown, supported))}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return gotext.quote(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_shown, value)) + "]"
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
    if not re.fullmatch(r"\+?0*[0-9]{1,5}", port, re.ASCII) or not 1 <= int(port[-5:]) <= 65535:
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


def _detect_local(config: KubeProxyConfiguration, cluster_cidrs: Sequence[str]) -> Iterator[str]:
    mode = config.detect_local_mode
    if mode not in DETECT_LOCAL_MODES:
        yield _unsupported("DetectLocalMode", mode, DETECT_LOCAL_MODES)
    path = "DetectLocalConfiguration"
    if mode == "BridgeInterface" and not config.detect_local.bridge_interface:
        yield _invalid(f"{path}.InterfaceName", "", "must not be empty")
    if mode == "InterfaceNamePrefix" and not config.detect_local.interface_name_prefix:
        yield _invalid(f"{path}.InterfacePrefix", "", "must not be empty")
    if mode == "ClusterCIDR" and cluster_cidrs:
        yield from _cluster_cidrs(f"{path}.ClusterCIDRs", cluster_cidrs)


def _cluster_cidrs(path: str, parts: Sequence[str]) -> Iterator[str]:
    pair = "must be a either a single CIDR or dual-stack pair of CIDRs (e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"
    if len(parts) > 2:
        yield _invalid(path, list(parts), pair)
        return
    networks = [addresses.parse_cidr(part) for part in parts]
    for index, network in enumerate(networks):
        if network is None:
            message = "must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"
            yield _invalid(f"{path}[{index}]", parts[index], message)
    versions = [network.version for network in networks if network is not None]
    if len(versions) == 2 and versions[0] == versions[1]:
        yield _invalid(path, list(parts), pair)


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


def _client(config: KubeProxyConfiguration) -> Iterator[str]:
    if config.client_connection.burst < 0:
        yield _invalid("ClientConnection.Burst", config.client_connection.burst, _NOT_NEGATIVE)


def _hidden_metrics(config: KubeProxyConfiguration) -> Iterator[str]:
    wanted = config.show_hidden_metrics_for_version
    release = re.match(r"v(\d+)\.(\d+)", KUBERNETES_VERSION)
    if wanted and release:
        previous = f"{release[1]}.{int(release[2]) - 1}"
        if wanted != previous:
            message = f"must be omitted or have the value '{previous}'; only the previous minor version is allowed"
            inner = _invalid("showHiddenMetricsForVersion", wanted, message)
            yield _invalid("ShowHiddenMetricsForVersion", wanted, f"invalid showHiddenMetricsForVersion: {inner}")


def logging_errors(logging: Logging, gates: Gates) -> list[str]:
    """Errors of the section ``logging``, which kube-proxy reports before all others."""
    errors = []
    frequency = logging.flush_frequency
    if frequency.nanoseconds <= 0:
        shown = _invalid_duration if frequency.as_text else _invalid
        errors.append(shown("flushFrequency", frequency.nanoseconds, "Must be greater than zero"))
    if logging.format not in LOG_FORMATS:
        errors.append(_invalid("format", logging.format, "Unsupported log format"))
    if logging.verbosity > _MAX_VERBOSITY:
        errors.append(_invalid("verbosity", logging.verbosity, f"Must be <= {_MAX_VERBOSITY}"))
    if logging.vmodule and logging.format not in ("", "text"):
        errors.append("vmodule: Forbidden: Only supported for text log format")
    for index, entry in enumerate(logging.vmodule or ()):
        path = f"vmodule[{index}]"
        if not entry.file_pattern:
            errors.append(f"{path}: Required value: File pattern must not be empty")
        if any(character in entry.file_pattern for character in "=,"):
            errors.append(_invalid(path, entry.file_pattern, "File pattern must not contain equal sign or comma"))
        if entry.verbosity > _MAX_VERBOSITY:
            errors.append(_invalid(path, entry.verbosity, f"Must be <= {_MAX_VERBOSITY}"))
    if not gates.on("LoggingAlphaOptions"):
        for name, options in (("text", logging.options.text), ("json", logging.options.json_)):
            disabled = "Forbidden: Feature LoggingAlphaOptions is disabled"
            if options.split_stream:
                errors.append(f"options.{name}.splitStream: {disabled}")
            if quantities.parse(options.info_buffer_size).value != 0:
                errors.append(f"options.{name}.infoBufferSize: {disabled}")
    return [f"logging.{error}" for error in errors]


_CHECKS = (
    _masquerade_bits,
    _ipvs,
    _numbers,
    _modes,
    _client,
    _periods,
    _bind_addresses,
    _node_port_addresses,
    _hidden_metrics,
)
