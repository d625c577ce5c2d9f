# SPDX-License-Identifier: Apache-2.0
"""Computes service ports from objects. The cost of a change depends on what it affects, not on the cluster's size.

The state is indexed by Service: a changed slice rebuilds only the lists of its Service. Only the zone and the IPs of
this Node affect all Services.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pyebpf_proxy.services import endpoints, frontends, no_endpoints
from pyebpf_proxy.services.addresses import UNSPECIFIED
from pyebpf_proxy.services.claims import Claim, claim_of
from pyebpf_proxy.services.cluster_nodes import ClusterNodes
from pyebpf_proxy.services.disputes import Disputes
from pyebpf_proxy.services.guard import API_SERVER, Check
from pyebpf_proxy.services.health_checks import HealthCheck, HealthCheckName, HealthChecks, Touched, health_check_port
from pyebpf_proxy.services.losses import Loss, LossMessage
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts
from pyebpf_proxy.services.overlaps import Overlap, Overlaps
from pyebpf_proxy.services.shares import EndpointShares, Limits, Shares
from pyebpf_proxy.services.slices import Slices

if TYPE_CHECKING:
    from pyebpf_proxy.config.effective import Effective
    from pyebpf_proxy.kube import objects
    from pyebpf_proxy.kube.source import Change

Delta = dict[ServicePortName, ServicePort | None]

_NEVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)


class ServiceKey(NamedTuple):
    """Namespace and name of a Service."""

    namespace: str
    name: str


class _Service(msgspec.Struct, frozen=True, gc=False):
    """What is stored of a served Service: it takes less than half the memory of the whole object.

    ``ports`` have no endpoints yet. ``created`` is used only in conflicts. ``health_check_port``: 0 for none. ``over``:
    what is not served because the Service is over a limit. ``held``: set if something is not served because the
    namespace is over its limit. It is the object, or all of its ports, compressed; the Service is rebuilt from it when
    its share changes. ``unserved``: the families with external IPs that the feature gate does not allow.
    """

    ports: tuple[ServicePort, ...]
    created: str
    health_check_port: int
    over: tuple[str, ...] = ()
    held: objects.Service | bytes | None = None
    unserved: frozenset[IPFamily] = frozenset()

    def same(self, other: _Service) -> bool:
        """Whether both give the same plan."""
        mine = self.ports, self.health_check_port, self.unserved
        return mine == (other.ports, other.health_check_port, other.unserved)


def _health_checks(known: _Service | None) -> set[Claim]:
    """The health check node port of a Service, as the claims of a NodePort."""
    if known is None or not known.health_check_port:
        return set()
    families = {port.name.family for port in known.ports}
    return {Claim(UNSPECIFIED[family], known.health_check_port, Protocol.TCP) for family in families}


class PlanSettings(msgspec.Struct, frozen=True):
    """The inputs of the plan besides the objects.

    ``node_name``: the name of this Node, as in ``nodeName`` of endpoints. ``node_ip``: the packed ``bindAddress``, if
    it is not unspecified; it replaces the Node's address of that family (spec/configuration §5.3). ``external_ips``:
    whether external IPs are served (feature gate AllowServiceExternalIPs). ``check``: which of them are refused.
    ``limits``: the limits of a namespace. ``health_port``: that of the health server; 0: none.
    """

    node_name: str
    node_ip: bytes | None = None
    external_ips: bool = True
    check: Check = "checked"
    limits: Limits = Limits()
    health_port: int = 0

    @classmethod
    def of(cls, settings: Effective) -> PlanSettings:
        """Those of an agent with these settings."""
        return cls(
            settings.node_name,
            settings.bind_address.packed if settings.bind_address is not None else None,
            settings.external_ips,
            settings.external_ip_check,
            Limits.of_maps(settings.map_sizes),
            settings.health_port,
        )


class Planner:
    """The plan, updated by :meth:`update`."""

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._services: dict[ServiceKey, _Service] = {}
        self._slices = Slices(settings.node_name)
        self._shares = Shares(settings.limits)
        self._endpoint_shares = {
            family: EndpointShares(most) for family, most in zip(IPFamily, settings.limits.endpoints, strict=True)
        }
        self._nodes = ClusterNodes(settings.node_name, settings.node_ip)
        # The service ports with all addresses that they list, including those that others get.
        self._wanted: dict[ServicePortName, ServicePort] = {}
        self._health_checks = HealthChecks()
        self._overlaps = Overlaps()
        self._disputes = Disputes(settings.check, self._rank, self._wanted, self._overlaps, settings.health_port)
        self._read_nodes()

    @property
    def facts(self) -> NodeFacts:
        """The facts from the Nodes and ServiceCIDRs. The object is replaced when they change, never modified."""
        return self._nodes.facts

    @property
    def zone(self) -> str:
        """The zone of this Node; "" if it has none."""
        return self._nodes.topology.zone

    @property
    def names(self) -> KeysView[ServicePortName]:
        """All current service ports."""
        return self._wanted.keys()

    @property
    def conflicts(self) -> frozenset[Loss]:
        """Addresses at which their Services are currently not served; a copy. ``str`` returns the message."""
        return frozenset(self._disputes.losses)

    @property
    def lost(self) -> int:
        """The number of ``conflicts``."""
        return self._disputes.losses.count

    @property
    def over(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Services over a limit, and what is not served. Only for the planning thread."""
        return self._disputes.losses.over

    def over_now(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The same; a copy, safe in any thread."""
        return dict(self.over)

    def messages_now(self) -> Mapping[tuple[str, str], frozenset[LossMessage]]:
        """What is not served of each Service, as the last sync has logged it; a copy, safe in any thread."""
        return self._disputes.losses.messages_now()

    @property
    def overlaps(self) -> frozenset[Overlap]:
        """Current service addresses that are also a Node's; a copy. ``str`` returns the message."""
        return self._overlaps.all

    @property
    def shared(self) -> int:
        """The number of ``overlaps``."""
        return self._overlaps.count

    def new_messages(self) -> tuple[list[LossMessage], list[LossMessage]]:
        """Log lines about ``conflicts``, then about ``overlaps``, that have not been returned before."""
        return self._disputes.losses.new_messages(), self._overlaps.new_messages()

    def new_holders(self) -> Collection[tuple[str, str]]:
        """Services (namespace and name) that have an address which the cluster has allocated to another one since the
        last call."""
        return self._disputes.new_holders()

    def differs(self, namespace: str, name: str, service: objects.Service | None) -> bool:
        """Whether a Service differs from what the last update processed; None if it is deleted."""
        key = ServiceKey(namespace, name)
        known = self._services.get(key)
        if known is None:
            return service is not None and frontends.is_served(service)
        if service is None:
            return True
        now = self._read_service(key, service)
        return now is None or not now.same(known)

    def pods(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """By address, the pod ``namespace/name`` that a slice names. Safe in any thread."""
        return self._slices.pods(addresses)

    def specifying(self, address: bytes, port: int, protocol: Protocol, node_port: bool) -> list[ServicePortName]:
        """The service ports that specify this address and port, also if others have it. It looks at every one.

        ``node_port``: the address is one that serves NodePorts.
        """
        places = {(address, port), *([(bytes(len(address)), port)] if node_port else [])}
        return sorted(
            name
            for name, each in self._wanted.items()
            if name.protocol is protocol and any((f.address, f.port) in places for f in each.frontends)
        )

    def no_endpoints(self, namespace: str, name: str) -> Mapping[str, str]:
        """By service port of this Service, as text, why it has no usable endpoint. Safe in any thread."""
        key = ServiceKey(namespace, name)
        planned = [self._wanted.get(port.name) for port in self._ports_of(key)]
        names = [port.name for port in planned if port is not None and not port.any_endpoints]
        views = list(self._slices.of(key).values()) if names else ()
        return {str(each): why for each, why in no_endpoints.reasons(views, names).items()}

    def service_of_slice(self, namespace: str, name: str) -> tuple[str, str, str] | None:
        """Namespace and name of the Service to which a slice in use belongs, and the slice's addressType."""
        service = self._slices.service_of((namespace, name))
        return None if service is None else (*service, f"IPv{self._slices.of(service)[name].family.value}")

    def counts(self) -> dict[str, int]:
        """The number of objects in use, by kind."""
        return {
            "Service": len(self._services),
            "EndpointSlice": len(self._slices),
            "Node": self._nodes.count,
        }

    @property
    def health_checks(self) -> Mapping[HealthCheckName, HealthCheck]:
        """Health check node ports and their answers. The mapping is replaced, never modified."""
        return self._health_checks.wanted

    def get(self, name: ServicePortName) -> ServicePort | None:
        """A service port as planned: without the addresses at which it is not served."""
        wanted = self._wanted.get(name)
        lost = self._disputes.losses.of(name)
        if wanted is None or not lost:
            return wanted
        kept = tuple(frontend for frontend in wanted.frontends if claim_of(name, frontend) not in lost)
        return msgspec.structs.replace(wanted, frontends=kept)

    def oldest_first(self) -> Iterator[ServicePortName]:
        """All service ports, the oldest Service first. In this order they get map entries."""
        services = self._services
        for key in sorted(services, key=self._age):
            yield from (port.name for port in services[key].ports)

    def _age(self, key: tuple[str, str]) -> tuple[str, tuple[str, str]]:
        # Timestamps of the API server can be compared as texts. A Service without one counts as the youngest.
        known = self._services.get(ServiceKey(*key))
        return (known.created if known is not None else "") or "~", key

    def update(self, changes: Iterable[Change]) -> Delta:
        """Process changes. The result: every service port that has changed; None for a deleted one."""
        services: dict[ServiceKey, objects.Service | None] = {}
        touched: set[ServiceKey] = set()
        nodes_changed = False
        for kind, namespace, name, value in changes:
            if kind == "Service":
                services[ServiceKey(namespace, name)] = value  # type: ignore[assignment]
            elif kind == "EndpointSlice":
                touched.update(self._take_slice(namespace, name, value))  # type: ignore[arg-type]
            elif kind == "Node":
                nodes_changed |= self._nodes.take(name, value)  # type: ignore[arg-type]
            elif self._nodes.take_service_cidr(name, value):  # type: ignore[arg-type]
                self._disputes.guard.set_service_cidrs(self.facts.service_cidrs)
        if nodes_changed and self._read_nodes():
            for key, known in self._services.items():
                self._services[key] = self._with_node_ips(known)
            touched.update(self._services)

        before: Delta = {}
        other = self._share_out(services)
        for key, service in services.items():
            self._replace_service(key, self._read_service(key, service) if service is not None else None, before)
        for key in other:
            self._replace_service(key, self._with_share(key), before)
        touched.update(services, other)
        touched.update(self._share_endpoints(touched))
        for key in touched:
            self._fill_service(key, before)
        self._disputes.settle(lambda name: self._remember(name, before))
        self._health_checks.update(
            Touched(key, entry.health_check_port, entry.created, entry.ports, self._slices.of(key))
            if (entry := self._services.get(key)) is not None
            else Touched(key, 0, "", (), {})
            for key in touched
        )
        return {name: now for name, was in before.items() if (now := self.get(name)) != was}

    # ---- processing objects ------------------------------------------------------------------------------------

    def _read_service(self, key: ServiceKey, service: objects.Service) -> _Service | None:
        """The stored form of a Service; None if it is not served."""
        if not frontends.is_served(service):
            return None
        denied = self._shares.denied(key)
        listed = frontends.read_listed(service, external_ips=self._settings.external_ips)
        ports = frontends.service_ports(key.namespace, key.name, service, listed, self.facts.node_ips, denied)
        over = frontends.over_limits(service, listed)
        created = service.metadata.creation_timestamp or ""
        held = service if denied else None
        return _Service(ports, created, health_check_port(service), over, held, listed.unserved)

    def _share_out(self, services: Mapping[ServiceKey, objects.Service | None]) -> set[ServiceKey]:
        """Count what these Services need. The result: other Services whose share has changed."""
        for key, service in services.items():
            need = None
            if service is not None and frontends.is_served(service):
                listed = frontends.read_listed(service, external_ips=self._settings.external_ips)
                need = frontends.need(service, listed)
            self._shares.want(key, need)

        def age(key: tuple[str, str]) -> tuple[str, tuple[str, str]]:
            service = services.get(ServiceKey(*key))
            return self._age(key) if service is None else (service.metadata.creation_timestamp or "~", key)

        return {ServiceKey(*key) for key in self._shares.settle(age)} - services.keys()

    def _with_share(self, key: ServiceKey) -> _Service | None:
        """Rebuild a Service whose share has changed."""
        known = self._services.get(key)
        if known is None:
            return None
        if known.held is not None and not isinstance(known.held, bytes):
            return self._read_service(key, known.held)
        held = known.held or zlib.compress(msgspec.msgpack.encode(known.ports), 1)
        ports = msgspec.msgpack.decode(zlib.decompress(held), type=tuple[ServicePort, ...])
        denied = self._shares.denied(key)
        reduced = tuple(less for port in ports if (less := frontends.reduced(port, denied)) is not None)
        return self._with_node_ips(msgspec.structs.replace(known, ports=reduced, held=held if denied else None))

    def _share_endpoints(self, touched: Iterable[ServiceKey]) -> set[ServiceKey]:
        """Count the endpoints of these Services. The result: all Services whose share has changed."""
        for key in touched:
            names = [port.name for port in self._ports_of(key)]
            views = endpoints.by_port(self._ordered_slices(key), names)
            numbers = dict.fromkeys(IPFamily, 0)
            for name in names:
                number = endpoints.count(
                    views.get((name.family, name.port, name.protocol), ()), (name.port, name.protocol)
                )
                numbers[name.family] += number * endpoints.entries(name.protocol)
            for family, number in numbers.items():
                self._endpoint_shares[family].want(key, min(number, 2 * endpoints.MOST_ENDPOINTS))
        return {ServiceKey(*key) for shares in self._endpoint_shares.values() for key in shares.settle(self._age)}

    def _with_node_ips(self, known: _Service) -> _Service:
        """Apply changed addresses of the node."""
        if not any(port.source_ranges for port in known.ports):
            return known
        ports = tuple(frontends.with_node_ip(port, self.facts.node_ips.get(port.name.family)) for port in known.ports)
        return msgspec.structs.replace(known, ports=ports)

    def _ports_of(self, key: ServiceKey) -> tuple[ServicePort, ...]:
        known = self._services.get(key)
        return known.ports if known is not None else ()

    def _take_slice(
        self, namespace: str, name: str, endpoint_slice: objects.EndpointSlice | None
    ) -> Iterable[ServiceKey]:
        touched = self._slices.take(namespace, name, endpoint_slice)
        if API_SERVER in touched:
            self._disputes.guard.set_api_servers(self._slices.places(API_SERVER))
        return [ServiceKey(*key) for key in touched]

    def _read_nodes(self) -> bool:
        """Process a change of Nodes. True if it affects all Services."""
        differs = self._nodes.read()
        guard = self._disputes.guard
        if differs.owners:
            self._overlaps.nodes(self._nodes.owners, ((key, known.ports) for key, known in self._services.items()))
            guard.set_nodes(self._nodes.owners)
        guard.set_kubelets(self._nodes.kubelets)
        return differs.for_all

    # ---- planning ----------------------------------------------------------------------------------------------

    def _remember(self, name: ServicePortName, before: Delta) -> None:
        """Record the state of a service port before its first change in this update."""
        if name not in before:
            before[name] = self.get(name)

    def _replace_service(self, key: ServiceKey, known: _Service | None, before: Delta) -> None:
        """Replace the ports of a Service and their claims."""
        # Record the state of all ports before any of them changes: it includes who has which address.
        old = self._ports_of(key)
        for template in old:
            self._remember(template.name, before)
        for template in old:
            self._disputes.leave(template)
            del self._wanted[template.name]
        self._overlaps.service(key, known.ports if known is not None else ())
        former = self._services.get(key)
        self._disputes.guard.set_health_checks(key, _health_checks(former), _health_checks(known))
        if known is None:
            self._services.pop(key, None)
            return
        self._services[key] = known
        for template in known.ports:
            self._disputes.enter(template)

    def _fill_service(self, key: ServiceKey, before: Delta) -> None:
        """Assign endpoints to the ports of a Service, within the limit of one Service."""
        allowed = {family: self._endpoint_shares[family].allowed(key) for family in IPFamily}
        left = {family: 2 * endpoints.MOST_ENDPOINTS if most is None else most for family, most in allowed.items()}
        left_of_service = dict.fromkeys(IPFamily, endpoints.MOST_ENDPOINTS)
        by_port = endpoints.by_port(self._ordered_slices(key), [port.name for port in self._ports_of(key)])
        wanted = dict.fromkeys(IPFamily, 0)
        slice_ports = dict.fromkeys(IPFamily, 0)
        known = self._services.get(key)
        unserved = known.unserved if known is not None else ()
        for template in known.ports if known is not None else ():
            name, family = template.name, template.name.family
            self._remember(name, before)
            of_port = by_port.get((family, name.port, name.protocol), [])
            each = endpoints.entries(name.protocol)
            most = min(left_of_service[family], left[family] // each)
            self._wanted[name] = self._fill(template, of_port, most, unserved) if of_port else template
            number = endpoints.count(of_port, (name.port, name.protocol))
            wanted[family] += number
            slice_ports[family] += len(of_port)
            left_of_service[family] = max(0, left_of_service[family] - number)
            left[family] = max(0, left[family] - number * each)
        over = [] if known is None else [*known.over, *self._shares.why(key), *self._slices.too_long(key)]
        for family, number in wanted.items():
            which = f"IPv{family.value} endpoints, counted by port,"
            if slice_ports[family] >= endpoints.MOST_SLICE_PORTS:
                which += " of only the first slices"
            if number > endpoints.MOST_ENDPOINTS:
                over.append(f"{number} {which} are more than {endpoints.MOST_ENDPOINTS}: the first are served")
            if allowed[family] is not None:
                most = self._endpoint_shares[family].most
                what = f"{number} {which} are more than older Services of namespace {key.namespace} leave of {most}"
                over.append(f"{what}: the first are served")
        self._disputes.losses.set_over(key, tuple(over))

    def _ordered_slices(self, key: ServiceKey) -> list[endpoints.SliceView]:
        """Sorted by slice name, so that the choice between duplicates does not depend on the order of arrival."""
        views = self._slices.of(key)
        return [views[name] for name in sorted(views)]

    def _fill(
        self, template: ServicePort, of_port: list[endpoints.SliceView], most: int, unserved: Collection[IPFamily]
    ) -> ServicePort:
        """A service port with its endpoint lists."""
        name = template.name
        known = endpoints.merge(of_port, (name.port, name.protocol), most)
        lists = endpoints.choose_lists(
            known,
            self._nodes.topology,
            cluster=frontends.uses_cluster_list(template, unserved),
            local=frontends.uses_local_list(template, unserved),
            serving=name.protocol is Protocol.UDP,
        )
        if lists is endpoints.NO_LISTS:
            return template
        return ServicePort(
            name=name,
            frontends=template.frontends,
            cluster=lists.cluster,
            local=lists.local,
            serving=lists.serving,
            any_endpoints=lists.any_endpoints,
            internal_local=template.internal_local,
            external_local=template.external_local,
            affinity_seconds=template.affinity_seconds,
            source_ranges=template.source_ranges,
            vip_source_allowed=template.vip_source_allowed,
        )

    def _rank(self, name: ServicePortName) -> Any:
        """Older Services first, unknown age last, then by name; spec/service-semantics §8 does not define an order."""
        known = self._services.get(ServiceKey(name.namespace, name.name))
        try:
            created = datetime.datetime.fromisoformat(known.created if known is not None else "")
        except ValueError:
            created = _NEVER
        if created.tzinfo is None:
            created = created.replace(tzinfo=datetime.UTC)
        return created, name
