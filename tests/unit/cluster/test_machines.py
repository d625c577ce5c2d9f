# SPDX-License-Identifier: Apache-2.0
"""A node whose object was deleted, and that registers again: what an agent has attached there is not forgotten."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import machines, objects, status, task_pod
from pyebpf_proxy.cluster.api import CONFIG_MAPS, DAEMON_SETS, NODES
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import AGENT, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.rollback import Rollback
from tests.unit.cluster.fake_api import FakeApi, node_object

IMAGE = "registry.example/pyebpf-proxy:1"
LINUX = {"kubernetes.io/os": "linux"}
NOTED = CONFIG_MAPS.path(NAMESPACE, machines.CONFIG_MAP)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The task pods that ran: what and where."""
    ran: list[tuple[str, str]] = []

    def run(_: object, what: str, node: str, *__: object) -> str:
        ran.append((what, node))
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", run)
    monkeypatch.setattr(task_pod, "targets", lambda _: [])
    return ran


def installed() -> FakeApi:
    api = FakeApi("n1", "n2")
    for node in ("n1", "n2"):
        register_again(api, node)
    Install(api, Output(as_json=False), "", 1.0).run(IMAGE, None, dry_run=False)
    assert api.stored[NOTED]["data"] == {"n1": "machine of n1", "n2": "machine of n2"}
    return api


def register_again(api: FakeApi, node: str) -> None:
    item = node_object(node)
    item["metadata"]["labels"] |= LINUX
    api.put(NODES.path(name=node), item)


def said(api: FakeApi) -> dict[str, tuple[str, str]]:
    """What ``status`` says of each node: its state, and what an administrator has to look at."""
    found = view(api)
    problems = {each.where: each.text for each in status.problems(found, IMAGE)}
    return {node: (status.state(found, node), problems.get(node, "")) for node in found.nodes}


@pytest.mark.parametrize("command", ["install", "rollback"])
def test_status_names_the_node_and_both_commands_end_it(tasks: list[tuple[str, str]], command: str) -> None:
    api = installed()
    assert said(api) == {"n1": ("taken over", ""), "n2": ("taken over", "")}
    register_again(api, "n2")
    state, text = said(api)["n2"]
    assert state == "registered again"
    assert text.startswith("the node has registered again, without its labels; if it was not rebooted")
    tasks.clear()
    if command == "install":
        Install(api, Output(as_json=False), "", 1.0).run("", None, dry_run=False)
        assert ("verify", "n2") in tasks
        assert api.stored[NODES.path(name="n2")]["metadata"]["labels"][AGENT] == objects.ON
        assert said(api)["n2"] == ("taken over", "")
    else:
        Rollback(api, Output(as_json=False), "", 1.0).run("")
        assert ("clean", "n2") in tasks
        assert NOTED not in api.stored
        assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_a_rollback_of_one_node_forgets_only_that_one(tasks: list[tuple[str, str]]) -> None:
    """The node is given back: if it registers again, nothing of the agent is there."""
    api = installed()
    node = api.stored[NODES.path(name="n1")]
    node["metadata"]["labels"]["role"] = "first"
    Rollback(api, Output(as_json=False), "role=first", 1.0).run("")
    assert api.stored[NOTED]["data"] == {"n2": "machine of n2"}
    register_again(api, "n1")
    assert not view(api).is_ours("n1")
    assert ("clean", "n1") in tasks


def test_another_machine_of_the_same_name_is_a_new_node(tasks: list[tuple[str, str]]) -> None:
    api = installed()
    item = node_object("n2")
    item["status"]["nodeInfo"]["machineID"] = "a new machine"
    api.put(NODES.path(name="n2"), item)
    assert not view(api).is_ours("n2")
    del item["status"]["nodeInfo"]["machineID"]  # its kubelet has not reported yet
    api.put(NODES.path(name="n2"), item)
    assert not view(api).is_ours("n2")
    assert tasks


def test_nodes_that_an_older_command_has_taken_over_are_noted_at_the_next_install(
    tasks: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = installed()
    del api.stored[NOTED]
    tasks.clear()
    Install(api, Output(as_json=False), "", 1.0).run("", None, dry_run=False)
    assert api.stored[NOTED]["data"] == {"n1": "machine of n1", "n2": "machine of n2"}
    assert not tasks
    # Nodes that come and go with new names: without an end the ConfigMap would be full one day.
    monkeypatch.setattr(machines, "_MANY", 1)
    del api.stored[NODES.path(name="n2")]
    Install(api, Output(as_json=False), "", 1.0).run("", None, dry_run=False)
    assert api.stored[NOTED]["data"] == {"n1": "machine of n1"}
