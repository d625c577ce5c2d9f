# SPDX-License-Identifier: Apache-2.0
"""What the agent has to do with beside the kernel: where objects come from and Events go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyebpf_proxy.kube.events import Recorder
    from pyebpf_proxy.kube.source import Source
    from pyebpf_proxy.servers.numbers import MetricFamily


class ClusterConnection(NamedTuple):
    """Nothing behind it can tell a folder of manifests from an API server."""

    source: Source
    #: Where Events go, if there is an API server.
    events: Recorder | None = None
    #: Metrics of the way there.
    metrics: Sequence[MetricFamily] = ()
