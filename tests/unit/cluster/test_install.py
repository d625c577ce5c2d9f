# SPDX-License-Identifier: Apache-2.0
"""``cluster install``: what changes while it waits for the Lease."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from tests.unit.cluster.fake_api import FakeApi

IMAGE = "registry.example/pyebpf-proxy:1"


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task pods succeed at once."""
    monkeypatch.setattr(task_pod, "run", lambda *_: "all is well\n")


def install(api: FakeApi, image: str = IMAGE) -> None:
    Install(api, Output(as_json=False), "", 0.5).run(image, None, dry_run=False)


def test_kube_proxy_is_deleted_while_install_waits_for_the_lease() -> None:
    api = FakeApi("n1")
    leases, kube_proxy = LEASES.path(NAMESPACE), DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)

    def delete(method: str, path: str) -> None:
        if path.startswith(leases):
            api.stored.pop(kube_proxy, None)

    api.after = delete
    with pytest.raises(ClusterError, match=f"^there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}: this command takes"):
        install(api)
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored
