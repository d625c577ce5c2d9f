# SPDX-License-Identifier: Apache-2.0
"""``cluster install``: what changes while it waits for the Lease, and images of other versions."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import objects, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE, ON
from pyebpf_proxy.cluster.output import Output
from tests.unit.cluster.fake_api import FakeApi, running

REPOSITORY = "registry.example/pyebpf-proxy"
IMAGE = f"{REPOSITORY}:1"


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task pods succeed at once."""
    monkeypatch.setattr(task_pod, "run", lambda *_: "all is well\n")


def install(api: FakeApi, image: str = IMAGE) -> None:
    Install(api, Output(as_json=False), "", 0.5).run(image, None, dry_run=False)


def test_kube_proxy_is_deleted_while_install_waits_for_the_lease() -> None:
    api = FakeApi("n1")
    api.delete_after(LEASES.path(NAMESPACE), DAEMON_SETS.path(NAMESPACE, KUBE_PROXY))
    with pytest.raises(ClusterError, match=f"^there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}: this command takes"):
        install(api)
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_an_older_image_keeps_the_template_that_runs_it() -> None:
    """The command is newer than the agents. It takes another node over, and the agents of the others may restart."""
    old = f"{REPOSITORY}:0.0.9"
    api, path = FakeApi("n1", "n2"), DAEMON_SETS.path(NAMESPACE, NAME)
    daemon_set = objects.upgraded(objects.agent(f"{REPOSITORY}:0.0.8")[-1], old)
    daemon_set["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "OLD", "value": "1"})
    api.put(path, daemon_set)
    api.label("n1", agent=ON, parked=ON)
    install(api, "")
    assert api.images() == {"n1": old, "n2": old}
    assert api.stored[path]["spec"]["template"] == daemon_set["spec"]["template"]
    assert api.stored[path]["metadata"]["annotations"] == daemon_set["metadata"]["annotations"]


def test_an_older_image_needs_the_command_of_its_version() -> None:
    api = FakeApi("n1")
    with pytest.raises(ClusterError, match=r"0\.0\.9 is older than this command, .*; use the pyebpf-proxy command"):
        install(api, f"{REPOSITORY}:0.0.9")
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_proxies_that_end_without_the_health_port_cannot_take_turns() -> None:
    """The agent would end beside kube-proxy, and kube-proxy beside the agent: a rollback could never succeed."""
    api = FakeApi("n1")
    api.configure("bindAddressHardFail: false", "bindAddressHardFail: true")
    with pytest.raises(ClusterError, match=r"bindAddressHardFail is true: .*; set it to false in the ConfigMap"):
        install(api)
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_a_configuration_with_which_no_proxy_starts_changes_nothing() -> None:
    """kube-proxy reads it only when it starts, so it may still run."""
    api = FakeApi("n1")
    api.configure("healthzBindAddress: ''", "healthzBindAddress: 0.0.0.0:70000")
    with pytest.raises(ClusterError, match=r"^ConfigMap kube-system/kube-proxy: config\.conf: .*\.HealthzBindAddress"):
        install(api)
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_a_webhook_adds_a_container_to_the_agents_pod() -> None:
    """The API server gives the log of a pod with several containers only if one is named."""
    api = FakeApi("n1")

    def admitted(pod: Object) -> Object:
        containers = [*pod["spec"]["containers"], {"name": "mesh", "image": "mesh:7"}]
        return pod | {"spec": pod["spec"] | {"containers": containers}}

    api.admitted = admitted
    api.status_of = lambda pod: running(ready="n1" not in api.pods_of(KUBE_PROXY))
    install(api)
    assert api.pods_of(KUBE_PROXY) == {}
