# SPDX-License-Identifier: Apache-2.0
"""``cluster rollback`` and objects that other commands made."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import objects, task_pod
from pyebpf_proxy.cluster.api import BINDINGS, DAEMON_SETS, LEASES, NODES, PODS, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.lease import NAME as LEASE
from pyebpf_proxy.cluster.objects import AGENT, CLEANING, KUBE_PROXY, NAME, NAMESPACE, ON
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


@pytest.mark.parametrize("command", ["install", "rollback"])
def test_the_role_of_an_installation_in_another_namespace_stays(command: str) -> None:
    """The chart may be installed there, and its role has the same name: without it, the agents see no change."""
    api = FakeApi("n1")
    binding = next(item for item in objects.agent(IMAGE) if item["kind"] == "ClusterRoleBinding")
    binding["subjects"][0]["namespace"] = "network"
    before = api.put(BINDINGS.path(name=NAME), binding)
    with pytest.raises(ClusterError, match=r"^ClusterRoleBinding .* is for ServiceAccount network pyebpf-proxy: "):
        if command == "install":
            Install(api, Output(as_json=False), "", 0.1).run(IMAGE, None, dry_run=False)
        else:
            Rollback(api, Output(as_json=False), "", 0.1).run("")
    assert api.stored[BINDINGS.path(name=NAME)] == before


def test_a_command_that_has_lost_the_lease_cleans_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up would remove what another agent has attached meanwhile."""
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.label("n1", agent=ON)
    api.stored[NODES.path(name="n1")]["metadata"]["labels"]["kubernetes.io/os"] = "linux"
    lease, node = LEASES.path(NAMESPACE, LEASE), NODES.path(name="n1")
    tasks = []

    def task(_: object, what: str, *__: object) -> str:
        api.delete(PODS, what, NAMESPACE)  # as at first, of a command that was killed
        tasks.append(what)
        return "all is well\n"

    def other(method: str, path: str) -> None:
        if api.stored[node]["metadata"]["labels"].get(AGENT) == CLEANING:
            api.put(lease, api.stored[lease] | {"spec": {"holderIdentity": "install by operator@laptop"}})

    monkeypatch.setattr(task_pod, "run", task)
    api.after = other
    with pytest.raises(StoppedError, match=r"n1: another command has taken over: install by operator@laptop"):
        Rollback(api, Output(as_json=False), "", 1.0).run(IMAGE)
    assert tasks == ["await"]


def test_kube_proxy_is_deleted_while_rollback_waits_for_the_lease() -> None:
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.delete_after(LEASES.path(NAMESPACE), DAEMON_SETS.path(NAMESPACE, KUBE_PROXY))
    with pytest.raises(ClusterError, match=f"there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}; the agent is the only"):
        Rollback(api, Output(as_json=False), "", 1.0).run(IMAGE)


@pytest.mark.parametrize("how", ["refused", "Ctrl-C"])
def test_the_end_of_a_rollback_is_not_reached(capsys: pytest.CaptureFixture[str], how: str) -> None:
    """All nodes are given back, and the objects are still there: the next rollback removes them."""
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    again = "to continue, run pyebpf-proxy cluster rollback"

    def stop(method: str, path: str) -> None:
        if method == "DELETE" and path == DAEMON_SETS.path(NAMESPACE, NAME):
            raise KeyboardInterrupt if how == "Ctrl-C" else RefusedError(403, "Forbidden", "the policy forbids it")

    api.before = stop
    if how == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            Rollback(api, Output(as_json=False), "", 1.0).run("")
        assert capsys.readouterr().out.endswith(f"interrupted; {again}\n")
    else:
        with pytest.raises(ClusterError, match=f"^the policy forbids it; all nodes are given back; {again}$"):
            Rollback(api, Output(as_json=False), "", 1.0).run("")
    api.before = lambda method, path: None
    Rollback(api, Output(as_json=False), "", 1.0).run("")
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored
