# SPDX-License-Identifier: Apache-2.0
"""The document ``kubeproxy.config.k8s.io/v1alpha1 KubeProxyConfiguration``, field by field (spec/configuration §2).

A field that is absent from the file has Go's zero value (``None`` for pointer fields). ``defaults`` replaces zero
values by defaults, as kube-proxy does (§1.3). ``decode`` reads files by these types. The descriptions explain a field's
effect in pyebpf-proxy; docs/configuration.md is generated from them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"


class Reader(enum.Enum):
    """Kinds of values that need their own parser."""

    DURATION = "duration"  # nanoseconds
    POINTER_DURATION = "*duration"
    FLUSH_FREQUENCY = "duration or integer nanoseconds"
    QUANTITY = "quantity"  # kept as its canonical text


class GoType(NamedTuple):
    """Go's type of a field, if it is not the usual one, and the embedded Go struct that contains the field."""

    name: str
    embedded: str = ""


class FlushFrequency(NamedTuple):
    """The only duration that may be a plain number in a file. It is written in the form in which it was read."""

    nanoseconds: int
    as_text: bool = True


#: Fields that are not written when they are empty.
_OMITTED = frozenset(("featureGates", "windowsRunAsService", "vmodule", "splitStream"))

Duration = Annotated[int, Reader.DURATION]
PointerDuration = Annotated[int | None, Reader.POINTER_DURATION]


def _doc(text: str, alias: str | None = None) -> object:
    return Field(description=text, alias=alias) if alias else Field(description=text)


