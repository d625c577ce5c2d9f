# SPDX-License-Identifier: Apache-2.0
"""The way in: what the configuration says of the API server → a source."""

from __future__ import annotations

from pyebpf_proxy.config.effective import ApiServer
from pyebpf_proxy.log import Logger

from .access import find
from .client import Client
from .limiter import Limiter
from .observer import Observer
from .source import ApiSource


def api_server(settings: ApiServer, node_name: str, observer: Observer, *, service_cidrs: bool) -> ApiSource:
    """The API server as a source; FatalError where it cannot be told which, or how to get in."""
    access = find(settings.kubeconfig, settings.master)
    if not settings.kubeconfig and not settings.master:
        Logger("api").info("neither kubeconfig nor master URL is given: the API server is that of this pod's cluster")
    client = Client(access, Limiter(settings.qps, settings.burst), observer)
    return ApiSource(client, node_name, service_cidrs=service_cidrs)
