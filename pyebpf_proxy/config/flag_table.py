# SPDX-License-Identifier: Apache-2.0
"""Every flag: kube-proxy's of today, those of older releases, and ours (spec/configuration §4.2, §4.3)."""

# One line for each flag, however long: it is a table.
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pyebpf_proxy.config import flag_values as read

DEFAULT_DIRECTORY = "/run/pyebpf-proxy"


class Flag(NamedTuple):
    """One flag: its name, the type that ``--help`` prints, its default as shown, help text, how its value is read."""

    name: str
    type: str
    default: str
    help: str
    read: Callable[[str], Any] = str
    #: The field of the configuration that it sets, as attributes of the model.
    field: str = ""
    #: Value of ``--flag`` without ``=``; None: a value must follow.
    alone: str | None = None
    short: str = ""


def _switch(name: str, text: str, field: str = "", default: str = "", short: str = "") -> Flag:
    return Flag(name, "", default, text, read.boolean, field, "true", short)


def _duration(name: str, default: str, text: str, field: str = "") -> Flag:
    return Flag(name, "duration", default, text, read.duration, field)


def _number(name: str, default: str, text: str, field: str = "") -> Flag:
    return Flag(name, "int32", default, text, read.int32, field)


# fmt: off
_SYNC = "Everything is compared with the kernel at least this often."
_MIN_SYNC = "Changes are gathered for this long between two syncs; 0: each is written at once."
_JSON_ALPHA = "Accepted with the gate LoggingAlphaOptions; no effect."

GROUPS: dict[str, tuple[Flag, ...]] = {
    "General": (
        Flag("config", "string", "", "Configuration file (KubeProxyConfiguration). With it, all flags of fields are ignored but those of logging and --hostname-override."),
        Flag("write-config-to", "string", "", "Write the configuration in force to this file, and exit."),
        _switch("cleanup", "Remove all pyebpf-proxy state and what kube-proxy left behind, and exit."),
        _switch("init-only", "Do what of a start needs the most rights (mounts, nft table, node settings), and exit."),
        Flag("version", "version[=true]", "false", "Print the version, and exit; raw: all of it; vX.Y.Z…: report this one.", read.version, "", "true"),
        _switch("help", "Print this text, and exit.", "", "", "h"),
    ),
    "Node and API server": (
        Flag("hostname-override", "string", "", "Name of this Node, in the place of the host's name."),
        Flag("bind-address", "ip", "0.0.0.0", "Unless unspecified, the Node's address of its family, which becomes the primary one.", read.ip, "bind_address"),
        Flag("kubeconfig", "string", "", "Kubeconfig of the API server; without it and --master: as a pod of its cluster.", str, "client_connection.kubeconfig"),
        Flag("master", "string", "", "URL of the API server, over that of the kubeconfig."),
        Flag("kube-api-content-type", "string", "application/vnd.kubernetes.protobuf", "Accepted; objects are asked for as JSON.", str, "client_connection.content_type"),
        Flag("kube-api-qps", "float32", "5", "Requests per second to the API server, in the long run; negative: no limit.", read.float32, "client_connection.qps"),
        _number("kube-api-burst", "10", "Requests that may go at once.", "client_connection.burst"),
        _duration("config-sync-period", "15m0s", "Accepted; every change of the API server is followed, so nothing need be delivered twice.", "config_sync_period"),
        Flag("feature-gates", "mapStringBool", "", "Name=true|false, comma-separated; checked as kube-proxy's.", read.gates, "feature_gates"),
    ),
    "Mode and traffic": (
        Flag("proxy-mode", "ProxyMode", "", "Whose behaviour is followed where they differ: iptables (also blank and ipvs) or nftables.", str, "mode"),
        Flag("detect-local-mode", "LocalMode", "", "How traffic of pods here is told: ClusterCIDR (also blank), NodeCIDR, BridgeInterface, InterfaceNamePrefix.", str, "detect_local_mode"),
        Flag("cluster-cidr", "string", "", "ClusterCIDR: one range of pods, or an IPv4 and an IPv6 one, comma-separated.", str, "cluster_cidr"),
        Flag("pod-bridge-interface", "string", "", "BridgeInterface: name of the bridge.", str, "detect_local.bridge_interface"),
        Flag("pod-interface-name-prefix", "string", "", "InterfaceNamePrefix: how the devices' names begin.", str, "detect_local.interface_name_prefix"),
        Flag("nodeport-addresses", "strings", "", "Local addresses that serve NodePorts: CIDRs, or primary.", read.strings, "node_port_addresses"),
        _switch("masquerade-all", "Masquerade all traffic to Service addresses."),
        _number("iptables-masquerade-bit", "14", "The packet mark's bit that asks for masquerading (0 to 31); modes iptables and ipvs.", "iptables.masquerade_bit"),
        _switch("iptables-localhost-nodeports", "NodePorts answer on 127.0.0.0/8; mode iptables.", "iptables.localhost_node_ports", "true"),
    ),
    "Syncing": (
        _duration("iptables-sync-period", "30s", _SYNC + " Modes iptables and nftables."),
        _duration("iptables-min-sync-period", "1s", _MIN_SYNC + " Modes iptables and nftables."),
        _duration("ipvs-sync-period", "30s", _SYNC + " Mode ipvs."),
        _duration("ipvs-min-sync-period", "1s", _MIN_SYNC + " Mode ipvs."),
    ),
    "Mode ipvs (there is no IPVS underneath)": (
        Flag("ipvs-scheduler", "string", "", "How an endpoint is chosen in mode ipvs; empty: rr.", str, "ipvs.scheduler"),
        Flag("ipvs-exclude-cidrs", "strings", "", "Virtual servers there stay at clean-up.", read.strings, "ipvs.exclude_cidrs"),
        _switch("ipvs-strict-arp", "Mode ipvs: arp_ignore is set to 1 and arp_announce to 2.", "ipvs.strict_arp"),
        _duration("ipvs-tcp-timeout", "0s", "Mode ipvs: nf_conntrack_tcp_timeout_established; 0: left alone.", "ipvs.tcp_timeout"),
        _duration("ipvs-tcpfin-timeout", "0s", "Mode ipvs: nf_conntrack_tcp_timeout_fin_wait; 0: left alone.", "ipvs.tcp_fin_timeout"),
        _duration("ipvs-udp-timeout", "0s", "Mode ipvs: nf_conntrack_udp_timeout and _udp_timeout_stream; 0: left alone.", "ipvs.udp_timeout"),
    ),
    "Connection table (0: left alone)": (
        _number("conntrack-max-per-core", "32768", "Entries per CPU.", "conntrack.max_per_core"),
        _number("conntrack-min", "131072", "At least so many entries.", "conntrack.min"),
        _duration("conntrack-tcp-timeout-established", "24h0m0s", "Idle established TCP connections.", "conntrack.tcp_established_timeout"),
        _duration("conntrack-tcp-timeout-close-wait", "1h0m0s", "TCP connections closed by one side.", "conntrack.tcp_close_wait_timeout"),
        _switch("conntrack-tcp-be-liberal", "Sets nf_conntrack_tcp_be_liberal.", "conntrack.tcp_be_liberal"),
        _duration("conntrack-udp-timeout", "0s", "UDP without an answer.", "conntrack.udp_timeout"),
        _duration("conntrack-udp-timeout-stream", "0s", "UDP with answers.", "conntrack.udp_stream_timeout"),
    ),
    "Servers and process": (
        Flag("healthz-bind-address", "ipport", "0.0.0.0:10256", "Where /healthz and /livez are served; empty: nowhere.", read.ip_port, "healthz_bind_address"),
        Flag("metrics-bind-address", "ipport", "127.0.0.1:10249", "Where /metrics is served.", read.ip_port, "metrics_bind_address"),
        _switch("bind-address-hard-fail", "An address of these two that cannot be had ends the program; otherwise it is tried again every 5 s.", "bind_address_hard_fail"),
        _switch("profiling", "/debug/flags/v is served beside the metrics; profiles are not.", "enable_profiling"),
        Flag("show-hidden-metrics-for-version", "string", "", "The previous minor release, as 1.35; no metric is hidden.", str, "show_hidden_metrics_for_version"),
        _number("oom-score-adj", "-999", "Written to /proc/self/oom_score_adj (-1000 to 1000).", "oom_score_adj"),
    ),
    "Log": (
        Flag("logging-format", "string", "text", "text or json."),
        Flag("v", "Level", "0", "From 2 on, debug messages are written.", read.level, "", None, "v"),
        Flag("vmodule", "pattern=N,...", "", "Levels of single rooms (modules); format text only.", read.vmodule),
        _duration("log-flush-frequency", "5s", "Accepted; every line is written at once."),
        _switch("log-text-split-stream", _JSON_ALPHA),
        Flag("log-text-info-buffer-size", "quantity", "0", _JSON_ALPHA, read.quantity),
        _switch("log-json-split-stream", _JSON_ALPHA),
        Flag("log-json-info-buffer-size", "quantity", "0", _JSON_ALPHA, read.quantity),
    ),
    "Of pyebpf-proxy alone": (
        Flag("datapath-config", "string", "", "File of kind DatapathConfiguration: what is ours and not kube-proxy's (docs/datapath-configuration.md). The flags below win over it."),
        Flag("manifests", "string", "", "Take Services, EndpointSlices and Nodes from the files of this folder."),
        Flag("directory", "string", DEFAULT_DIRECTORY, "Run folder. Instances with different folders share nothing: pins, nft table and lock hang on it.", read.not_empty),
        _switch("keep-kube-proxy-rules", "With --cleanup: take away what is ours, and leave kube-proxy's rules: for the way back to it, when it runs again."),
    ),
}

