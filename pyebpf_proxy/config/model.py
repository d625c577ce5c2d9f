# SPDX-License-Identifier: Apache-2.0
"""The document ``kubeproxy.config.k8s.io/v1alpha1 KubeProxyConfiguration``, field by field (spec/configuration §2).

A value that the file does not name has Go's zero value here (``None`` for pointer fields); ``defaults`` turns the
zeroes into defaults, because kube-proxy's rules do (§1.3). Types are strict as in Go: a quoted number is no number.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

from pyebpf_proxy.config import durations

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"


def _duration(value: object) -> int:
    if value is None:
        raise ValueError('time: invalid duration ""')
    if not isinstance(value, str):
        raise ValueError(f'expected a duration such as "30s", got {value!r}')
    return durations.parse(value)


def _flush_frequency(value: object) -> int:
    # The one duration that may be a bare number: nanoseconds (§2.9).
    return value if isinstance(value, int) and not isinstance(value, bool) else _duration(value)


def _whole(value: object) -> object:
    # YAML's 5.0 and 1e1 are integers to Go, because JSON knows only numbers.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Duration = Annotated[int, BeforeValidator(_duration), PlainSerializer(durations.format)]
Int32 = Annotated[int, BeforeValidator(_whole), Field(ge=-(1 << 31), lt=1 << 31)]
UInt32 = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=1 << 32)]


class Section(BaseModel):
    """Common rules: frozen, strict types, camelCase names in the file; unknown fields are left to ``loader``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ClientConnection(Section):
    """How the API server is talked to (§2.2)."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0.0
    burst: Int32 = 0


class IPTables(Section):
    """Section ``iptables`` (§2.3); in force in modes "" and iptables."""

    masquerade_bit: Int32 | None = None
    masquerade_all: bool = False
    localhost_node_ports: bool | None = None
    sync_period: Duration = 0
    min_sync_period: Duration = 0


class IPVS(Section):
    """Section ``ipvs`` (§2.4). Accepted; the scheduler and the ipvs kernel module are not used."""

    sync_period: Duration = 0
    min_sync_period: Duration = 0
    scheduler: str = ""
    exclude_cidrs: Annotated[list[str] | None, Field(alias="excludeCIDRs")] = None
    strict_arp: Annotated[bool, Field(alias="strictARP")] = False
    tcp_timeout: Duration = 0
    tcp_fin_timeout: Duration = 0
    udp_timeout: Duration = 0


class NFTables(Section):
    """Section ``nftables`` (§2.5); in force in mode nftables."""

    masquerade_bit: Int32 | None = None
    masquerade_all: bool = False
    sync_period: Duration = 0
    min_sync_period: Duration = 0


class WinKernel(Section):
    """Section ``winkernel`` (§2.6): Windows only, accepted and ignored."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: Annotated[bool, Field(alias="enableDSR")] = False
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class DetectLocal(Section):
    """Section ``detectLocal`` (§2.7)."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Conntrack(Section):
    """Section ``conntrack`` (§2.10)."""

    max_per_core: Int32 | None = None
    min: Int32 | None = None
    tcp_established_timeout: Duration | None = None
    tcp_close_wait_timeout: Duration | None = None
    tcp_be_liberal: bool = False
    udp_timeout: Duration = 0
    udp_stream_timeout: Duration = 0


class VModule(Section):
    """One entry of ``logging.vmodule``."""

    file_pattern: str = ""
    verbosity: UInt32 = 0


class OutputOptions(Section):
    """``logging.options.text`` and ``.json``."""

    split_stream: bool = False
    info_buffer_size: str | Int32 = "0"


class LoggingOptions(Section):
    """``logging.options``."""

    text: OutputOptions = OutputOptions()
    json_: Annotated[OutputOptions, Field(alias="json")] = OutputOptions()


class Logging(Section):
    """Section ``logging`` (§2.9)."""

    format: str = ""
    flush_frequency: Annotated[int, BeforeValidator(_flush_frequency), PlainSerializer(durations.format)] = 0
    verbosity: UInt32 = 0
    vmodule: list[VModule] | None = None
    options: LoggingOptions = LoggingOptions()


class KubeProxyConfiguration(Section):
    """The whole document (§2.1)."""

    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = ""
    healthz_bind_address: str = ""
    metrics_bind_address: str = ""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: IPTables = IPTables()
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: WinKernel = WinKernel()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: Annotated[str, Field(alias="clusterCIDR")] = ""
    node_port_addresses: list[str] | None = None
    oom_score_adj: Int32 | None = None
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = 0
    port_range: str = ""
    windows_run_as_service: bool = False


def field_type(section: type[BaseModel], name: str) -> Any:
    """The annotation of the field that the file calls ``name``, or None if there is no such field."""
    for key, info in section.model_fields.items():
        if name == (info.alias or key):
            return info.annotation
    return None
