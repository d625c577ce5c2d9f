# SPDX-License-Identifier: Apache-2.0
"""The agent's connection to the cluster: the source of objects and the sink of Events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyebpf_proxy.kube.events import Recorder
    from pyebpf_proxy.kube.source import Source
    from pyebpf_proxy.servers.registry import MetricFamily


class ClusterConnection(NamedTuple):
    """The same interface for a manifests folder and an API server."""

    source: Source
    #: The recorder of Events, if there is an API server.
    events: Recorder | None = None
    #: Metrics of the connection.
    metrics: Sequence[MetricFamily] = ()
    #: By resource, why its objects do not arrive at present; the key "" means all resources. Safe in any thread.
    troubles: Callable[[], Mapping[str, str]] = dict