#: Work, but are not in the help, and say so when given.
DEPRECATED: dict[str, tuple[Flag, str]] = {
    flag.name: (flag, f"This flag is deprecated and will be removed in a future release. Please use --{instead} instead.")
    for flag, instead in (
        (_number("healthz-port", "10256", "Port of the health server where its address has none; 0: no server."), "healthz-bind-address"),
        (_number("metrics-port", "10249", "Port of the metrics server where its address has none."), "metrics-bind-address"),
    )
}

#: Of kube-proxy's libraries, or of releases long gone, also of ours: taken, so that every documented manifest starts, and ignored.
IGNORED: tuple[Flag, ...] = (
    Flag("boot-id-file", "string", "", "", str),
    Flag("machine-id-file", "string", "", "", str),
    Flag("lane", "string", "", ""),
    *(_switch(name, "") for name in (
        "add-dir-header", "alsologtostderr", "logtostderr", "one-output", "skip-headers", "skip-log-headers", "cleanup-ipvs",
    )),
    *(Flag(name, "string", "", "") for name in (
        "log-backtrace-at", "log-dir", "log-file", "log-file-max-size", "stderrthreshold",
        "azure-container-registry-config",
    )),
    Flag("proxy-port-range", "port-range", "", "", read.port_range),
    _duration("udp-timeout", "250ms", ""),
)
#: Of these, kube-proxy itself knows the first two: they are ignored without a word.
SILENT = frozenset(("boot-id-file", "machine-id-file"))
# fmt: on

FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
