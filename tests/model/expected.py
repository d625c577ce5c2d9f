# SPDX-License-Identifier: Apache-2.0
"""The expected contents of the kernel, computed slowly and from scratch, for any state of objects, node and settings.

Written from docs/spec/service-semantics.md, docs/objects.md and docs/data-plane.md. It shares nothing with the agent:
no function, no constant.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tests.model.kernel import Backend, Frontend, Link, Name, Policies, Port

Object = Mapping[str, Any]
Addresses = dict[int, str]
# The streams repeat the same few texts.
ip_address = lru_cache(maxsize=4096)(ipaddress.ip_address)
ip_network = lru_cache(maxsize=4096)(ipaddress.ip_network)
ANY = {4: "0.0.0.0", 6: "::"}
#: The kinds of addresses by precedence, the first one wins (docs/objects.md).
RANKS = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalIP")


class Settings(NamedTuple):
    """The configuration of one run of the agent."""

    node: str = "node1"
    mode: str = "iptables"
    node_port_addresses: tuple[str, ...] = ()
    external_ips: str = "checked"
    fast_path: bool = True
    socket_lb: str = "node"
    detect: str = "ClusterCIDR"


class World(NamedTuple):
    """What the agent knows: valid objects by kind, and the names in its settings."""

    objects: Mapping[tuple[str, str, str], Object]
    settings: Settings


def family_of(text: str) -> int:
    """4 or 6."""
    return ip_address(text).version


def is_address(text: str) -> bool:
    """Whether an object may have this text as an external address (docs/objects.md, bad input)."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_loopback or address.is_multicast or text == "255.255.255.255")


def of_kind(world: World, kind: str) -> dict[tuple[str, str], Object]:
    """Objects of a kind by namespace and name."""
    return {key[1:]: value for key, value in world.objects.items() if key[0] == kind}


def own_node(world: World) -> Object | None:
    """This node's Node object."""
    return of_kind(world, "Node").get(("", world.settings.node))


def node_ips(node: Object | None) -> Addresses:
    """The addresses of a Node that count as its own, by family: InternalIP before ExternalIP."""
    found: Addresses = {}
    for wanted in ("InternalIP", "ExternalIP"):
        for each in (node or {}).get("status", {}).get("addresses", ()):
            if each["type"] == wanted:
                found.setdefault(family_of(each["address"]), each["address"])
    return found


def service_cidrs(world: World) -> list[Any]:
    """The ranges of ClusterIPs."""
    return [ip_network(text) for value in of_kind(world, "ServiceCIDR").values() for text in value["spec"]["cidrs"]]


def is_served(service: Object) -> bool:
    """§1.1."""
    spec, labels = service["spec"], service["metadata"].get("labels", {})
    return (
        bool(spec.get("clusterIP"))
        and spec["clusterIP"] != "None"
        and spec.get("type") != "ExternalName"
        and "service.kubernetes.io/service-proxy-name" not in labels
    )


def cluster_ip(service: Object, family: int) -> str:
    """The ClusterIP of a family; empty: the Service does not exist for it."""
    spec = service["spec"]
    addresses = spec.get("clusterIPs") or [spec["clusterIP"]]
    families = spec.get("ipFamilies") or [f"IPv{family_of(text)}" for text in addresses]
    return next((a for a, name in zip(addresses, families, strict=False) if name == f"IPv{family}"), "")


class Draft(NamedTuple):
    """A service port with all addresses that its Service claims."""

    name: Name
    created: str
    service: Object
    frontends: dict[Frontend, None]


def drafts(world: World) -> list[Draft]:
    """Every service port of every served Service."""
    found = []
    for (namespace, name), service in of_kind(world, "Service").items():
        if not is_served(service):
            continue
        created = service["metadata"].get("creationTimestamp", "")
        for family in (4, 6):
            own = cluster_ip(service, family)
            if not own:
                continue
            for port in service["spec"].get("ports", ()):
                protocol = port.get("protocol", "TCP")
                frontends = [Frontend("ClusterIP", own, port["port"])]
                if port.get("nodePort"):
                    frontends.append(Frontend("NodePort", ANY[family], port["nodePort"]))
                taken = {own}
                for kind, addresses in (("LoadBalancer", vips(service)), ("ExternalIP", externals(service))):
                    for address in addresses:
                        if family_of(address) == family and address not in taken:
                            taken.add(address)
                            frontends.append(Frontend(kind, address, port["port"]))
                key = (namespace, name, port.get("name", ""), protocol, family)
                found.append(Draft(key, created, service, dict.fromkeys(frontends)))
    return found


def vips(service: Object) -> list[str]:
    """Load balancer addresses that are served, §1.3."""
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    return [e["ip"] for e in ingress if e.get("ip") and e.get("ipMode", "VIP") == "VIP" and is_address(e["ip"])]


def externals(service: Object) -> list[str]:
    """External IPs that can be parsed."""
    return [text for text in service["spec"].get("externalIPs", ()) if is_address(text)]


def given(world: World) -> dict[Name, set[Frontend]]:
    """Resolves address conflicts: the frontends that each service port gets (docs/objects.md)."""
    every = drafts(world)
    node_addresses = {
        each["address"] for node in of_kind(world, "Node").values() for each in node["status"]["addresses"]
    }
    networks = service_cidrs(world)
    claims: dict[tuple[int, str, str, int], list[tuple[Any, Draft, Frontend]]] = {}

    def claim(draft: Draft, frontend: Frontend) -> None:
        where = draft.name[4], draft.name[3], frontend.address, frontend.port
        rank = RANKS.index(frontend.kind), draft.created or "~", draft.name
        claims.setdefault(where, []).append((rank, draft, frontend))

    def holder(where: tuple[int, str, str, int]) -> Draft | None:
        mine = claims.get(where)
        return min(mine, key=lambda each: each[0])[1] if mine else None

    for draft in every:
        for frontend in draft.frontends:
            if frontend.kind == "NodePort":
                claim(draft, frontend)
    for draft in every:
        namespace, _, _, protocol, family = draft.name
        for frontend in draft.frontends:
            if frontend.kind == "NodePort":
                continue
            if world.settings.external_ips != "unchecked" and frontend.kind != "ClusterIP":
                on_node = frontend.address in node_addresses
                other = holder((family, protocol, ANY[family], frontend.port)) if on_node else None
                if other is not None and other.name[0] != namespace:
                    continue
                if frontend.kind == "ExternalIP":
                    if on_node and world.settings.external_ips == "strict":
                        continue
                    if any(ip_address(frontend.address) in network for network in networks):
                        continue
            claim(draft, frontend)
    found: dict[Name, set[Frontend]] = {draft.name: set() for draft in every}
    for mine in claims.values():
        _, draft, frontend = min(mine, key=lambda each: each[0])
        found[draft.name].add(frontend)
    return found


class Endpoint(NamedTuple):
    """An endpoint of a service port."""

    address: str
    port: int
    ready: bool
    serving: bool
    terminating: bool
    local: bool
    zones: frozenset[str]
    nodes: frozenset[str]

    @property
    def last_resort(self) -> bool:
        return self.serving and self.terminating


def endpoints(world: World, name: Name) -> list[Endpoint]:
    """§1.4: merged, one for each address and port."""
    namespace, service, port_name, protocol, family = name
    found: dict[tuple[str, int], Endpoint] = {}
    for (where, _), each in sorted(of_kind(world, "EndpointSlice").items()):
        labels = each["metadata"].get("labels", {})
        if where != namespace or labels.get("kubernetes.io/service-name") != service:
            continue
        if "service.kubernetes.io/headless" in labels or each["addressType"] != f"IPv{family}":
            continue
        for port in each.get("ports", ()):
            if (port.get("name", ""), port.get("protocol", "TCP")) != (port_name, protocol) or not port.get("port"):
                continue
            for raw in each.get("endpoints", ()):
                made = endpoint(raw, port["port"], world.settings.node)
                if made is None:
                    continue
                at = made.address, made.port
                if not (made.terminating and at in found):
                    found[at] = made
    return list(found.values())


