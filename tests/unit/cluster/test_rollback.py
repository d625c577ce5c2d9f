# SPDX-License-Identifier: Apache-2.0
"""``cluster rollback`` and objects that other commands made."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import objects
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.rollback import Rollback
from tests.unit.cluster.fake_api import FakeApi

IMAGE = "registry.example/pyebpf-proxy:1"


def test_rollback_with_an_image_leaves_what_these_commands_did_not_make() -> None:
    """The agent was installed with kustomize, and runs on no node yet."""
    api = FakeApi("n1")
    daemon_set = objects.agent(IMAGE)[-1]
    del daemon_set["spec"]["template"]["spec"]["nodeSelector"][objects.AGENT]
    path = DAEMON_SETS.path(NAMESPACE, NAME)
    api.put(path, daemon_set)
    with pytest.raises(ClusterError, match="was not created by this command"):
        Rollback(api, Output(as_json=False), "", 1.0).run(IMAGE)
    assert path in api.stored


def test_kube_proxy_is_deleted_while_rollback_waits_for_the_lease() -> None:
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    leases, kube_proxy = LEASES.path(NAMESPACE), DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)

    def delete(method: str, path: str) -> None:
        if path.startswith(leases):
            api.stored.pop(kube_proxy, None)

    api.after = delete
    with pytest.raises(ClusterError, match=f"there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}; the agent is the only"):
        Rollback(api, Output(as_json=False), "", 1.0).run(IMAGE)
