# SPDX-License-Identifier: Apache-2.0
"""Every flag: kube-proxy's current flags, those of older releases, and pyebpf-proxy's own (spec/configuration §4.2, §4.3)."""

# A table: one line for each flag, however long.
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pyebpf_proxy.config import flag_values as read

DEFAULT_DIRECTORY = "/run/pyebpf-proxy"


class Flag(NamedTuple):
    """One flag: its name, type and default as ``--help`` shows them, its help text, and the parser of its value."""

    name: str
    type: str
    default: str
    help: str
    read: Callable[[str], Any] = str
    #: The configuration field that it sets, as an attribute path of the model.
    field: str = ""
    #: Value of ``--flag`` without ``=``; None: a value is required.
    alone: str | None = None
    short: str = ""


def _switch(name: str, text: str, field: str = "", default: str = "", short: str = "") -> Flag:
    return Flag(name, "", default, text, read.boolean, field, "true", short)


def _duration(name: str, default: str, text: str, field: str = "") -> Flag:
    return Flag(name, "duration", default, text, read.duration, field)


def _number(name: str, default: str, text: str, field: str = "") -> Flag:
    return Flag(name, "int32", default, text, read.int32, field)


# fmt: off
_SYNC = "Interval at which a failed sync is repeated, and the agent's maps and nftables table are checked."
_MIN_SYNC = "Minimum interval between two syncs; changes are batched meanwhile. 0: each change is written at once."
_JSON_ALPHA = "Accepted with the gate LoggingAlphaOptions; no effect."

GROUPS: dict[str, tuple[Flag, ...]] = {
    "General": (
        Flag("config", "string", "", "Configuration file (KubeProxyConfiguration). With it, flags that set fields are ignored, except --hostname-override and the logging flags."),
        Flag("write-config-to", "string", "", "Write the effective configuration to this file, and exit."),
        _switch("cleanup", "Remove all state of pyebpf-proxy and what kube-proxy left behind, and exit."),
        _switch("init-only", "Do the start-up steps that need the most privileges (mounts, nftables table, sysctls), and exit."),
        Flag("version", "version[=true]", "false", "Print the version, and exit. raw: all version fields; vX.Y.Z…: report this version instead.", read.version, "", "true"),
        _switch("help", "Print this text, and exit.", "", "", "h"),
    ),
    "Node and API server": (
        Flag("hostname-override", "string", "", "Name of this Node; default: the host name."),
        Flag("bind-address", "ip", "0.0.0.0", "Overrides the node IP of its family, which becomes the primary family, unless it is 0.0.0.0 or ::.", read.ip, "bind_address"),
        Flag("kubeconfig", "string", "", "Kubeconfig file for the API server. Without it and --master: in-cluster configuration.", str, "client_connection.kubeconfig"),
        Flag("master", "string", "", "URL of the API server; overrides that of the kubeconfig."),
        Flag("kube-api-content-type", "string", "application/vnd.kubernetes.protobuf", "Accepted; objects are requested as JSON.", str, "client_connection.content_type"),
        Flag("kube-api-qps", "float32", "5", "Sustained requests per second to the API server; negative: no limit.", read.float32, "client_connection.qps"),
        _number("kube-api-burst", "10", "Maximum number of requests in a burst.", "client_connection.burst"),
        _duration("config-sync-period", "15m0s", "Accepted without effect: the agent watches the API server and needs no periodic resync.", "config_sync_period"),
        Flag("feature-gates", "mapStringBool", "", "Name=true|false, comma-separated; validated as in kube-proxy.", read.gates, "feature_gates"),
    ),
    "Mode and traffic": (
        Flag("proxy-mode", "ProxyMode", "", "Which mode of kube-proxy to follow: iptables (also blank), nftables, or ipvs (docs/ipvs-mode.md).", str, "mode"),
        Flag("detect-local-mode", "LocalMode", "", "How traffic of local pods is detected: ClusterCIDR (also blank), NodeCIDR, BridgeInterface, InterfaceNamePrefix.", str, "detect_local_mode"),
        Flag("cluster-cidr", "string", "", "Pod CIDR for mode ClusterCIDR, or an IPv4 and an IPv6 CIDR, comma-separated.", str, "cluster_cidr"),
        Flag("pod-bridge-interface", "string", "", "Name of the bridge for mode BridgeInterface.", str, "detect_local.bridge_interface"),
        Flag("pod-interface-name-prefix", "string", "", "Prefix of the interface names for mode InterfaceNamePrefix.", str, "detect_local.interface_name_prefix"),
        Flag("nodeport-addresses", "strings", "", "Node addresses that serve NodePorts: CIDRs, or primary.", read.strings, "node_port_addresses"),
        _switch("masquerade-all", "Masquerade all traffic to Service addresses."),
        _number("iptables-masquerade-bit", "14", "Bit of the packet mark that requests masquerading (0 to 31); modes iptables and ipvs.", "iptables.masquerade_bit"),
        _switch("iptables-localhost-nodeports", "Serve NodePorts on 127.0.0.0/8; mode iptables.", "iptables.localhost_node_ports", "true"),
    ),
    "Syncing": (
        _duration("iptables-sync-period", "30s", _SYNC + " Modes iptables and nftables."),
        _duration("iptables-min-sync-period", "1s", _MIN_SYNC + " Modes iptables and nftables."),
        _duration("ipvs-sync-period", "30s", _SYNC + " Mode ipvs."),
        _duration("ipvs-min-sync-period", "1s", _MIN_SYNC + " Mode ipvs."),
    ),
    "Mode ipvs (IPVS itself is not used)": (
        Flag("ipvs-scheduler", "string", "", "Scheduler that chooses the endpoint in mode ipvs; empty: rr.", str, "ipvs.scheduler"),
        Flag("ipvs-exclude-cidrs", "strings", "", "CIDRs whose IPVS virtual servers stay when kube-proxy's state is removed.", read.strings, "ipvs.exclude_cidrs"),
        _switch("ipvs-strict-arp", "Mode ipvs: set arp_ignore to 1 and arp_announce to 2.", "ipvs.strict_arp"),
        _duration("ipvs-tcp-timeout", "0s", "Mode ipvs: value of nf_conntrack_tcp_timeout_established; 0: unchanged.", "ipvs.tcp_timeout"),
        _duration("ipvs-tcpfin-timeout", "0s", "Mode ipvs: value of nf_conntrack_tcp_timeout_fin_wait; 0: unchanged.", "ipvs.tcp_fin_timeout"),
        _duration("ipvs-udp-timeout", "0s", "Mode ipvs: value of nf_conntrack_udp_timeout and nf_conntrack_udp_timeout_stream; 0: unchanged.", "ipvs.udp_timeout"),
    ),
    "Connection tracking (0: unchanged)": (
        _number("conntrack-max-per-core", "32768", "Conntrack entries per CPU.", "conntrack.max_per_core"),
        _number("conntrack-min", "131072", "Minimum number of conntrack entries.", "conntrack.min"),
        _duration("conntrack-tcp-timeout-established", "24h0m0s", "Timeout of idle established TCP connections.", "conntrack.tcp_established_timeout"),
        _duration("conntrack-tcp-timeout-close-wait", "1h0m0s", "Timeout of TCP connections in CLOSE_WAIT.", "conntrack.tcp_close_wait_timeout"),
        _switch("conntrack-tcp-be-liberal", "Set nf_conntrack_tcp_be_liberal to 1.", "conntrack.tcp_be_liberal"),
        _duration("conntrack-udp-timeout", "0s", "Timeout of UDP flows without a reply.", "conntrack.udp_timeout"),
        _duration("conntrack-udp-timeout-stream", "0s", "Timeout of UDP flows with replies.", "conntrack.udp_stream_timeout"),
    ),
    "Servers and process": (
        Flag("healthz-bind-address", "ipport", "0.0.0.0:10256", "Address and port of /healthz and /livez.", read.ip_port, "healthz_bind_address"),
        Flag("metrics-bind-address", "ipport", "127.0.0.1:10249", "Address and port of /metrics.", read.ip_port, "metrics_bind_address"),
        _switch("bind-address-hard-fail", "Exit if one of these two addresses cannot be bound; otherwise the bind is retried every 5 s.", "bind_address_hard_fail"),
        _switch("profiling", "Serve /debug/flags/v on the metrics server; profiles are not served.", "enable_profiling"),
        Flag("show-hidden-metrics-for-version", "string", "", "The previous minor release, such as 1.35. No effect: no metric is hidden.", str, "show_hidden_metrics_for_version"),
        _number("oom-score-adj", "-999", "Written to /proc/self/oom_score_adj (-1000 to 1000).", "oom_score_adj"),
    ),
    "Log": (
        Flag("logging-format", "string", "text", "text or json."),
        Flag("v", "Level", "0", "Log verbosity; 2 and above: debug messages.", read.level, "", None, "v"),
        Flag("vmodule", "pattern=N,...", "", "Verbosity of single modules; text format only.", read.vmodule),
        _duration("log-flush-frequency", "5s", "Accepted without effect: every line is written at once."),
        _switch("log-text-split-stream", _JSON_ALPHA),
        Flag("log-text-info-buffer-size", "quantity", "0", _JSON_ALPHA, read.quantity),
        _switch("log-json-split-stream", _JSON_ALPHA),
        Flag("log-json-info-buffer-size", "quantity", "0", _JSON_ALPHA, read.quantity),
    ),
    "pyebpf-proxy's own": (
        Flag("datapath-config", "string", "", "File of kind DatapathConfiguration: options that kube-proxy does not have (docs/datapath-configuration.md). The flags below override it."),
        Flag("manifests", "string", "", "Read Services, EndpointSlices, Nodes and ServiceCIDRs from the files of this directory instead of the API server."),
        Flag("directory", "string", DEFAULT_DIRECTORY, "Run folder. It determines the pins, the nftables table and the lock: instances with different directories share nothing.", read.not_empty),
        _switch("keep-kube-proxy-rules", "With --cleanup: remove only the state of pyebpf-proxy and keep kube-proxy's rules. For the return to a kube-proxy that already runs."),
    ),
}

#: Flags that work, are not in the help, and log a deprecation warning.
DEPRECATED: dict[str, tuple[Flag, str]] = {
    flag.name: (flag, f"This flag is deprecated and will be removed in a future release. Please use --{instead} instead.")
    for flag, instead in (
        (_number("healthz-port", "10256", "Port of the health server if its address has none; 0: no server."), "healthz-bind-address"),
        (_number("metrics-port", "10249", "Port of the metrics server if its address has none."), "metrics-bind-address"),
    )
}

#: Flags of kube-proxy's libraries and of old releases (also of pyebpf-proxy): ignored, so that every documented manifest starts.
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
#: kube-proxy accepts the first two of them: they are ignored without a warning.
SILENT = frozenset(("boot-id-file", "machine-id-file"))
# fmt: on

FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
