# SPDX-License-Identifier: Apache-2.0
"""Objects in, service ports out; a change costs what it touches, not what exists.

State is indexed by service: a slice that changed makes the lists of its service anew and nothing else. Only our own
node's zone or IPs concern everybody.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, KeysView, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from . import endpoints, frontends, pods
from .claims import Claim, Claims, Conflict, claim_of
from .health_checks import HealthCheck, HealthCheckName, HealthChecks, health_check_port
from .model import Family, FrontendKind, Protocol, ServicePort, ServicePortName
from .nodes import NO_NODE, Network, NodeView, networks_of, view_node
from .overlaps import Overlap, Overlaps

if TYPE_CHECKING:
    from ..kube import objects
    from ..kube.source import Change

Delta = dict[ServicePortName, ServicePort | None]

_NEVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)


class ServiceKey(NamedTuple):
    """Namespace and name of a Service."""

    namespace: str
    name: str


class _Service(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a Service that is served: less than half the room of the whole object.

    ``ports`` have no endpoints yet. ``created`` is only ever asked in conflicts. ``health_check_port``: 0 for none.
    """

    ports: tuple[ServicePort, ...]
    created: str
    health_check_port: int


class PlanSettings(msgspec.Struct, frozen=True):
    """What the plan depends on besides the objects.

    ``node_name``: of our Node, as in ``nodeName`` of endpoints. ``node_ip``: packed address of a ``bindAddress`` that
    is not unspecified; it replaces the Node's own of that family (spec/configuration §5.3). ``external_ips``: whether
    external IPs are served (feature gate AllowServiceExternalIPs).
    """

    node_name: str
    node_ip: bytes | None = None
    external_ips: bool = True


