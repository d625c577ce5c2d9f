# SPDX-License-Identifier: Apache-2.0
"""The way in: settings of the agent → a source."""

from __future__ import annotations

from .access import find
from .client import Client
from .limiter import Limiter
from .observer import Observer, Silent
from .source import ApiSource


def api_server(
    kubeconfig: str,
    master: str,
    node_name: str,
    *,
    qps: float,
    burst: int,
    service_cidrs: bool,
    observer: Observer | None = None,
) -> ApiSource:
    """The API server that the configuration names, as a source; FatalError where it cannot be told which."""
    client = Client(find(kubeconfig, master), Limiter(qps, burst), observer or Silent())
    return ApiSource(client, node_name, service_cidrs=service_cidrs)
