# SPDX-License-Identifier: Apache-2.0
"""The document ``kubeproxy.config.k8s.io/v1alpha1 KubeProxyConfiguration``, field by field (spec/configuration §2).

A value that the file does not name has Go's zero value here (``None`` for pointer fields); ``defaults`` turns the
zeroes into defaults, because kube-proxy's rules do (§1.3). ``decode`` reads files by these types; the descriptions
say what a field does here, and docs/configuration.md is made of them.
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
    """Values with a reader of their own, where the plain type does not say enough."""

    DURATION = "duration"  # nanoseconds
    POINTER_DURATION = "*duration"
    FLUSH_FREQUENCY = "duration or integer nanoseconds"
    QUANTITY = "quantity"  # kept as its canonical text


class GoType(NamedTuple):
    """What Go calls the type of a field, where it is not the usual name, and the struct embedded between."""

    name: str
    embedded: str = ""


class FlushFrequency(NamedTuple):
    """The one duration that may be a bare number in a file, and is written as it was given."""

    nanoseconds: int
    as_text: bool = True


#: Left out of what is written when they hold nothing.
_OMITTED = frozenset(("featureGates", "windowsRunAsService", "vmodule", "splitStream"))

Duration = Annotated[int, Reader.DURATION]
PointerDuration = Annotated[int | None, Reader.POINTER_DURATION]


def _says(text: str, alias: str | None = None) -> object:
    return Field(description=text, alias=alias) if alias else Field(description=text)


class Section(BaseModel):
    """Common rules: frozen, strict types, camelCase names in the file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)
    go_name: ClassVar[str]
    go_package: ClassVar[str] = "v1alpha1"


_PERIOD = "Everything is compared with the kernel at least this often."
_MIN_PERIOD = "Changes are gathered for this long between two syncs; the first after a pause is written at once."
_MASQUERADE_ALL = "All traffic to Service addresses is masqueraded."
_NONE = "No effect."
_IPVS = "Accepted; there is no IPVS underneath."


class ClientConnection(Section):
    """How the API server is talked to (§2.2)."""

    go_name = "ClientConnectionConfiguration"
    kubeconfig: Annotated[
        str, _says("Kubeconfig of the API server; empty, and no --master: as a pod of its cluster.")
    ] = ""
    accept_content_types: Annotated[str, _says("Accepted; objects are asked for as JSON.")] = ""
    content_type: Annotated[str, _says("Accepted; objects are asked for as JSON.")] = ""
    qps: Annotated[float, _says("Requests per second to the API server, in the long run; negative: no limit.")] = 0.0
    burst: Annotated[int, _says("Requests that may go at once.")] = 0


