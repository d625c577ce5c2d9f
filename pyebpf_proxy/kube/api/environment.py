# SPDX-License-Identifier: Apache-2.0
"""The HTTP proxy from environment variables, by Go's rules. kubeadm sets these variables in kube-proxy's pods."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def proxy_for(url: str, environment: Mapping[str, str]) -> str:
    """The URL of the proxy for requests to ``url``; empty if there is none."""
    parts = urlsplit(url)
    name = "HTTPS_PROXY" if parts.scheme == "https" else "HTTP_PROXY"
    proxy = environment.get(name) or environment.get(name.lower()) or ""
    if not proxy or _is_exempt(
        parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), environment
    ):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_exempt(host: str, port: int, environment: Mapping[str, str]) -> bool:
    if host == "localhost":
        return True
    address = _address(host)
    if address is not None and address.is_loopback:
        return True
    for entry in (environment.get("NO_PROXY") or environment.get("no_proxy") or "").split(","):
        entry = entry.strip().lower()
        if entry == "*":
            return True
        if entry and _matches(entry, host.lower(), port, address):
            return True
    return False


def _matches(entry: str, host: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if address is not None and "/" in entry:
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
        return address.version == network.version and address in network
    name, colon, number = entry.rpartition(":")
    if colon and number.isdigit() and _address(entry) is None:
        if int(number) != port:
            return False
        entry = name
    if address is not None:
        return _address(entry.strip("[]")) == address
    if entry.startswith("*."):
        entry = entry[1:]
    # A name matches itself and its subdomains; with a leading dot, only the subdomains.
    return host.endswith(entry) if entry.startswith(".") else host == entry or host.endswith(f".{entry}")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
