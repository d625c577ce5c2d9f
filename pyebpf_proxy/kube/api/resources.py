# SPDX-License-Identifier: Apache-2.0
"""What is followed: which objects, selected how (spec/service-semantics §1.1)."""

from __future__ import annotations

from typing import NamedTuple

from ..source import Kind


class Resource(NamedTuple):
    """One resource, and which of its objects."""

    kind: Kind
    #: As RBAC names it.
    name: str
    group: str
    field_selector: str = ""
    label_selector: str = ""

    @property
    def path(self) -> str:
        """Of all its objects in all namespaces."""
        return f"/apis/{self.group}/v1/{self.name}" if self.group else f"/api/v1/{self.name}"

    @property
    def permission(self) -> str:
        """What RBAC must allow."""
        return f'list and watch on {self.name} (apiGroup "{self.group}")'

    @property
    def selectors(self) -> dict[str, str]:
        """As query parameters."""
        both = {"fieldSelector": self.field_selector, "labelSelector": self.label_selector}
        return {name: text for name, text in both.items() if text}


#: Without headless Services, and without those that other proxies serve.
SERVICES = Resource("Service", "services", "", "spec.clusterIP!=None", "!service.kubernetes.io/service-proxy-name")
ENDPOINT_SLICES = Resource("EndpointSlice", "endpointslices", "discovery.k8s.io", "", "!service.kubernetes.io/headless")
SERVICE_CIDRS = Resource("ServiceCIDR", "servicecidrs", "networking.k8s.io")


def node(name: str) -> Resource:
    """One Node, and no other."""
    return Resource("Node", "nodes", "", f"metadata.name={name}")
