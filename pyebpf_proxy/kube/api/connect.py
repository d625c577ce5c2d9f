# SPDX-License-Identifier: Apache-2.0
"""Creates the source for the API server of the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import ApiServer
from pyebpf_proxy.kube.api.access import SERVICE_ACCOUNT, Access, in_cluster, server_url
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.observer import Observer
from pyebpf_proxy.kube.api.source import ApiSource


def api_server(
    settings: ApiServer, node_name: str, observer: Observer, *, needs_cidrs: bool = False, waits_for_cidrs: bool = False
) -> ApiSource:
    """The API server as a source; FatalError if its address or credentials cannot be determined.

    The other arguments are those of ``ApiSource``.
    """
    access = find(settings.kubeconfig, settings.master)
    if not settings.kubeconfig and not settings.master:
        Logger("api").info("neither kubeconfig nor master URL is given: using in-cluster configuration")
    client = Client(access, Limiter(settings.qps, settings.burst), observer)
    return ApiSource(client, node_name, needs_cidrs=needs_cidrs, waits_for_cidrs=waits_for_cidrs)


def find(kubeconfig: str, master: str, environment: Mapping[str, str] = os.environ) -> Access:
    """Access from the kubeconfig (overridden by ``master``), from ``master`` alone, or in-cluster.

    Raises FatalError.
    """
    if not kubeconfig and not master:
        return in_cluster(environment)
    if not kubeconfig:
        return Access(server_url(master, tls=False))
    from pyebpf_proxy.kube.api.kubeconfig import load  # imports a YAML parser, which is needed only here

    access = load(Path(kubeconfig), master)
    if access is not None:
        return access
    in_pod = environment.get("KUBERNETES_SERVICE_HOST") and environment.get("KUBERNETES_SERVICE_PORT")
    if in_pod and (SERVICE_ACCOUNT / "token").is_file():
        return in_cluster(environment)
    raise FatalError(
        f"{kubeconfig}: invalid configuration: no configuration has been provided,"
        " try setting KUBERNETES_MASTER environment variable"
    )
