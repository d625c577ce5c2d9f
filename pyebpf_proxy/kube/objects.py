# SPDX-License-Identifier: Apache-2.0
"""Types of Service, EndpointSlice and Node, with the fields that are used, by their API names. Others are ignored.

Every field may be absent or null, as the API's Go types allow. ``kube.validation`` defines which values are refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import field

#: A number of at most 64 bits: larger numbers in JSON cannot be encoded again.
Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Annotations(msgspec.Struct, gc=False):
    """The used part of ``metadata.annotations``; others are not kept."""

    last_change_trigger_time: str | None = field(default=None, name="endpoints.kubernetes.io/last-change-trigger-time")


class ObjectMeta(msgspec.Struct, rename="camel", gc=False):
    """The used part of ObjectMeta.

    ``uid`` exists only while an object is read; any type, because it refuses no object.
    """

    name: str | None = None
    namespace: str | None = None
    uid: Any = None
    labels: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    annotations: Annotations | None = None


class ServicePort(msgspec.Struct, rename="camel", gc=False):
    """``spec.ports[]`` of a Service. ``targetPort`` is never read (spec/service-semantics §1.3)."""

    name: str | None = None
    protocol: str | None = None
    port: Number | None = None
    node_port: Number | None = None


class ClientIPConfig(msgspec.Struct, rename="camel", gc=False):
    """``spec.sessionAffinityConfig.clientIP``."""

    timeout_seconds: Number | None = None


class SessionAffinityConfig(msgspec.Struct, gc=False):
    """``spec.sessionAffinityConfig``."""

    client_ip: ClientIPConfig | None = field(default=None, name="clientIP")


class ServiceSpec(msgspec.Struct, rename="camel", gc=False):
    """``spec`` of a Service."""

    type: str | None = None
    cluster_ip: str | None = field(default=None, name="clusterIP")
    cluster_ips: tuple[str, ...] | None = field(default=None, name="clusterIPs")
    ip_families: tuple[str, ...] | None = None
    ports: tuple[ServicePort, ...] | None = None
    external_ips: tuple[str, ...] | None = field(default=None, name="externalIPs")
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    load_balancer_source_ranges: tuple[str, ...] | None = None
    health_check_node_port: Number | None = None


class Ingress(msgspec.Struct, rename="camel", gc=False):
    """``status.loadBalancer.ingress[]``."""

    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(msgspec.Struct, gc=False):
    """``status.loadBalancer``."""

    ingress: tuple[Ingress, ...] | None = None


class ServiceStatus(msgspec.Struct, rename="camel", gc=False):
    """``status`` of a Service."""

    load_balancer: LoadBalancerStatus | None = None


class Service(msgspec.Struct, gc=False):
    """``v1`` Service."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ServiceSpec = field(default_factory=ServiceSpec)
    status: ServiceStatus | None = None


class EndpointConditions(msgspec.Struct, gc=False):
    """``endpoints[].conditions``; null means ready, serving, not terminating (spec/service-semantics §1.4)."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(msgspec.Struct, gc=False):
    """``hints.forZones[]`` and ``hints.forNodes[]``."""

    name: str


class EndpointHints(msgspec.Struct, rename="camel", gc=False):
    """``endpoints[].hints``."""

    for_zones: tuple[Hint, ...] | None = None
    for_nodes: tuple[Hint, ...] | None = None


class TargetRef(msgspec.Struct, gc=False):
    """``endpoints[].targetRef``: the pod of an endpoint, in the slice's namespace. It is only displayed.

    It exists only while an object is read; afterwards the slice has the packed names.
    """

    kind: str | None = None
    name: str | None = None


class Endpoint(msgspec.Struct, rename="camel", gc=False):
    """``endpoints[]`` of a slice; only the first address is used."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: EndpointHints | None = None
    target_ref: TargetRef | None = None


class EndpointPort(msgspec.Struct, gc=False):
    """``ports[]`` of a slice."""

    name: str | None = None
    protocol: str | None = None
    port: Number | None = None


class EndpointSlice(msgspec.Struct, rename="camel", gc=False):
    """``discovery.k8s.io/v1`` EndpointSlice. ``pods``: names of its pods (services/pods.py), not an API field."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    address_type: str | None = None
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None
    pods: bytes = field(default=b"", name=" pods")


class NodeAddress(msgspec.Struct, gc=False):
    """``status.addresses[]`` of a Node."""

    type: str | None = None
    address: str | None = None


class Taint(msgspec.Struct, gc=False):
    """``spec.taints[]`` of a Node; value and effect are never read."""

    key: str | None = None


class NodeSpec(msgspec.Struct, gc=False):
    """``spec`` of a Node."""

    pod_cidr: str | None = field(default=None, name="podCIDR")
    pod_cidrs: tuple[str, ...] | None = field(default=None, name="podCIDRs")
    taints: tuple[Taint, ...] | None = None


class DaemonEndpoint(msgspec.Struct, gc=False):
    """``status.daemonEndpoints.kubeletEndpoint`` of a Node."""

    port: Number | None = field(default=None, name="Port")


class NodeDaemonEndpoints(msgspec.Struct, rename="camel", gc=False):
    """``status.daemonEndpoints`` of a Node."""

    kubelet_endpoint: DaemonEndpoint | None = None


class NodeStatus(msgspec.Struct, rename="camel", gc=False):
    """``status`` of a Node."""

    addresses: tuple[NodeAddress, ...] | None = None
    daemon_endpoints: NodeDaemonEndpoints | None = None


class Node(msgspec.Struct, gc=False):
    """``v1`` Node."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(msgspec.Struct, gc=False):
    """``spec`` of a ServiceCIDR."""

    cidrs: tuple[str, ...] | None = None


class ServiceCIDR(msgspec.Struct, gc=False):
    """``networking.k8s.io/v1`` ServiceCIDR: a range of ClusterIPs."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ServiceCIDRSpec | None = None
