# SPDX-License-Identifier: Apache-2.0
"""The settings that the other packages receive: the values in effect, from configuration and flags."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from pyebpf_proxy.config import addresses, durations, gates, gotext, validation
from pyebpf_proxy.config.addresses import Address, Network
from pyebpf_proxy.config.datapath_model import DatapathConfiguration
from pyebpf_proxy.config.families import FamilyValues
from pyebpf_proxy.config.flags import Flags
from pyebpf_proxy.config.kernel import KernelSettings, kernel_settings, localhost_node_ports
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.services.model import IPFamily

Scheduler = Literal["rr", "wrr", "sh", "dh", "mh", "lc", "wlc", "sed", "nq", "lblc", "lblcr"]
SocketLB = Literal["node", "all", "off"]
DetectLocalMode = Literal["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"]


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Access to the API server (spec/configuration §2.2). No kubeconfig and no URL: in-cluster configuration."""

    kubeconfig: str
    master: str
    #: Requests per second, sustained and in a burst; a negative ``qps`` sets no limit.
    qps: float
    burst: int


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings in effect. Immutable; a changed file takes effect with a restart."""

    node_name: str
    #: Services behave as in kube-proxy's nftables mode, otherwise as in its iptables mode (also for ``ipvs``).
    nft_mode: bool
    #: How endpoints are chosen in mode ipvs; None: as in the other modes, at random.
    scheduler: Scheduler | None
    masquerade_bit: int
    masquerade_all: bool
    #: Feature gate AllowServiceExternalIPs: without it external IPs of Services are not served.
    external_ips: bool
    #: Which external IPs are not served although the gate allows them (``externalIPs`` of the DatapathConfiguration).
    external_ip_check: Literal["checked", "strict", "unchecked"]
    #: First CIDR of each family of ``clusterCIDR``: sources that count as pods in mode ClusterCIDR.
    pod_cidrs: dict[IPFamily, Network]
    detect_local_mode: DetectLocalMode
    bridge_interface: str
    interface_name_prefix: str
    #: CIDRs, or only ``primary``; empty: every local address (spec/service-semantics §8).
    node_port_addresses: tuple[str, ...]
    #: Where NodePorts are served on 127.0.0.0/8 (``enum loopback_node_ports``); 0: nowhere. This and
    #: ``kernel.route_localnet`` do not hold for ``primary`` on a Node with an IPv4 address (``datapath.settings``).
    localhost_node_ports: int
    kernel: KernelSettings
    #: Seconds.
    sync_period: float
    min_sync_period: float
    #: An address that replaces the Node's own of its family; None: 0.0.0.0 or ::.
    bind_address: Address | None
    metrics_address: tuple[str, int] | None
    #: None: there is no health server.
    healthz_address: tuple[str, int] | None
    #: Whether the agent exits if one of these two addresses cannot be bound.
    bind_address_hard_fail: bool
    enable_profiling: bool
    #: Values that must fit the IP families of the Node.
    family_values: FamilyValues
    #: The removal of kube-proxy's leftovers keeps IPVS virtual servers in these ranges.
    ipvs_exclude_cidrs: tuple[Network, ...]
    directory: Path
    #: A directory of objects that replaces the API server.
    manifests: Path | None
    api: ApiServer
    #: Which connections are translated at the socket: those of the node, also those of pods, or none.
    socket_lb: SocketLB
    #: Ranges of pods whose connections are never translated at the socket.
    socket_lb_exclude: tuple[Network, ...]
    #: Size by map, for every map with a configurable size.
    map_sizes: Mapping[str, int]
    #: Whether flows may take the fast path; auto: no warning if they cannot.
    fast_path: bool | Literal["auto"]
    #: Interfaces whose packets never take the fast path.
    fast_path_excluded_devices: tuple[str, ...]
    #: Entries of the flow table; None: derived from the machine's memory.
    fast_path_entries: int | None
    #: Device names; ``*`` means every physical device whose driver supports XDP. Empty: no XDP.
    xdp_devices: tuple[str, ...]
    xdp_mode: Literal["native", "generic"]

    @property
    def masquerade_mark(self) -> int:
        """The fwmark bit of packets that are to be masqueraded."""
        return 1 << self.masquerade_bit

    @property
    def health_port(self) -> int:
        """The port of the health server, if other hosts can reach it; 0: it is on loopback, or there is none."""
        if self.healthz_address is None:
            return 0
        host, port = self.healthz_address
        address = addresses.parse_ip(host)
        return 0 if address is not None and address.is_loopback else port


def node_name(override: str) -> str:
    """The Node's name: the override, else the host's name; trimmed, lower case (spec/configuration §5.3)."""
    name = (override or socket.gethostname()).strip().lower()
    if not name:
        raise ConfigError("hostnameOverride: empty hostname is invalid")
    return name


def scheduler(text: str) -> Scheduler:
    """``ipvs.scheduler``; empty: rr. ConfigError for an unknown name.

    kube-proxy's validation accepts every name; its start fails if the kernel lacks the scheduler.
    """
    name = text or "rr"
    names = get_args(Scheduler)
    if name not in names:
        raise ConfigError(f'ipvs.scheduler: no scheduler is called "{text}"; there are {", ".join(names)}')
    return cast(Scheduler, name)


def effective(config: KubeProxyConfiguration, flags: Flags, own: DatapathConfiguration | None = None) -> Effective:
    """The settings of a completed and validated ``config``, the flags and the DatapathConfiguration ``own``.

    Flags override ``own``; None means its defaults.
    """
    own = own or DatapathConfiguration()
    nft_mode = config.mode == "nftables"
    section = config.nftables if nft_mode else config.iptables
    sync_period, min_sync_period = validation.periods(config)
    bind_address = addresses.parse_ip(config.bind_address)
    # The configuration is validated: the metrics address splits, its port is a number.
    metrics = addresses.split_host_port(config.metrics_bind_address)
    manifests = flags.manifests if "manifests" in flags.given else own.manifests
    healthz = addresses.split_host_port(config.healthz_bind_address)
    client = config.client_connection
    return Effective(
        node_name=node_name(config.hostname_override),
        nft_mode=nft_mode,
        # --cleanup does not need a scheduler.
        scheduler=scheduler(config.ipvs.scheduler) if config.mode == "ipvs" and not flags.cleanup else None,
        masquerade_bit=14 if section.masquerade_bit is None else section.masquerade_bit,
        masquerade_all=section.masquerade_all,
        external_ip_check=own.external_ips,
        external_ips=gates.apply(config.feature_gates).on("AllowServiceExternalIPs"),
        pod_cidrs=cluster_cidrs(config.cluster_cidr) if config.detect_local_mode == "ClusterCIDR" else {},
        detect_local_mode=cast(DetectLocalMode, config.detect_local_mode),
        bridge_interface=config.detect_local.bridge_interface,
        interface_name_prefix=config.detect_local.interface_name_prefix,
        node_port_addresses=tuple(config.node_port_addresses or ()),
        localhost_node_ports=localhost_node_ports(config),
        kernel=kernel_settings(config),
        sync_period=durations.seconds(sync_period),
        min_sync_period=durations.seconds(min_sync_period),
        bind_address=None if bind_address is None or bind_address.is_unspecified else bind_address,
        metrics_address=None if metrics is None else _listening(*metrics),
        healthz_address=None if healthz is None else _listening(*healthz),
        bind_address_hard_fail=config.bind_address_hard_fail,
        enable_profiling=config.enable_profiling,
        family_values=FamilyValues(
            cluster_cidrs=tuple(config.cluster_cidr.split(",")) if config.cluster_cidr else (),
            node_port_addresses=tuple(config.node_port_addresses or ()),
            exclude_cidrs=tuple(config.ipvs.exclude_cidrs or ()),
            source_vip=config.winkernel.source_vip,
            healthz_address=config.healthz_bind_address,
            metrics_address=config.metrics_bind_address,
            detect_local_mode=config.detect_local_mode,
        ),
        ipvs_exclude_cidrs=tuple(filter(None, map(addresses.parse_cidr, config.ipvs.exclude_cidrs or ()))),
        directory=Path(flags.directory if "directory" in flags.given else own.directory),
        manifests=Path(manifests) if manifests else None,
        api=ApiServer(client.kubeconfig, flags.master, client.qps, client.burst),
        socket_lb=own.socket_lb,
        socket_lb_exclude=tuple(own.socket_lb_exclude),
        map_sizes=own.maps.model_dump(),
        fast_path=own.fast_path,
        fast_path_excluded_devices=tuple(own.fast_path_excluded_devices),
        xdp_devices=tuple(dict.fromkeys(own.xdp_devices)),
        xdp_mode=own.xdp_mode,
        fast_path_entries=own.fast_path_entries,
    )


def _listening(host: str, port: str) -> tuple[str, int]:
    """A validated address, as sockets take it: without leading zeros."""
    address = addresses.parse_ip(host)
    return host if address is None else str(address), gotext.parse_uint(port, 16)


def cluster_cidrs(text: str) -> dict[IPFamily, Network]:
    """The first network of each family in a ``clusterCIDR``."""
    found: dict[IPFamily, Network] = {}
    for part in text.split(","):
        network = addresses.parse_cidr(part)
        if network is not None:
            found.setdefault(IPFamily(network.version), network)
    return found