def endpoint(raw: Object, port: int, node: str) -> Endpoint | None:
    """One endpoint of a slice; None: it is left out."""
    if not raw.get("addresses") or not is_address(raw["addresses"][0]) or ip_address(raw["addresses"][0]).is_link_local:
        return None
    conditions, hints = raw.get("conditions") or {}, raw.get("hints") or {}
    ready, serving = conditions.get("ready"), conditions.get("serving")
    return Endpoint(
        str(ip_address(raw["addresses"][0])),
        port,
        ready is not False,
        serving is not False,
        bool(conditions.get("terminating")),
        raw.get("nodeName") == node,
        frozenset(hint["name"] for hint in hints.get("forZones", ())),
        frozenset(hint["name"] for hint in hints.get("forNodes", ())),
    )


def near(ready: list[Endpoint], node: str, zone: str) -> list[Endpoint]:
    """The topology filter of §3."""
    if ready and all(each.nodes for each in ready) and any(node in each.nodes for each in ready):
        return [each for each in ready if node in each.nodes]
    if zone and ready and all(each.zones for each in ready) and any(zone in each.zones for each in ready):
        return [each for each in ready if zone in each.zones]
    return ready


def ports(world: World) -> dict[Name, Port]:
    """Every service port with the expected contents of the maps."""
    frontends = given(world)
    node = own_node(world)
    zone = (node or {}).get("metadata", {}).get("labels", {}).get("topology.kubernetes.io/zone", "")
    ips = node_ips(node)
    found = {}
    for draft in drafts(world):
        spec, family = draft.service["spec"], draft.name[4]
        # §1.3, for this family. A VIP that equals the ClusterIP counts only as ClusterIP: no packet uses its lists.
        vip = any(family_of(text) == family for text in vips(draft.service))
        reachable = any(each.kind != "ClusterIP" for each in draft.frontends)
        internal_local = spec.get("internalTrafficPolicy") == "Local"
        # For the Service: external IPs of the other family count here.
        may_be_local = spec.get("type") in ("LoadBalancer", "NodePort") or bool(spec.get("externalIPs"))
        external_local = may_be_local and spec.get("externalTrafficPolicy") == "Local"
        uses_cluster = not internal_local or reachable
        uses_local = internal_local or (external_local and reachable)
        every = endpoints(world, draft.name)
        ready = [each for each in every if each.ready]
        cluster = near(ready, world.settings.node, zone) or [each for each in every if each.last_resort]
        here = [each for each in every if each.local]
        local = [each for each in here if each.ready] or [each for each in here if each.last_resort]
        cluster, local = cluster if uses_cluster else [], local if uses_local else []
        usable = bool(cluster) or (uses_local and any(each.ready or each.last_resort for each in every))
        ranges = source_ranges(spec, family) if vip else frozenset()
        seconds = 0
        if spec.get("sessionAffinity") == "ClientIP":
            seconds = spec.get("sessionAffinityConfig", {}).get("clientIP", {}).get("timeoutSeconds", 10800)
        found[draft.name] = Port(
            frozenset(frontends[draft.name]),
            backends(cluster),
            backends(local),
            frozenset((e.address, e.port) for e in every if e.serving) if draft.name[3] == "UDP" else frozenset(),
            ranges,
            Policies(
                usable,
                internal_local,
                external_local,
                seconds,
                family in ips and any(ip_address(ips[family]) in ip_network(text) for text in ranges),
            ),
        )
    return found


