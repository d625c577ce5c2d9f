# SPDX-License-Identifier: Apache-2.0
"""``cluster install``: what changes while it waits for the Lease, and images of other versions."""

from __future__ import annotations

from typing import Any

import pytest

from pyebpf_proxy.cluster import agents, objects, status, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES, NODES, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.lease import NAME as LEASE
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, ON, PARKED, UNREACHED
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.rollback import Rollback
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


def test_a_resumed_node_must_reach_what_kube_proxy_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command had noticed that kube-proxy does not serve the DNS server there. It was interrupted."""
    served, other = "10.96.0.1 443", "10.96.0.10 53/UDP"
    api = FakeApi("n1")
    asked: list[Any] = []

    def task(_: object, what: str, node: str, image: str, command: list[str], *__: object) -> str:
        if what in ("verify", "connect"):
            asked.append((what, " ".join(command[4:])))
            if len(asked) == 1:
                raise KeyboardInterrupt
            if other in asked[-1][1]:
                raise ClusterError(f"{what}: no connection")
        return f"reached {served}\n"

    monkeypatch.setattr(task_pod, "run", task)
    monkeypatch.setattr(task_pod, "targets", lambda _: [served, other])
    with pytest.raises(KeyboardInterrupt):
        install(api)
    capsys.readouterr()
    install(api)
    assert asked == [("verify", served), ("verify", served), ("connect", served)]
    said = capsys.readouterr().out
    assert "the node does not reach 10.96.0.10 port 53/UDP through kube-proxy; this is not tested with" in said
    assert api.pods_of(KUBE_PROXY) == {}


@pytest.mark.parametrize("note", ["", "null", "[]", '{"node": 7}', "{"])
def test_a_note_that_another_program_has_changed(monkeypatch: pytest.MonkeyPatch, note: str) -> None:
    """Then the agent must serve everything."""
    api = FakeApi("n1")
    asked: list[Any] = []

    def task(_: object, what: str, node: str, image: str, command: list[str], *__: object) -> str:
        asked.append((what, " ".join(command[4:])))
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    monkeypatch.setattr(task_pod, "targets", lambda _: ["10.96.0.1 443"])
    api.label("n1", agent=ON)
    api.stored[NODES.path(name="n1")]["metadata"]["annotations"] = {UNREACHED: note}
    install(api)
    assert asked == [("verify", "10.96.0.1 443"), ("connect", "10.96.0.1 443")]


@pytest.mark.parametrize("removed", [[AGENT], [PARKED], [AGENT, PARKED]], ids=["agent", "parked", "both"])
@pytest.mark.parametrize("command", ["install", "rollback"])
def test_labels_that_another_program_removes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], removed: list[str], command: str
) -> None:
    """Without the label of the agent no agent runs, but what it attached decides about each packet."""
    api, path = FakeApi("n1"), NODES.path(name="n1")
    tasks: list[str] = []

    def task(_: object, what: str, *__: object) -> str:
        tasks.append(what)
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    labels = api.stored[path]["metadata"]["labels"]
    labels["kubernetes.io/os"] = "linux"
    install(api)
    for name in removed:
        del api.stored[path]["metadata"]["labels"][name]
    api.get(NODES, "n1")  # the controllers work
    capsys.readouterr()
    status.show(view(api), agents.NOT_ASKED, Output(as_json=False))
    said = capsys.readouterr().out
    assert "to continue, run pyebpf-proxy cluster install; to undo it, run pyebpf-proxy cluster rollback" in said
    assert (f"n1: proxy: its label {AGENT}=true is missing, so no agent runs" in said) == (AGENT in removed)
    assert "0 of 1 node served" in said
    tasks.clear()
    if command == "install":
        install(api)
        assert "fit" not in tasks, "the node may have no proxy: the agent starts at once"
        assert list(api.pods_of(NAME)) == ["n1"]
        assert api.pods_of(KUBE_PROXY) == {}
        assert view(api).is_done("n1")
    else:
        Rollback(api, Output(as_json=False), "", 0.5).run("")
        assert "clean" in tasks
        assert list(api.pods_of(KUBE_PROXY)) == ["n1"]
        assert api.stored[path]["metadata"]["labels"] == labels
        assert api.stored[path]["metadata"].get("annotations", {}) == {}


def test_a_mark_without_a_value_parks_kube_proxy_too() -> None:
    api, path = FakeApi("n1"), NODES.path(name="n1")
    api.stored[path]["metadata"]["labels"]["kubernetes.io/os"] = "linux"
    install(api)
    api.label("n1", parked="")
    Rollback(api, Output(as_json=False), "", 0.5).run("")
    assert list(api.pods_of(KUBE_PROXY)) == ["n1"]
    assert PARKED not in api.stored[path]["metadata"]["labels"]


UNDONE = "to continue, run pyebpf-proxy cluster install; to undo it, run pyebpf-proxy cluster rollback"


def test_ctrl_c_where_no_node_is_in_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """The agent's objects are there, and kube-proxy's DaemonSet is changed."""
    api = FakeApi("n1")
    asked: list[Any] = []

    def interrupt(method: str, path: str) -> None:
        if (method, path) == ("PATCH", DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)):
            asked.append(path)
            if len(asked) == 2:  # the first one is a dry run
                raise KeyboardInterrupt

    api.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        install(api)
    assert capsys.readouterr().out == f"interrupted; {UNDONE}\n"


def test_ctrl_c_while_the_image_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be pulled for minutes."""

    def task(_: object, what: str, node: str, *__: object) -> str:
        if (what, node) == ("fit", "n2"):
            raise KeyboardInterrupt
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    with pytest.raises(KeyboardInterrupt):
        install(FakeApi("n1", "n2"))
    said = capsys.readouterr().out
    assert said.endswith(f"[2/2] n2: interrupted; nothing was changed there; done before: n1; {UNDONE}\n")
    assert said.count("interrupted") == 1


