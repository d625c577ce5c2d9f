# SPDX-License-Identifier: Apache-2.0
"""Differences between the kernel's state and the desired state, as text. The functions are pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyebpf_proxy.services.addresses import format_address_port, format_prefix
from pyebpf_proxy.services.model import Frontend, FrontendKind, ServicePort

T = TypeVar("T")

KINDS = {
    FrontendKind.CLUSTER_IP: "ClusterIP",
    FrontendKind.EXTERNAL_IP: "ExternalIP",
    FrontendKind.LOAD_BALANCER: "LoadBalancer",
    FrontendKind.NODE_PORT: "NodePort",
}


def differences(kernel: ServicePort, wanted: ServicePort | None) -> list[str]:
    """Differences of a service port from the desired one, as text."""
    if wanted is None:
        return ["in the kernel, but not desired"]
    found = sets("address", set(kernel.frontends), set(wanted.frontends), _frontend_text)
    for what in ("cluster", "local"):
        actual = {(e.address, e.port, e.local) for e in getattr(kernel, what)}
        desired = {(e.address, e.port, e.local) for e in getattr(wanted, what)}
        found += sets(
            f"endpoint ({what})",
            actual,
            desired,
            lambda e: format_address_port(e[0], e[1]) + (" (local)" if e[2] else ""),
        )
    found += sets("source range", set(kernel.source_ranges), set(wanted.source_ranges), format_prefix)
    for field, text in _FIELDS.items():
        actual, desired = getattr(kernel, field), getattr(wanted, field)
        if actual != desired:
            found.append(f"{text}: {actual} in the kernel, {desired} desired")
    return found


_FIELDS = {
    "any_endpoints": "any endpoints",
    "internal_local": "internalTrafficPolicy Local",
    "external_local": "externalTrafficPolicy Local",
    "affinity_seconds": "session affinity, seconds",
    "vip_source_allowed": "VIPs as sources",
}


def sets(what: str, actual: set[T], desired: set[T], text: Callable[[T], str]) -> list[str]:
    """Elements that are only on one side, as text."""
    return [
        *(f"{what} {text(each)} is in the kernel, but not desired" for each in sorted(actual - desired)),  # type: ignore[type-var]
        *(f"{what} {text(each)} is desired, but not in the kernel" for each in sorted(desired - actual)),  # type: ignore[type-var]
    ]


def _frontend_text(frontend: Frontend) -> str:
    return f"{KINDS[frontend.kind]} {format_address_port(frontend.address, frontend.port)}"
