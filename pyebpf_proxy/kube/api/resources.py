# SPDX-License-Identifier: Apache-2.0
"""The watched resources and their selectors (spec/service-semantics §1.1)."""

from __future__ import annotations

import re
from typing import NamedTuple

from pyebpf_proxy.kube.source import Kind


class Resource(NamedTuple):
    """One resource, and the selection of its objects."""

    kind: Kind
    #: The name for RBAC.
    name: str
    group: str
    field_selector: str = ""
    label_selector: str = ""
    #: The agent also works without it: that the server does not know or permit it is no failure.
    optional: bool = False

    @property
    def path(self) -> str:
        """The URL path of all its objects in all namespaces."""
        return f"/apis/{self.group}/v1/{self.name}" if self.group else f"/api/v1/{self.name}"

    @property
    def permission(self) -> str:
        """The permission that RBAC must grant."""
        return f'list and watch on {self.name} (apiGroup "{self.group}")'

    @property
    def selectors(self) -> dict[str, str]:
        """The selectors as query parameters."""
        both = {"fieldSelector": self.field_selector, "labelSelector": self.label_selector}
        return {name: text for name, text in both.items() if text}


#: Excludes headless Services and those of other proxies.
SERVICES = Resource("Service", "services", "", "spec.clusterIP!=None", "!service.kubernetes.io/service-proxy-name")
ENDPOINT_SLICES = Resource("EndpointSlice", "endpointslices", "discovery.k8s.io", "", "!service.kubernetes.io/headless")
SERVICE_CIDRS = Resource("ServiceCIDR", "servicecidrs", "networking.k8s.io")


def node(name: str) -> Resource:
    """The resource that contains only this Node.

    The server rejects a selector with an unescaped character that has a meaning in it. Then nothing would be served.
    """
    return Resource("Node", "nodes", "", "metadata.name=" + re.sub(r"[\\,=]", r"\\\g<0>", name))