class Section(BaseModel):
    """Common rules: frozen, strict types, camelCase names in the file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)
    go_name: ClassVar[str]
    go_package: ClassVar[str] = "v1alpha1"


_PERIOD = "Interval at which a failed sync is repeated, and the agent's maps and nftables table are checked."
_MIN_PERIOD = "Minimum interval between two syncs. The first change after a pause is written at once."
_MASQUERADE_ALL = "Masquerade all traffic to Service addresses."
_NONE = "No effect."


class ClientConnection(Section):
    """Section ``clientConnection``: access to the API server (§2.2)."""

    go_name = "ClientConnectionConfiguration"
    kubeconfig: Annotated[
        str, _doc("Kubeconfig file for the API server. Empty and no --master: in-cluster configuration.")
    ] = ""
    accept_content_types: Annotated[str, _doc("Accepted; objects are requested as JSON.")] = ""
    content_type: Annotated[str, _doc("Accepted; objects are requested as JSON.")] = ""
    qps: Annotated[float, _doc("Sustained requests per second to the API server; negative: no limit.")] = 0.0
    burst: Annotated[int, _doc("Maximum number of requests in a burst.")] = 0


class IPTables(Section):
    """Section ``iptables`` (§2.3); in effect in modes "" and iptables."""

    go_name = "KubeProxyIPTablesConfiguration"
    masquerade_bit: Annotated[
        int | None, _doc("Bit of the packet mark that requests masquerading; also in mode ipvs.")
    ] = None
    masquerade_all: Annotated[bool, _doc(_MASQUERADE_ALL + " Also in mode ipvs.")] = False
    localhost_node_ports: Annotated[
        bool | None, _doc("Serve NodePorts on 127.0.0.0/8; mode iptables sets route_localnet to 1 for this.")
    ] = None
    sync_period: Annotated[Duration, _doc(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _doc(_MIN_PERIOD)] = 0


class IPVS(Section):
    """Section ``ipvs`` (§2.4); in effect in mode ipvs."""

    go_name = "KubeProxyIPVSConfiguration"
    sync_period: Annotated[Duration, _doc(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _doc(_MIN_PERIOD)] = 0
    scheduler: Annotated[
        str,
        _doc(
            "Scheduler that chooses the endpoint in mode ipvs: rr (also empty), wrr, sh, dh, mh,"
            " or, by number of connections, lc, wlc, sed, nq, lblc, lblcr (docs/ipvs-mode.md)."
        ),
    ] = ""
    exclude_cidrs: Annotated[
        list[str] | None,
        _doc(
            "Ranges that belong to other programs: the clean-up after kube-proxy keeps IPVS virtual servers and"
            " addresses on kube-ipvs0 in them. In every mode.",
            "excludeCIDRs",
        ),
    ] = None
    strict_arp: Annotated[
        bool, _doc("Set arp_ignore to 1 and arp_announce to 2; false leaves both unchanged.", "strictARP")
    ] = False
    tcp_timeout: Annotated[
        Duration,
        _doc("Value of nf_conntrack_tcp_timeout_established, over that of section conntrack; 0: no override."),
    ] = 0
    tcp_fin_timeout: Annotated[Duration, _doc("Value of nf_conntrack_tcp_timeout_fin_wait; 0: unchanged.")] = 0
    udp_timeout: Annotated[
        Duration,
        _doc("Value of nf_conntrack_udp_timeout and _udp_timeout_stream, over section conntrack; 0: no override."),
    ] = 0


class NFTables(Section):
    """Section ``nftables`` (§2.5); in effect in mode nftables."""

    go_name = "KubeProxyNFTablesConfiguration"
    masquerade_bit: Annotated[int | None, _doc("Bit of the packet mark that requests masquerading.")] = None
    masquerade_all: Annotated[bool, _doc(_MASQUERADE_ALL)] = False
    sync_period: Annotated[Duration, _doc(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _doc(_MIN_PERIOD)] = 0


class WinKernel(Section):
    """Section ``winkernel`` (§2.6): Windows only, accepted and ignored."""

    go_name = "KubeProxyWinkernelConfiguration"
    network_name: Annotated[str, _doc(_NONE)] = ""
    source_vip: Annotated[str, _doc(_NONE)] = ""
    enable_dsr: Annotated[bool, _doc(_NONE, "enableDSR")] = False
    root_hns_endpoint_name: Annotated[str, _doc(_NONE)] = ""
    forward_health_check_vip: Annotated[bool, _doc(_NONE)] = False


class DetectLocal(Section):
    """Section ``detectLocal`` (§2.7)."""

    go_name = "DetectLocalConfiguration"
    bridge_interface: Annotated[
        str,
        _doc(
            "Mode BridgeInterface: packets that arrive on this bridge are from local pods. A + at the end of the name"
            " (mode nftables: a *) stands for any characters."
        ),
    ] = ""
    interface_name_prefix: Annotated[
        str,
        _doc("Mode InterfaceNamePrefix: packets that arrive on interfaces with this prefix are from local pods."),
    ] = ""


class Conntrack(Section):
    """Section ``conntrack`` (§2.10)."""

    go_name = "KubeProxyConntrackConfiguration"
    max_per_core: Annotated[
        int | None,
        _doc("Conntrack entries per CPU (sets nf_conntrack_max, and hashsize to match); 0: unchanged."),
    ] = None
    min: Annotated[int | None, _doc("Minimum number of conntrack entries, unless maxPerCore is 0.")] = None
    tcp_established_timeout: Annotated[
        PointerDuration, _doc("Value of nf_conntrack_tcp_timeout_established; 0: unchanged.")
    ] = None
    tcp_close_wait_timeout: Annotated[
        PointerDuration, _doc("Value of nf_conntrack_tcp_timeout_close_wait; 0: unchanged.")
    ] = None
    tcp_be_liberal: Annotated[bool, _doc("Set nf_conntrack_tcp_be_liberal to 1; false leaves it unchanged.")] = False
    udp_timeout: Annotated[Duration, _doc("Value of nf_conntrack_udp_timeout; 0: unchanged.")] = 0
    udp_stream_timeout: Annotated[Duration, _doc("Value of nf_conntrack_udp_timeout_stream; 0: unchanged.")] = 0


class VModule(Section):
    """One entry of ``logging.vmodule``."""

    go_name = "VModuleItem"
    go_package = "v1"
    file_pattern: Annotated[str, _doc("Pattern for the module's name; * and ? are wildcards.")] = ""
    verbosity: Annotated[int, GoType("v1.VerbosityLevel"), _doc("Verbosity of these modules.")] = 0


class TextOptions(Section):
    """``logging.options.text``."""

    go_name = "TextOptions"
    go_package = "v1"
    split_stream: Annotated[
        bool,
        GoType("bool", "OutputRoutingOptions"),
        _doc("Accepted with the gate LoggingAlphaOptions, without effect: everything goes to standard error."),
    ] = False
    info_buffer_size: Annotated[
        str,
        Reader.QUANTITY,
        GoType("quantity", "OutputRoutingOptions"),
        _doc("Accepted with the gate LoggingAlphaOptions, without effect: nothing is buffered."),
    ] = ""


class JSONOptions(TextOptions):
    """``logging.options.json``."""

    go_name = "JSONOptions"


class FormatOptions(Section):
    """``logging.options``."""

    go_name = "FormatOptions"
    go_package = "v1"
    text: Annotated[TextOptions, _doc("Options of the format text.")] = TextOptions()
    json_: Annotated[JSONOptions, _doc("Options of the format json.", "json")] = JSONOptions()


class Logging(Section):
    """Section ``logging`` (§2.9)."""

    go_name = "LoggingConfiguration"
    go_package = "v1"
    format: Annotated[str, _doc("text or json.")] = ""
    flush_frequency: Annotated[
        FlushFrequency, Reader.FLUSH_FREQUENCY, _doc("Accepted without effect: every line is written at once.")
    ] = FlushFrequency(0, as_text=False)
    verbosity: Annotated[int, GoType("v1.VerbosityLevel"), _doc("Log verbosity; 2 and above: debug messages.")] = 0
    vmodule: Annotated[
        list[VModule] | None, GoType("v1.VModuleConfiguration"), _doc("Verbosity of single modules.")
    ] = None
    options: Annotated[FormatOptions, _doc("Options of the formats.")] = FormatOptions()


class KubeProxyConfiguration(Section):
    """The whole document (§2.1)."""

    go_name = "KubeProxyConfiguration"
    feature_gates: Annotated[
        dict[str, bool],
        _doc("Validated as in kube-proxy. AllowServiceExternalIPs=false turns external IPs off; most have no effect."),
    ] = {}
    client_connection: Annotated[ClientConnection, _doc("Access to the API server.")] = ClientConnection()
    logging: Annotated[Logging, _doc("The log.")] = Logging()
    hostname_override: Annotated[str, _doc("Name of this Node; empty: the host name.")] = ""
    bind_address: Annotated[
        str,
        _doc("Overrides the node IP of its family, which becomes the primary family, unless it is 0.0.0.0 or ::."),
    ] = ""
    healthz_bind_address: Annotated[str, _doc("Address and port of /healthz and /livez.")] = ""
    metrics_bind_address: Annotated[str, _doc("Address and port of /metrics.")] = ""
    bind_address_hard_fail: Annotated[
        bool,
        _doc("Exit if one of these two addresses cannot be bound; otherwise the bind is retried every 5 s."),
    ] = False
    enable_profiling: Annotated[bool, _doc("Serve /debug/flags/v on the metrics server; profiles are not served.")] = (
        False
    )
    show_hidden_metrics_for_version: Annotated[str, _doc("Accepted without effect: no metric is hidden.")] = ""
    mode: Annotated[
        str,
        GoType("v1alpha1.ProxyMode"),
        _doc('Which mode of kube-proxy to follow: iptables (also ""), nftables, or ipvs (docs/ipvs-mode.md).'),
    ] = ""
    iptables: Annotated[IPTables, _doc("Settings of mode iptables.")] = IPTables()
    ipvs: Annotated[IPVS, _doc("Settings of mode ipvs.")] = IPVS()
    nftables: Annotated[NFTables, _doc("Settings of mode nftables.")] = NFTables()
    winkernel: Annotated[WinKernel, _doc("Settings of Windows.")] = WinKernel()
    detect_local_mode: Annotated[
        str,
        GoType("v1alpha1.LocalMode"),
        _doc("How traffic of local pods is detected."),
    ] = ""
    detect_local: Annotated[DetectLocal, _doc("Settings of detectLocalMode.")] = DetectLocal()
    cluster_cidr: Annotated[
        str, _doc("Mode ClusterCIDR: packets with a source in these ranges are from pods.", "clusterCIDR")
    ] = ""
    node_port_addresses: Annotated[
        list[str] | None, _doc("Node addresses that serve NodePorts: CIDRs, or primary.")
    ] = None
    oom_score_adj: Annotated[int | None, _doc("Written to /proc/self/oom_score_adj.")] = None
    conntrack: Annotated[Conntrack, _doc("Settings of connection tracking.")] = Conntrack()
    config_sync_period: Annotated[
        Duration, _doc("Accepted without effect: the agent watches the API server and needs no periodic resync.")
    ] = 0
    port_range: Annotated[str, _doc(_NONE)] = ""
    windows_run_as_service: Annotated[bool, _doc(_NONE)] = False


def written_fields(section: BaseModel) -> Iterator[tuple[str, Any, Reader | None]]:
    """The fields of ``section`` that are written to a file: name, value and reader (spec/configuration §6)."""
    for name, info in type(section).model_fields.items():
        key = info.alias or name
        value = getattr(section, name)
        if value or key not in _OMITTED:
            yield key, value, next((entry for entry in info.metadata if isinstance(entry, Reader)), None)