class IPTables(Section):
    """Section ``iptables`` (§2.3); in force in modes "" and iptables."""

    go_name = "KubeProxyIPTablesConfiguration"
    masquerade_bit: Annotated[
        int | None, _says("The packet mark's bit that asks for masquerading; also in mode ipvs.")
    ] = None
    masquerade_all: Annotated[bool, _says(_MASQUERADE_ALL + " Also in mode ipvs.")] = False
    localhost_node_ports: Annotated[
        bool | None, _says("NodePorts answer on 127.0.0.0/8; in mode iptables route_localnet is set to 1 for it.")
    ] = None
    sync_period: Annotated[Duration, _says(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _says(_MIN_PERIOD)] = 0


class IPVS(Section):
    """Section ``ipvs`` (§2.4); in force in mode ipvs."""

    go_name = "KubeProxyIPVSConfiguration"
    sync_period: Annotated[Duration, _says(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _says(_MIN_PERIOD)] = 0
    scheduler: Annotated[
        str,
        _says(
            "How an endpoint is chosen in mode ipvs: rr (also empty), wrr, sh, dh, mh,"
            " or by connections lc, wlc, sed, nq, lblc, lblcr (docs/ipvs-mode.md)."
        ),
    ] = ""
    exclude_cidrs: Annotated[
        list[str] | None,
        _says(
            "Ranges of others: when what kube-proxy left is removed, virtual servers there stay, and addresses on"
            " kube-ipvs0. In every mode.",
            "excludeCIDRs",
        ),
    ] = None
    strict_arp: Annotated[
        bool, _says("arp_ignore is set to 1 and arp_announce to 2; false leaves both alone.", "strictARP")
    ] = False
    tcp_timeout: Annotated[
        Duration, _says("nf_conntrack_tcp_timeout_established, over conntrack's; 0: left to that.")
    ] = 0
    tcp_fin_timeout: Annotated[Duration, _says("nf_conntrack_tcp_timeout_fin_wait; 0: left alone.")] = 0
    udp_timeout: Annotated[
        Duration, _says("nf_conntrack_udp_timeout and _udp_timeout_stream, over conntrack's; 0: left to those.")
    ] = 0


class NFTables(Section):
    """Section ``nftables`` (§2.5); in force in mode nftables."""

    go_name = "KubeProxyNFTablesConfiguration"
    masquerade_bit: Annotated[int | None, _says("The packet mark's bit that asks for masquerading.")] = None
    masquerade_all: Annotated[bool, _says(_MASQUERADE_ALL)] = False
    sync_period: Annotated[Duration, _says(_PERIOD)] = 0
    min_sync_period: Annotated[Duration, _says(_MIN_PERIOD)] = 0


class WinKernel(Section):
    """Section ``winkernel`` (§2.6): Windows only, accepted and ignored."""

    go_name = "KubeProxyWinkernelConfiguration"
    network_name: Annotated[str, _says(_NONE)] = ""
    source_vip: Annotated[str, _says(_NONE)] = ""
    enable_dsr: Annotated[bool, _says(_NONE, "enableDSR")] = False
    root_hns_endpoint_name: Annotated[str, _says(_NONE)] = ""
    forward_health_check_vip: Annotated[bool, _says(_NONE)] = False


class DetectLocal(Section):
    """Section ``detectLocal`` (§2.7)."""

    go_name = "DetectLocalConfiguration"
    bridge_interface: Annotated[str, _says("Mode BridgeInterface: what comes from this bridge is from a pod here.")] = (
        ""
    )
    interface_name_prefix: Annotated[
        str, _says("Mode InterfaceNamePrefix: what comes from such a device is from a pod here.")
    ] = ""


class Conntrack(Section):
    """Section ``conntrack`` (§2.10)."""

    go_name = "KubeProxyConntrackConfiguration"
    max_per_core: Annotated[
        int | None,
        _says("Entries of the connection table per CPU (nf_conntrack_max, and hashsize to go with it); 0: left alone."),
    ] = None
    min: Annotated[int | None, _says("At least so many entries, unless maxPerCore is 0.")] = None
    tcp_established_timeout: Annotated[
        PointerDuration, _says("nf_conntrack_tcp_timeout_established; 0: left alone.")
    ] = None
    tcp_close_wait_timeout: Annotated[PointerDuration, _says("nf_conntrack_tcp_timeout_close_wait; 0: left alone.")] = (
        None
    )
    tcp_be_liberal: Annotated[bool, _says("nf_conntrack_tcp_be_liberal is set to 1; false leaves it alone.")] = False
    udp_timeout: Annotated[Duration, _says("nf_conntrack_udp_timeout; 0: left alone.")] = 0
    udp_stream_timeout: Annotated[Duration, _says("nf_conntrack_udp_timeout_stream; 0: left alone.")] = 0


class VModule(Section):
    """One entry of ``logging.vmodule``."""

    go_name = "VModuleItem"
    go_package = "v1"
    file_pattern: Annotated[str, _says("The room (module) meant; * and ? may stand in it.")] = ""
    verbosity: Annotated[int, GoType("v1.VerbosityLevel"), _says("Its level.")] = 0


class TextOptions(Section):
    """``logging.options.text``."""

    go_name = "TextOptions"
    go_package = "v1"
    split_stream: Annotated[
        bool,
        GoType("bool", "OutputRoutingOptions"),
        _says("Accepted with the gate LoggingAlphaOptions; everything goes to standard error."),
    ] = False
    info_buffer_size: Annotated[
        str,
        Reader.QUANTITY,
        GoType("quantity", "OutputRoutingOptions"),
        _says("Accepted with the gate LoggingAlphaOptions; nothing is buffered."),
    ] = ""


class JSONOptions(TextOptions):
    """``logging.options.json``."""

    go_name = "JSONOptions"


class FormatOptions(Section):
    """``logging.options``."""

    go_name = "FormatOptions"
    go_package = "v1"
    text: Annotated[TextOptions, _says("Options of the format text.")] = TextOptions()
    json_: Annotated[JSONOptions, _says("Options of the format json.", "json")] = JSONOptions()


class Logging(Section):
    """Section ``logging`` (§2.9)."""

    go_name = "LoggingConfiguration"
    go_package = "v1"
    format: Annotated[str, _says("text or json.")] = ""
    flush_frequency: Annotated[
        FlushFrequency, Reader.FLUSH_FREQUENCY, _says("Accepted; every line is written at once.")
    ] = FlushFrequency(0, as_text=False)
    verbosity: Annotated[int, GoType("v1.VerbosityLevel"), _says("From 2 on, debug messages are written.")] = 0
    vmodule: Annotated[list[VModule] | None, GoType("v1.VModuleConfiguration"), _says("Levels of single rooms.")] = None
    options: Annotated[FormatOptions, _says("Options of the formats.")] = FormatOptions()


class KubeProxyConfiguration(Section):
    """The whole document (§2.1)."""

    go_name = "KubeProxyConfiguration"
    feature_gates: Annotated[
        dict[str, bool],
        _says("Checked as kube-proxy's. AllowServiceExternalIPs off: no external IPs. Most do nothing here."),
    ] = {}
    client_connection: Annotated[ClientConnection, _says("Access to the API server.")] = ClientConnection()
    logging: Annotated[Logging, _says("The log.")] = Logging()
    hostname_override: Annotated[str, _says("Name of this Node; empty: the host's name.")] = ""
    bind_address: Annotated[
        str, _says("Unless unspecified, the Node's address of its family, which becomes the primary one.")
    ] = ""
    healthz_bind_address: Annotated[str, _says("Where /healthz and /livez are served; empty: nowhere.")] = ""
    metrics_bind_address: Annotated[str, _says("Where /metrics is served.")] = ""
    bind_address_hard_fail: Annotated[
        bool,
        _says("An address of these two that cannot be had ends the program; otherwise it is tried again every 5 s."),
    ] = False
    enable_profiling: Annotated[bool, _says("/debug/flags/v is served beside the metrics; profiles are not.")] = False
    show_hidden_metrics_for_version: Annotated[str, _says("Accepted; no metric is hidden.")] = ""
    mode: Annotated[
        str,
        GoType("v1alpha1.ProxyMode"),
        _says('Whose behaviour is followed where the modes differ: iptables (also "" and ipvs) or nftables.'),
    ] = ""
    iptables: Annotated[IPTables, _says("Settings of mode iptables.")] = IPTables()
    ipvs: Annotated[IPVS, _says("Settings of mode ipvs.")] = IPVS()
    nftables: Annotated[NFTables, _says("Settings of mode nftables.")] = NFTables()
    winkernel: Annotated[WinKernel, _says("Settings of Windows.")] = WinKernel()
    detect_local_mode: Annotated[
        str,
        GoType("v1alpha1.LocalMode"),
        _says("How traffic of pods here is told from other traffic."),
    ] = ""
    detect_local: Annotated[DetectLocal, _says("What detectLocalMode looks for.")] = DetectLocal()
    cluster_cidr: Annotated[
        str, _says("Mode ClusterCIDR: what comes from these ranges is from a pod.", "clusterCIDR")
    ] = ""
    node_port_addresses: Annotated[
        list[str] | None, _says("Local addresses that serve NodePorts: CIDRs, or primary.")
    ] = None
    oom_score_adj: Annotated[int | None, _says("Written to /proc/self/oom_score_adj.")] = None
    conntrack: Annotated[Conntrack, _says("Settings of the kernel's connection table.")] = Conntrack()
    config_sync_period: Annotated[
        Duration, _says("Accepted; every change of the API server is followed, so nothing need be delivered twice.")
    ] = 0
    port_range: Annotated[str, _says(_NONE)] = ""
    windows_run_as_service: Annotated[bool, _says(_NONE)] = False


def written_fields(section: BaseModel) -> Iterator[tuple[str, Any, Reader | None]]:
    """Name in the file, value and reader of every field that is written when a section is (spec/configuration §6)."""
    for name, info in type(section).model_fields.items():
        key = info.alias or name
        value = getattr(section, name)
        if value or key not in _OMITTED:
            yield key, value, next((entry for entry in info.metadata if isinstance(entry, Reader)), None)