class Planner:
    """The plan, kept up to date by :meth:`update`.

    Read-only for others: ``node_ips`` (our node's, primary family first) and ``node_cidrs`` (the first of its pod CIDRs
    in each family), ``pod_cidrs`` and ``node_addresses`` of all Nodes, ``conflicts``. All are replaced, never changed
    in place, and stay the same object when nothing in them changes.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._services: dict[ServiceKey, _Service] = {}
        # Per service name, also of services that do not exist yet: its slices by name, and the way back.
        self._slices: dict[ServiceKey, dict[str, endpoints.SliceView]] = {}
        self._service_of_slice: dict[tuple[str, str], ServiceKey] = {}
        self._nodes: dict[str, NodeView] = {}
        # What every service port wants, and what of it others have.
        self._wanted: dict[ServicePortName, ServicePort] = {}
        self._lost: dict[ServicePortName, set[Claim]] = {}
        self._claims = Claims(self._rank)
        self._conflicts: dict[Claim, Conflict] = {}
        self._health_checks = HealthChecks()
        self._overlaps = Overlaps()

        self._topology = endpoints.Topology(settings.node_name, "")
        self.node_ips: dict[Family, bytes] = {}
        self.node_cidrs: dict[Family, Network] = {}
        self.pod_cidrs: frozenset[Network] = frozenset()
        self.node_addresses: frozenset[bytes] = frozenset()
        self._service_cidrs: dict[str, tuple[Network, ...]] = {}
        self.service_cidrs: frozenset[Network] = frozenset()
        self._read_nodes()

    @property
    def names(self) -> KeysView[ServicePortName]:
        """Every service port that exists now."""
        return self._wanted.keys()

    @property
    def conflicts(self) -> frozenset[Conflict]:
        """Addresses that more than one service port names, now. Its members are texts for people by ``str``."""
        return frozenset(self._conflicts.values())

    @property
    def overlaps(self) -> frozenset[Overlap]:
        """Service addresses that are also a Node's, now. Its members are texts for people by ``str``."""
        return self._overlaps.all

    def differs(self, namespace: str, name: str, service: objects.Service | None) -> bool:
        """Whether a Service (None: that there is none) says anything else than what the last update took in."""
        key = ServiceKey(namespace, name)
        known = self._services.get(key)
        if known is None or service is None:
            return (known is None) != (service is None)
        now = self._read_service(key, service)
        return now is None or (now.ports, now.health_check_port) != (known.ports, known.health_check_port)

    def pods(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """The pods that have these addresses, as far as slices name them, ``namespace/name``. Safe in any thread."""
        slices = list(self._slices.items())
        return pods.named(((key.namespace, list(views.values())) for key, views in slices), addresses)

    def service_of_slice(self, namespace: str, name: str) -> tuple[str, str] | None:
        """Namespace and name of the Service that a slice in use belongs to."""
        return self._service_of_slice.get((namespace, name))

    def counts(self) -> dict[str, int]:
        """How many objects of each kind are in use."""
        return {
            "Service": len(self._services),
            "EndpointSlice": len(self._service_of_slice),
            "Node": len(self._nodes),
        }

    @property
    def health_checks(self) -> Mapping[HealthCheckName, HealthCheck]:
        """Health check node ports, and what is to be answered there. Replaced, never changed in place."""
        return self._health_checks.wanted

    def get(self, name: ServicePortName) -> ServicePort | None:
        """A service port as planned now: without the addresses that it lost to others."""
        wanted = self._wanted.get(name)
        lost = self._lost.get(name)
        if wanted is None or not lost:
            return wanted
        kept = tuple(frontend for frontend in wanted.frontends if claim_of(name, frontend) not in lost)
        return msgspec.structs.replace(wanted, frontends=kept)

    def update(self, changes: Iterable[Change]) -> Delta:
        """Take changes in. Returns every service port that differs from before, None for one that is gone."""
        services: dict[ServiceKey, objects.Service | None] = {}
        touched: set[ServiceKey] = set()
        nodes_changed = False
        for kind, namespace, name, value in changes:
            if kind == "Service":
                services[ServiceKey(namespace, name)] = value  # type: ignore[assignment]
            elif kind == "EndpointSlice":
                touched.update(self._take_slice(namespace, name, value))  # type: ignore[arg-type]
            elif kind == "Node":
                nodes_changed |= self._take_node(name, value)  # type: ignore[arg-type]
            else:
                self._take_service_cidr(name, value)  # type: ignore[arg-type]
        if nodes_changed and self._read_nodes():
            for key, known in self._services.items():
                self._services[key] = self._with_node_ips(known)
            touched.update(self._services)

        before: Delta = {}
        disputed: set[Claim] = set()
        for key, service in services.items():
            self._replace_service(key, service, before, disputed)
        touched.update(services)
        for key in touched:
            for template in self._ports_of(key):
                self._remember(template.name, before)
                self._wanted[template.name] = self._fill(key, template)
        for claim in disputed:
            self._settle(claim, before)
        self._health_checks.update(
            (key, known.health_check_port if known is not None else 0, self._ports_of(key), self._slices.get(key, {}))
            for key in touched
            for known in (self._services.get(key),)
        )
        return {name: now for name, was in before.items() if (now := self.get(name)) != was}

    # ---- taking objects in -------------------------------------------------------------------------------------

    def _read_service(self, key: ServiceKey, service: objects.Service) -> _Service | None:
        """None: it is not served."""
        if not frontends.is_served(service):
            return None
        ports = frontends.service_ports(
            key.namespace, key.name, service, self.node_ips, external_ips=self._settings.external_ips
        )
        return _Service(ports, service.metadata.creation_timestamp or "", health_check_port(service))

    def _with_node_ips(self, known: _Service) -> _Service:
        """The node's addresses have changed."""
        if not any(port.source_ranges for port in known.ports):
            return known
        ports = tuple(frontends.with_node_ip(port, self.node_ips.get(port.name.family)) for port in known.ports)
        return msgspec.structs.replace(known, ports=ports)

    def _ports_of(self, key: ServiceKey) -> tuple[ServicePort, ...]:
        known = self._services.get(key)
        return known.ports if known is not None else ()

    def _take_slice(
        self, namespace: str, name: str, endpoint_slice: objects.EndpointSlice | None
    ) -> Iterable[ServiceKey]:
        """The services whose endpoints may be others now: two when the slice moves from one to another."""
        service = endpoints.service_of(endpoint_slice) if endpoint_slice is not None else None
        view = None
        if endpoint_slice is not None and service is not None:
            view = endpoints.view_slice(endpoint_slice, self._settings.node_name)
        old_key = self._service_of_slice.get((namespace, name))
        new_key = ServiceKey(namespace, service) if service is not None and view is not None else None
        touched = []
        if old_key is not None and old_key != new_key:
            views = self._slices[old_key]
            del views[name]
            if not views:
                del self._slices[old_key]
            del self._service_of_slice[(namespace, name)]
            touched.append(old_key)
        if new_key is not None and view is not None:
            views = self._slices.setdefault(new_key, {})
            if views.get(name) != view:
                views[name] = view
                touched.append(new_key)
            self._service_of_slice[(namespace, name)] = new_key
        return touched

    def _take_node(self, name: str, node: objects.Node | None) -> bool:
        view = view_node(node) if node is not None else None
        if self._nodes.get(name) == view:
            return False
        if view is None:
            del self._nodes[name]
        else:
            self._nodes[name] = view
        return True

    def _take_service_cidr(self, name: str, value: objects.ServiceCIDR | None) -> None:
        spec = value.spec if value is not None else None
        cidrs = networks_of((spec.cidrs if spec is not None else None) or ())
        if self._service_cidrs.get(name, ()) == cidrs:
            return
        self._service_cidrs[name] = cidrs
        self.service_cidrs = frozenset(cidr for cidrs in self._service_cidrs.values() for cidr in cidrs)

    def _read_nodes(self) -> bool:
        """Bring the node attributes up to date; True if that concerns every service."""
        own = self._nodes.get(self._settings.node_name, NO_NODE)
        node_ips = dict(own.ips)
        override = self._settings.node_ip
        if override is not None:
            family = Family.IPV4 if len(override) == 4 else Family.IPV6
            node_ips.pop(family, None)
            node_ips = {family: override, **node_ips}
        topology = endpoints.Topology(self._settings.node_name, own.zone)
        # As lists: which family is first is part of it.
        concerns_all = topology != self._topology or list(node_ips.items()) != list(self.node_ips.items())
        if concerns_all:
            self._topology = topology
            self.node_ips = node_ips
        node_cidrs: dict[Family, Network] = {}
        for cidr in own.pod_cidrs:
            node_cidrs.setdefault(Family(cidr.version), cidr)
        if node_cidrs != self.node_cidrs:
            self.node_cidrs = node_cidrs
        pod_cidrs = frozenset(cidr for node in self._nodes.values() for cidr in node.pod_cidrs)
        if pod_cidrs != self.pod_cidrs:
            self.pod_cidrs = pod_cidrs
        addresses = frozenset(address for node in self._nodes.values() for address in node.addresses)
        if addresses != self.node_addresses:
            self.node_addresses = addresses
            owners = {address: name for name, node in self._nodes.items() for address in node.addresses}
            self._overlaps.nodes(owners, ((key, known.ports) for key, known in self._services.items()))
        return concerns_all

    # ---- planning ----------------------------------------------------------------------------------------------

    def _remember(self, name: ServicePortName, before: Delta) -> None:
        """Note what a service port was before its first change in this update."""
        if name not in before:
            before[name] = self.get(name)

    def _replace_service(
        self, key: ServiceKey, service: objects.Service | None, before: Delta, disputed: set[Claim]
    ) -> None:
        """Make a Service's ports anew and put its claims in the place of the old ones."""
        # Remembered for all of them before anything changes: a lost address is part of what was.
        old = self._ports_of(key)
        for template in old:
            self._remember(template.name, before)
        for template in old:
            for frontend in template.frontends:
                claim = claim_of(template.name, frontend)
                if self._claims.remove(claim, template.name):
                    disputed.add(claim)
            del self._wanted[template.name]
        known = self._read_service(key, service) if service is not None else None
        self._overlaps.service(key, known.ports if known is not None else ())
        if known is None:
            self._services.pop(key, None)
            return
        self._services[key] = known
        for template in known.ports:
            for frontend in template.frontends:
                claim = claim_of(template.name, frontend)
                if self._claims.add(claim, template.name):
                    disputed.add(claim)

    def _fill(self, key: ServiceKey, template: ServicePort) -> ServicePort:
        """A service port with its endpoint lists."""
        views = self._slices.get(key)
        if not views:
            return template
        name = template.name
        # By slice name, so that "the later one" of duplicates is the same whatever came first.
        of_family = [views[slice_name] for slice_name in sorted(views) if views[slice_name].family is name.family]
        known = endpoints.merge(of_family, (name.port, name.protocol))
        lists = endpoints.choose_lists(
            known,
            self._topology,
            cluster=frontends.uses_cluster_list(template),
            local=frontends.uses_local_list(template),
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

    # ---- conflicts ---------------------------------------------------------------------------------------------

    def _rank(self, name: ServicePortName) -> Any:
        """Older first, of no known age last, then by namespace and name (spec/service-semantics §8 leaves it open)."""
        known = self._services.get(ServiceKey(name.namespace, name.name))
        try:
            created = datetime.datetime.fromisoformat(known.created if known is not None else "")
        except ValueError:
            created = _NEVER
        if created.tzinfo is None:
            created = created.replace(tzinfo=datetime.UTC)
        return created, name

    def _settle(self, claim: Claim, before: Delta) -> None:
        """Decide a disputed claim and mark who lost it."""
        was = self._conflicts.pop(claim, None)
        conflict = self._claims.settle(claim)
        losers_before = set(was.losers) if was is not None else set()
        losers = set(conflict.losers) if conflict is not None else set()
        for name in losers_before - losers:
            self._remember(name, before)
            lost = self._lost[name]
            lost.discard(claim)
            if not lost:
                del self._lost[name]
        for name in losers - losers_before:
            self._remember(name, before)
            self._lost.setdefault(name, set()).add(claim)
        if conflict is not None:
            self._conflicts[claim] = conflict._replace(kinds=tuple(self._kind(name, claim) for name in conflict.losers))

    def _kind(self, name: ServicePortName, claim: Claim) -> FrontendKind:
        return next(each.kind for each in self._wanted[name].frontends if claim_of(name, each) == claim)
