# SPDX-License-Identifier: Apache-2.0
"""The EndpointSlices in use, by Service. Slices of Services that do not exist yet are included."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from pyebpf_proxy.services import endpoints, pods
from pyebpf_proxy.services.guard import Place

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects

Key = tuple[str, str]

#: The most pods of one address that are named: of one namespace; and the most namespaces.
MOST_NAMES, MOST_NAMESPACES = 2, 4

_NONE: Mapping[str, endpoints.SliceView] = {}


class Slices:
    """All slices in use, updated by :meth:`take`. Keys are namespace and name.

    :param node_name: the name of this Node, as in ``nodeName`` of endpoints.
    """

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._of: dict[Key, dict[str, endpoints.SliceView]] = {}
        self._service_of: dict[Key, Key] = {}
        #: Slices with more endpoints than the limit for one slice, and their number of endpoints.
        self._long: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._service_of)

    def of(self, service: Key) -> Mapping[str, endpoints.SliceView]:
        """The slices of a Service, by name."""
        return self._of.get(service, _NONE)

    def service_of(self, key: Key) -> Key | None:
        """The Service to which a slice in use belongs."""
        return self._service_of.get(key)

    def too_long(self, service: Key) -> Iterator[str]:
        """Messages about slices of a Service that are not read completely."""
        for name in sorted(self.of(service)) if self._long else ():
            if number := self._long.get((service[0], name)):
                what = f"{number} endpoints are more than {endpoints.MOST_IN_SLICE}: the first are served"
                yield f"EndpointSlice {name}: {what}"

    def pods(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """The pods with these addresses, ``namespace/name``. Safe in any thread.

        Slices may name several: those in the host's network share an address, and a tenant may name any address.
        """
        wanted = frozenset(addresses)
        found: dict[bytes, dict[str, set[str]]] = {}
        for (namespace, _), views in list(self._of.items()):
            for view in list(views.values()):
                if not view.pods:
                    continue
                here = [(i, address) for i, (address, _, _) in enumerate(view.members()) if address in wanted]
                if here:
                    names = list(pods.unpacked(view.pods))
                    for i, address in here:
                        of = found.setdefault(address, {})
                        if names[i] and (namespace in of or len(of) < MOST_NAMESPACES):
                            known = of.setdefault(namespace, set())
                            if len(known) < MOST_NAMES:
                                known.add(f"{namespace}/{names[i]}")
        return {
            address: pods.OR.join(sorted(name for known in of.values() for name in known))
            for address, of in found.items()
            if of
        }

    def places(self, service: Key) -> frozenset[Place]:
        """Addresses, ports and protocols of all endpoints of a Service."""
        found: set[Place] = set()
        for view in self.of(service).values():
            ports = {(number, protocol) for (_, protocol), numbers in view.ports.items() for number in numbers}
            found |= {(address, *port) for address, _, _ in view.members() for port in ports}
        return frozenset(found)

    def take(self, namespace: str, name: str, endpoint_slice: objects.EndpointSlice | None) -> list[Key]:
        """Set a slice; None if it is deleted.

        The result: Services whose endpoints may have changed; two if the slice has moved from one to another.
        """
        service = endpoints.service_of(endpoint_slice) if endpoint_slice is not None else None
        view = None
        number = 0
        if endpoint_slice is not None and service is not None:
            view = endpoints.view_slice(endpoint_slice, self._node_name)
            number = len(endpoint_slice.endpoints or ())
        key = (namespace, name)
        old_service = self._service_of.get(key)
        new_service = (namespace, service) if service is not None and view is not None else None
        long_before = self._long.pop(key, 0)
        touched = []
        if old_service is not None and old_service != new_service:
            views = self._of[old_service]
            del views[name]
            if not views:
                del self._of[old_service]
            del self._service_of[key]
            touched.append(old_service)
        if new_service is not None and view is not None:
            if number > endpoints.MOST_IN_SLICE:
                self._long[key] = number
            views = self._of.setdefault(new_service, {})
            if views.get(name) != view or long_before != self._long.get(key, 0):
                views[name] = view
                touched.append(new_service)
            self._service_of[key] = new_service
        return touched
