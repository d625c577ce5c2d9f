# SPDX-License-Identifier: Apache-2.0
"""The document ``datapath.pyebpf-proxy.io/v1alpha1 DatapathConfiguration``: options that kube-proxy does not have.

``datapath_config`` reads files by this model. docs/datapath-configuration.md is generated from the descriptions.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WrapValidator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from pyebpf_proxy.config import gotext
from pyebpf_proxy.config.addresses import Network, parse_cidr
from pyebpf_proxy.config.flag_table import DEFAULT_DIRECTORY

API_VERSION = "datapath.pyebpf-proxy.io/v1alpha1"
KIND = "DatapathConfiguration"
_DEVICE = re.compile(r"[^\s/:]{1,15}")


class Size(NamedTuple):
    """The bounds of a map's size, and its memory: bytes for each possible entry, and more bytes for each entry in use.

    The numbers follow from the hash maps, arrays and tries of 64-bit kernels. ``bpftool map`` shows the exact memory.
    """

    least: int
    most: int
    empty_bytes: int
    used_bytes: int

    def check(self, value: int) -> int:
        """Return ``value``; ValueError if it is out of bounds."""
        if not self.least <= value <= self.most:
            raise ValueError(f"must be from {self.least} to {self.most}, not {value}")
        return value


def _size(text: str, size: Size) -> Any:
    return Field(description=text, json_schema_extra={"size": list(size)})


def _checked(size: Size) -> Any:
    return AfterValidator(size.check)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


_MANY = 1 << 22
# By type of map. Where entries are allocated on demand, an unused entry costs only its bucket.
_SMALL = Size(256, _MANY, 16, 64)
_WIDE = Size(256, _MANY, 16, 96)
_NAMES = Size(256, _MANY, 16, 256)
_WORDS = Size(256, _MANY, 8, 0)
_READY = Size(256, _MANY, 88, 0)
_TRIE = Size(256, _MANY, 0, 64)
_NODE = Size(64, 1 << 16, 16, 64)
_AFFINITIES = Size(1024, _MANY, 104, 0)
_PEERS4 = Size(1024, _MANY, 88, 0)
_PEERS6 = Size(1024, _MANY, 120, 0)
_FLOWS = Size(1024, _MANY, 96, 0)
_SETS = Size(1024, _MANY, 160, 0)
_ENTRIES = Size(1024, _MANY, 200, 0)
_FRAGMENTS = Size(1024, 1 << 16, 112, 0)
_PODS = Size(1024, 1 << 18, 112, 0)
_LEFT = Size(1024, 1 << 20, 88, 0)
_EXCLUDED = Size(64, 1 << 16, 0, 64)

_IPVS = "Created only in mode ipvs with scheduler "
_ALL = "Created only with socketLB: all. "
_OLDEST_GO = " When the map is full, the least recently used entry is evicted."


class Maps(_Section):
    """Section ``maps``: maximum number of entries of each map. The names are those of bpf/maps.h in camelCase."""

    frontends4: Annotated[int, _checked(_SMALL), _size("IPv4 frontends: addresses and ports of Services.", _SMALL)] = (
        65536
    )
    frontends6: Annotated[int, _checked(_SMALL), _size("IPv6 frontends: addresses and ports of Services.", _SMALL)] = (
        65536
    )
    services: Annotated[int, _checked(_WORDS), _size("Service ports of both families, plus one.", _WORDS)] = 65536
    service_names: Annotated[
        int, _checked(_NAMES), _size("Names of the service ports: as large as services.", _NAMES)
    ] = 65536
    service_configs: Annotated[
        int,
        _checked(_WIDE),
        _size("Versions of service ports: up to two for each service port while it changes.", _WIDE),
    ] = 131072
    slots: Annotated[
        int,
        _checked(_WORDS),
        _size(
            "Slots in the endpoint lists. Each endpoint is in a cluster list, local endpoints also in a local list.",
            _WORDS,
        ),
    ] = 524288
    backends4: Annotated[int, _checked(_READY), _size("IPv4 backends, counted for each service port.", _READY)] = 131072
    backends6: Annotated[int, _checked(_WIDE), _size("IPv6 backends, counted for each service port.", _WIDE)] = 131072
    endpoints4: Annotated[
        int, _checked(_READY), _size("Distinct IPv4 endpoints; those of UDP service ports count twice.", _READY)
    ] = 131072
    endpoints6: Annotated[
        int, _checked(_WIDE), _size("Distinct IPv6 endpoints; those of UDP service ports count twice.", _WIDE)
    ] = 131072
    affinities: Annotated[
        int, _checked(_AFFINITIES), _size("Clients of service ports with session affinity." + _OLDEST_GO, _AFFINITIES)
    ] = 65536
    source_ranges4: Annotated[int, _checked(_TRIE), _size("IPv4 loadBalancerSourceRanges.", _TRIE)] = 65536
    source_ranges6: Annotated[int, _checked(_TRIE), _size("IPv6 loadBalancerSourceRanges.", _TRIE)] = 65536
    node_addresses4: Annotated[int, _checked(_NODE), _size("IPv4 addresses of the node.", _NODE)] = 4096
    node_addresses6: Annotated[int, _checked(_NODE), _size("IPv6 addresses of the node.", _NODE)] = 4096
    devices: Annotated[int, _checked(_NODE), _size("Network interfaces of the node.", _NODE)] = 4096
    bridged_fragments: Annotated[
        int, _checked(_FRAGMENTS), _size("Fragmented replies between ports of a bridge." + _OLDEST_GO, _FRAGMENTS)
    ] = 1024
    socket_revnat4: Annotated[
        int, _checked(_PEERS4), _size("Sockets of the node that use a Service over IPv4." + _OLDEST_GO, _PEERS4)
    ] = 16384
    socket_revnat6: Annotated[
        int, _checked(_PEERS6), _size("Sockets of the node that use a Service over IPv6." + _OLDEST_GO, _PEERS6)
    ] = 16384
    socket_flows: Annotated[
        int, _checked(_FLOWS), _size("Services that unconnected UDP sockets of the node use." + _OLDEST_GO, _FLOWS)
    ] = 8192
    pod_sources: Annotated[
        int, _checked(_PODS), _size(_ALL + "Pods of the node, for each family." + _OLDEST_GO, _PODS)
    ] = 4096
    deferred_sockets: Annotated[
        int, _checked(_LEFT), _size(_ALL + "Sockets of pods that have not sent their first packet." + _OLDEST_GO, _LEFT)
    ] = 4096
    excluded_pods: Annotated[int, _checked(_EXCLUDED), _size(_ALL + "Ranges of socketLBExclude.", _EXCLUDED)] = 1024
    connections: Annotated[
        int, _checked(_WIDE), _size(_IPVS + "lc, wlc, sed, nq, lblc or lblcr: endpoints of both families.", _WIDE)
    ] = 262144
    choices: Annotated[
        int, _checked(_SMALL), _size(_IPVS + "lc, wlc, sed, nq, lblc or lblcr: endpoints of both families.", _SMALL)
    ] = 262144
    localities: Annotated[
        int, _checked(_AFFINITIES), _size(_IPVS + "lblc: addresses of Services." + _OLDEST_GO, _AFFINITIES)
    ] = 65536
    locality_sets: Annotated[
        int, _checked(_SETS), _size(_IPVS + "lblcr: addresses of Services." + _OLDEST_GO, _SETS)
    ] = 65536


def _path(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(f"must be an absolute path, not {gotext.quote(text)}")
    return text


def _socket_lb(value: object) -> object:
    # YAML reads an unquoted off as a boolean.
    if value is False:
        return "off"
    return value


def _fast_path(value: object, _: object) -> bool | str:
    if isinstance(value, bool) or value == "auto":
        return value
    raise PydanticCustomError("fast_path", "auto, true or false")


def _device(text: str) -> str:
    if not _DEVICE.fullmatch(text) or text in (".", ".."):
        raise ValueError(f"must be the name of a network device, not {gotext.quote(text)}")
    return text


def _auto(value: object) -> object:
    return ["*"] if value == "auto" else value


def _network(value: object) -> Network:
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "a string")
    network = parse_cidr(value)
    if network is None:
        raise ValueError(f"must be a CIDR such as 10.0.0.0/8 or fd00::/48, not {gotext.quote(value)}")
    address = value.partition("/")[0]
    if network.network_address != ipaddress.ip_address(address):
        raise ValueError(f"{gotext.quote(value)} has host bits set; did you mean {network}?")
    return network


_Devices = list[Annotated[str, AfterValidator(_device)]]
_Networks = list[Annotated[Network, PlainValidator(_network)]]


class DatapathConfiguration(_Section):
    """The whole document."""

    api_version: Annotated[Literal["datapath.pyebpf-proxy.io/v1alpha1"], Field(description="Always this value.")] = (
        "datapath.pyebpf-proxy.io/v1alpha1"
    )
    kind: Annotated[Literal["DatapathConfiguration"], Field(description="Always this value.")] = "DatapathConfiguration"
    lane: Annotated[
        Literal["auto", "netfilter"],
        Field(description="Deprecated: accepted without effect, with a warning. The same holds for the flag --lane."),
    ] = "auto"
    directory: Annotated[
        str,
        AfterValidator(_path),
        Field(
            description="Run folder. It determines the pins, the nftables table and the lock: instances with"
            " different directories share nothing. The flag --directory overrides it."
        ),
    ] = DEFAULT_DIRECTORY
    manifests: Annotated[
        str | None,
        AfterValidator(lambda text: text if text is None else _path(text)),
        Field(
            description="Services, EndpointSlices, Nodes and ServiceCIDRs are read from the files of this directory"
            " instead of the API server. The flag --manifests overrides it."
        ),
    ] = None
    socket_lb: Annotated[
        Literal["node", "all", "off"],
        BeforeValidator(_socket_lb),
        Field(
            alias="socketLB",
            description="node: programs on the root cgroup translate the node's own connections to Services at"
            " connect and sendmsg. all: the same, and also connections of pods that need no masquerading. off: no"
            " programs on the cgroup (those of a previous run are detached); the nftables table serves the node's own"
            " connections, as it always does for SCTP.",
        ),
    ] = "node"
    socket_lb_exclude: Annotated[
        _Networks,
        Field(
            alias="socketLBExclude",
            description="With socketLB: all, CIDRs of pods whose connections the tc programs translate, and not the"
            " socket programs. For example, pods of a service mesh that needs to see the Service address.",
        ),
    ] = []
    external_ips: Annotated[
        Literal["checked", "strict", "unchecked"],
        Field(
            alias="externalIPs",
            description="Which externalIPs of a Service are accepted. checked: not in a ServiceCIDR, not a NodePort of"
            " another namespace's Service on a Node's address, not where the kubelet, an API server or a health check"
            " listens. strict: also no address of a Node; with an API server, the agent knows only the addresses of its"
            " own Node. unchecked: all, as in kube-proxy. A refused address is logged and gets an Event"
            " (objects.md).",
        ),
    ] = "checked"
    fast_path: Annotated[
        bool | Literal["auto"],
        WrapValidator(_fast_path),
        Field(
            description="auto: the tc programs translate and redirect packets of flows to Services, past the kernel's"
            " FORWARD chain, unless something on this node must see every packet (fast-path.md). true: the same, but"
            " rules of other programs close nothing; a warning names them, and they miss packets. false: every packet"
            " takes the slow path."
        ),
    ] = "auto"
    fast_path_excluded_devices: Annotated[
        _Devices,
        Field(
            description="Interfaces whose qdiscs, filters or rules must see every packet: packets that enter or leave"
            " there never take the fast path."
        ),
    ] = []
    fast_path_entries: Annotated[
        int | None,
        AfterValidator(lambda value: value if value is None else _ENTRIES.check(value)),
        Field(
            description="Entries of the flow table, two for each flow. When it is full, new flows take the slow path."
            " Default: a power of two from 4096 to 131072, chosen so that a full table takes about 1/512 of the"
            " machine's memory."
        ),
    ] = None
    xdp_devices: Annotated[
        _Devices,
        BeforeValidator(_auto),
        Field(
            description="Interfaces on which packets from outside arrive. An XDP program handles packets there before"
            " the kernel allocates an skb (xdp.md). `*` in the list means every physical interface whose driver"
            " supports XDP; auto instead of a list means the same. XDP needs the fast path: without it, the"
            " program is not attached."
        ),
    ] = []
    xdp_mode: Annotated[
        Literal["native", "generic"],
        Field(
            description="native: XDP in the interface's driver, none if the driver does not support it. generic: on"
            " any interface; slower than tc alone, for tests."
        ),
    ] = "native"
    pod_network: Annotated[
        _Networks,
        Field(description="Deprecated: accepted without effect, with a warning."),
    ] = []
    maps: Annotated[Maps, Field(description="Sizes of the BPF maps.")] = Maps()


def without_effect(own: DatapathConfiguration) -> list[str]:
    """The deprecated fields that the document sets, by their names in the file."""
    fields = type(own).model_fields
    return [fields[name].alias or name for name in ("lane", "pod_network") if name in own.model_fields_set]