def test_a_command_that_loses_the_lease_between_two_nodes_says_what_is_done() -> None:
    api, lease = FakeApi("n1", "n2"), LEASES.path(NAMESPACE, LEASE)

    def other(method: str, path: str) -> None:
        if api.stored[NODES.path(name="n1")]["metadata"]["labels"].get(PARKED) == ON:
            api.put(lease, api.stored[lease] | {"spec": {"holderIdentity": "rollback by operator@laptop"}})

    api.before = other
    with pytest.raises(StoppedError, match=r"taken over: rollback by operator@laptop; .*; done before: n1$"):
        install(api)


def test_an_error_before_the_first_node_says_that_none_was_taken_over() -> None:
    """A policy forbids the change of kube-proxy's DaemonSet, but not its dry run."""
    api = FakeApi("n1")
    asked: list[Any] = []

    def forbid(method: str, path: str) -> None:
        if (method, path) == ("PATCH", DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)):
            asked.append(path)
            if len(asked) == 2:
                raise RefusedError(403, "Forbidden", "the policy forbids it")

    api.before = forbid
    with pytest.raises(ClusterError, match=f"^the policy forbids it; no node was taken over; {UNDONE}$"):
        install(api)


def test_the_document_says_what_ctrl_c_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -o json no line is printed."""

    def task(_: object, what: str, node: str, *__: object) -> str:
        if (what, node) == ("verify", "n2"):
            raise KeyboardInterrupt
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    output = Output(as_json=True)
    with pytest.raises(KeyboardInterrupt):
        Install(FakeApi("n1", "n2"), output, "", 0.5).run(IMAGE, None, dry_run=False)
    assert output.document["error"] == f"[2/2] n2: interrupted; a proxy serves the node; {UNDONE}"
    assert output.document["done"] == ["n1"]


def test_an_internal_error_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(_: object, what: str, node: str, *__: object) -> str:
        if (what, node) == ("verify", "n2"):
            raise KeyError("items")
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    with pytest.raises(KeyError):
        install(FakeApi("n1", "n2"))
    assert capsys.readouterr().out.endswith(f"\nan internal error has ended the command; {UNDONE}; done before: n1\n")


@pytest.mark.parametrize("moment", ["before its mark is removed", "before it is given back"])
def test_a_node_that_is_deleted_ends_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    """As an autoscaler does: the others go on."""
    api, path = FakeApi("n1", "n2"), NODES.path(name="n1")

    def task(_: object, what: str, node: str, *__: object) -> str:
        if (what, node) == ("verify", "n1"):
            api.stored.pop(path)
            raise ClusterError("verify: no connection")
        return "all is well\n"

    def delete(method: str, asked: str) -> None:
        if asked == path:
            api.stored.pop(path, None)

    if moment == "before it is given back":
        monkeypatch.setattr(task_pod, "run", task)
    else:
        # As after an upgrade by kubeadm: kube-proxy's DaemonSet does not spare the node that is marked.
        api.label("n1", agent=ON, parked=ON)
        api.before = delete
    install(api)
    said = capsys.readouterr().out
    assert "n2: taken over, and verified" in said
    assert ("[1/2] n1: the node no longer exists" in said) == (moment == "before it is given back")