def backends(chosen: Iterable[Endpoint]) -> tuple[Backend, ...]:
    """A list in the order of the maps."""
    return tuple(sorted(Backend(each.address, each.port, each.local) for each in chosen))


def source_ranges(spec: Object, family: int) -> frozenset[str]:
    """§7: the active ranges; a range that contains everything removes the restriction."""
    found = set()
    for text in spec.get("loadBalancerSourceRanges", ()):
        try:
            network = ip_network(text.strip(), strict=False)
        except ValueError:
            continue
        if network.version == family:
            found.add(str(network))
    return frozenset() if any(text.endswith("/0") for text in found) else frozenset(found)


# ---- the node ---------------------------------------------------------------------------------------------------


class NodeState(NamedTuple):
    """The expected maps and devices of the node."""

    addresses: dict[str, bool]
    #: Ifindex → index of its bridge, MAC of its bridge, whether its packets are a pod's, MTU.
    devices: dict[int, tuple[int, str, bool, int]]
    #: Ifindex → names of the agent's programs at ingress and at egress; empty: none.
    programs: dict[int, tuple[str, str]]


def node_state(world: World, links: list[Link]) -> NodeState:
    """Computed from the devices of the namespace (docs/data-plane.md, Attachment; spec/service-semantics §8)."""
    settings = world.settings
    addresses: dict[str, bool] = {}
    for link in links:
        for text in link.addresses:
            address = ip_address(text)
            if address.version == 4 and address.is_loopback:
                continue
            addresses[text] = not address.is_loopback and accepts(world, address)
    by_index = {link.index: link for link in links}
    devices: dict[int, tuple[int, str, bool, int]] = {}
    programs: dict[int, tuple[str, str]] = {}
    for link in links:
        if link.loopback or link.kind == "dummy":
            programs[link.index] = "", ""
            continue
        if link.kind == "bridge":
            programs[link.index] = "", ""
            if settings.fast_path:
                devices[link.index] = 0, bytes(6).hex(":"), False, link.mtu
            continue
        master = by_index.get(link.master)
        bridged = master is not None and master.kind == "bridge"
        seen_as = master.name if master is not None and bridged else link.name
        pod = settings.detect == "InterfaceNamePrefix" and seen_as.startswith("pod")
        if master is not None and bridged:
            devices[link.index] = master.index, master.mac, pod, link.mtu
        else:
            devices[link.index] = 0, bytes(6).hex(":"), pod, link.mtu
        ingress = "tc_bridge_port" if bridged else "tc_ethernet"
        programs[link.index] = ingress, "tc_egress" if settings.fast_path else ""
    return NodeState(addresses, devices, programs)


def accepts(world: World, address: Any) -> bool:
    """Whether an address of the node serves NodePorts (§8)."""
    cidrs = world.settings.node_port_addresses
    if cidrs == ("primary",) or (not cidrs and world.settings.mode == "nftables"):
        cidrs = tuple(node_ips(own_node(world)).values())
    networks = [ip_network(text) for text in cidrs]
    mine = [network for network in networks if network.version == address.version]
    return not mine or any(address in network for network in mine)


def nft_sets(world: World) -> dict[str, frozenset[str]]:
    """The sets of mode nftables (§9); no sets in mode iptables."""
    if world.settings.mode != "nftables":
        return {}
    found: dict[str, set[str]] = {}
    for family in (4, 6):
        for base in ("cluster_ips", "cluster_ports", "service_cidrs"):
            found[f"{base}{family}"] = set()
    for name, frontends in given(world).items():
        for each in frontends:
            if each.kind == "ClusterIP":
                found[f"cluster_ips{name[4]}"].add(each.address)
                found[f"cluster_ports{name[4]}"].add(f"{each.address} {name[3].lower()} {each.port}")
    for network in service_cidrs(world):
        found[f"service_cidrs{network.version}"].add(str(network))
    return {name: frozenset(entries) for name, entries in found.items()}
