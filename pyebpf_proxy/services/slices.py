# SPDX-License-Identifier: Apache-2.0
"""The EndpointSlices that are in use, by Service; also those of Services that do not exist yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from . import endpoints, pods
from .guard import Place

if TYPE_CHECKING:
    from ..kube import objects

Key = tuple[str, str]

_NONE: Mapping[str, endpoints.SliceView] = {}


class Slices:
    """Kept up to date by :meth:`take`. Keys are namespace and name.

    :param node_name: of our Node, as in ``nodeName`` of endpoints.
    """

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._of: dict[Key, dict[str, endpoints.SliceView]] = {}
        self._service_of: dict[Key, Key] = {}
        #: Slices with more endpoints than are read of one, and how many.
        self._long: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._service_of)

    def of(self, service: Key) -> Mapping[str, endpoints.SliceView]:
        """The slices of a Service, by name."""
        return self._of.get(service, _NONE)

    def service_of(self, key: Key) -> Key | None:
        """The Service that a slice in use belongs to."""
        return self._service_of.get(key)

    def too_long(self, service: Key) -> Iterator[str]:
        """What is said of slices of a Service that are not read whole."""
        for name in sorted(self.of(service)) if self._long else ():
            if number := self._long.get((service[0], name)):
                what = f"{number} endpoints are more than {endpoints.MOST_IN_SLICE}: the first are served"
                yield f"EndpointSlice {name}: {what}"

    def pods(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """The pods that have these addresses, ``namespace/name``. Safe in any thread."""
        slices = list(self._of.items())
        return pods.named(((key[0], list(views.values())) for key, views in slices), addresses)

    def places(self, service: Key) -> frozenset[Place]:
        """Addresses, ports and protocols of all endpoints of a Service."""
        found: set[Place] = set()
        for view in self.of(service).values():
            ports = {(number, protocol) for (_, protocol), numbers in view.ports.items() for number in numbers}
            found |= {(address, *port) for address, _, _ in view.members() for port in ports}
        return frozenset(found)

    def take(self, namespace: str, name: str, endpoint_slice: objects.EndpointSlice | None) -> list[Key]:
        """The Services whose endpoints may be others now: two when the slice moves from one to another."""
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
