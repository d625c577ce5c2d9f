# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster services`` and ``explain``: real agents, reached through a real API server.

The kubelets are simulated: a command in a pod runs in the node's network namespace, with its agent's run folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.cluster.api import Api
from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests.cluster.commands import IMAGE, run, simulated_cluster
from tests.cluster.simulated_nodes import SimulatedNodes
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Object

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

WEB, DNS, LATE = [Port("http", 80, 8080)], [Port("dns", 53, 5353, "UDP")], [Port("", 443, 8443)]
NAMES = ("web", "dns")


def objects(lab: Lab) -> dict[str, list[Object]]:
    """By file."""
    places = [(pod.address, pod.node.name) for pod in lab.pods.values()]
    nodes = [node(each.name, each.address, each.pod_cidr) for each in lab.nodes]
    web = [service("web", WEB, cluster_ip(11)), *slices("web", WEB, places)]
    return {"nodes.yaml": nodes, "web.yaml": web, "dns.yaml": [service("dns", DNS, cluster_ip(12))]}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three nodes, each with an agent and a separate folder: so nodes may have different objects."""
    with Lab(nodes=3) as started:
        for each in started.nodes:
            started.add_pod(f"web-{each.name}", each)
            each.agent.manifests = started.manifests.with_name(f"manifests-{each.name}")
        for name, items in objects(started).items():
            started.write(name, items)
        for each in started.nodes:
            shutil.copytree(started.manifests, each.agent.manifests)
        started.start_agents()
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contains the administrator's kubeconfig."""
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def nodes(server: ApiServer, lab: Lab, folder: Path) -> Iterator[SimulatedNodes]:
    """The cluster of these nodes after the takeover, with the Services and the pods as API objects."""
    with simulated_cluster(server, folder, [each.name for each in lab.nodes]) as started:

        def execute(name: str, words: list[str]) -> tuple[int, bytes, bytes]:
            assert words[0] == "pyebpf-proxy"
            where = lab.node(name)
            inside = ["ip", "netns", "exec", where.namespace.name, *command(), *words[1:]]
            environment = {**os.environ, "PYEBPF_PROXY_DIRECTORY": str(where.agent.directory)}
            done = subprocess.run(inside, env=environment, capture_output=True, check=False, timeout=60)
            return done.returncode, done.stdout, done.stderr

        started.execute = execute
        for item in objects(lab)["web.yaml"] + objects(lab)["dns.yaml"]:
            server.apply(item)
        for pod in lab.pods.values():
            path = "/api/v1/namespaces/default/pods"
            specification = {"nodeName": pod.node.name, "containers": [{"name": "web", "image": "web"}]}
            server.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": specification})
            status = {"podIPs": [{"ip": each} for each in pod.address], "podIP": pod.address.v4, "phase": "Running"}
            server.request("PATCH", f"{path}/{pod.name}/status", {"status": status}, "application/merge-patch+json")
        run(folder, "install", "--image", IMAGE)
        yield started
        for pod in lab.pods.values():
            server.request("DELETE", f"{path}/{pod.name}", {"gracePeriodSeconds": 0})


def document(folder: Path, *arguments: str, status: int = 0) -> Any:
    return json.loads(run(folder, *arguments, "-o", "json", status=status))


def change(lab: Lab, name: str, file: str, items: list[Object]) -> None:
    """Change a file of one node only."""
    import time

    import yaml

    agent = lab.node(name).agent
    since = time.time()
    temporary = agent.manifests / f".{file}"
    temporary.write_text(yaml.safe_dump_all(items))
    temporary.rename(agent.manifests / file)
    agent.wait_synced(since)


def test_all_nodes_side_by_side(nodes: SimulatedNodes, lab: Lab, folder: Path) -> None:
    names = [each.name for each in lab.nodes]
    answer = document(folder, "services")
    assert (answer["kind"], answer["nodes"], answer["problems"]) == ("ClusterServices", names, [])
    found = {(each["name"], each["family"]): each for each in answer["services"]}
    assert found.keys() == {(f"default/{name}", family) for name in ("web:http", "dns:dns") for family in (4, 6)}
    assert all(each["nodes"] == names and each["differences"] == [] for each in found.values())
    web = found["default/web:http", 4]
    assert web["endpoints"] == sorted(f"{pod.address.v4}:8080" for pod in lab.pods.values())
    assert f"{cluster_ip(11).v4}:80 ClusterIP" in web["frontends"]
    output = run(folder, "services", "default/web")
    assert "default/web:http  TCP" in output
    assert "3 of 3" in output
    assert "2 service ports on 3 nodes: no node differs" in output
    # Without the nodes that were not selected.
    answer = document(folder, "services", "--nodes", f"kubernetes.io/hostname={names[0]}")
    assert answer["nodes"] == names[:1]


def test_a_node_that_differs_is_named_with_its_missing_objects(nodes: SimulatedNodes, lab: Lab, folder: Path) -> None:
    _first, second, third = (each.name for each in lab.nodes)
    items = objects(lab)
    gone = next(iter(lab.pods.values())).address
    places = [(pod.address, pod.node.name) for pod in list(lab.pods.values())[1:]]
    try:
        change(lab, third, "web.yaml", [service("web", WEB, cluster_ip(11)), *slices("web", WEB, places)])
        change(lab, second, "dns.yaml", [])
        answer = document(folder, "services", status=1)
        differences = {
            (each["name"], each["family"], one["node"], one["text"], one["expected"])
            for each in answer["services"]
            for one in each["differences"]
        }
        assert differences == {
            ("default/web:http", 4, third, f"lacks the endpoint {gone.v4}:8080", False),
            ("default/web:http", 6, third, f"lacks the endpoint [{gone.v6}]:8080", False),
            ("default/dns:dns", 4, second, "does not have it", False),
            ("default/dns:dns", 6, second, "does not have it", False),
        }
        output = run(folder, "services", status=1)
        assert f"differs   default/web:http TCP IPv4: {third} lacks the endpoint {gone.v4}:8080" in output
        assert f"4 service ports on 3 nodes: 2 differ: {second}, {third}" in output
        # The same for one Service; a node that does not have it has answered too.
        output = run(folder, "services", "dns", status=1)
        assert f"{second} does not have it" in output
        assert "no answer" not in output
    finally:
        change(lab, third, "web.yaml", items["web.yaml"])
        change(lab, second, "dns.yaml", items["dns.yaml"])
    assert "no node differs" in run(folder, "services")


def test_topology_hints_are_no_difference(nodes: SimulatedNodes, server: ApiServer, lab: Lab, folder: Path) -> None:
    """The slices make nodes use different endpoints."""
    third = lab.nodes[2].name
    places = [(pod.address, pod.node.name) for pod in list(lab.pods.values())[1:]]
    hinted = slices("web", WEB, [(pod.address, pod.node.name) for pod in lab.pods.values()])
    for each in hinted:
        for endpoint in each["endpoints"]:
            endpoint["hints"] = {"forZones": [{"name": "a"}]}
    try:
        for each in hinted:
            server.apply(each)
        change(lab, third, "web.yaml", [service("web", WEB, cluster_ip(11)), *slices("web", WEB, places)])
        output = run(folder, "services", "web")
        assert f"expected  default/web:http TCP IPv4: {third} lacks the endpoint" in output
        assert "no node differs" in output
    finally:
        change(lab, third, "web.yaml", objects(lab)["web.yaml"])
        for item in objects(lab)["web.yaml"]:
            server.apply(item)


def test_a_node_without_an_answer_is_named(nodes: SimulatedNodes, lab: Lab, folder: Path) -> None:
    real, second = nodes.execute, lab.nodes[1].name
    broken = {
        "another layout": (3, b"", b"Error: maps of another layout\n"),
        "the agent may have another version": (0, b'{"kind": "Services"}', b""),
    }
    for text, answer in broken.items():
        nodes.execute = lambda name, words, answer=answer: answer if name == second else real(name, words)
        output = run(folder, "services", status=1)
        assert f"no answer  {second}: " in output
        assert text in output
        assert "2 of 2" in output
    nodes.execute = real


def test_explain_a_connection_of_a_pod(nodes: SimulatedNodes, lab: Lab, folder: Path) -> None:
    pod = next(iter(lab.pods.values()))
    output = run(folder, "explain", pod.name, "web")
    assert f"pod default/{pod.name}, answer of the agent on {pod.node.name}:" in output
    assert f" > {cluster_ip(11).v4}:80 TCP, from {pod.device}" in output
    assert output.count("It goes to one of these endpoints") == 2, "both families"
    assert "It agrees with the rules." in output
    answer = document(folder, "explain", f"default/{pod.name}", "default/web:http")
    assert (answer["kind"], answer["node"]) == ("ClusterExplanation", pod.node.name)
    assert [each["verdict"] for each in answer["explanations"]] == ["served", "served"]
    assert len(answer["explanations"][0]["endpoints"]) == 3
    assert answer["services"][0]["nodes"] == [each.name for each in lab.nodes]
    # No endpoints: refused, which is a problem.
    answer = document(folder, "explain", pod.name, "dns:53", status=1)
    assert {each["verdict"] for each in answer["explanations"]} == {"refused"}


@pytest.mark.parametrize(
    ("arguments", "status", "output"),
    [
        (("explain", "absent", "web"), 2, "there is no pod default/absent"),
        (("explain", "POD", "nothing"), 2, "there is no Service default/nothing"),
        (("explain", "POD", "web:9"), 2, "Service default/web has no port 9; it has: http"),
        (("explain", "a/b/c", "web"), 2, "a/b/c is not the name of a pod"),
        (("services", "nothing"), 2, "no Service is called nothing"),
        (("services", "--nodes", "no=such"), 3, "no agent runs on these nodes"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], status: int, output: str, nodes: SimulatedNodes, lab: Lab, folder: Path
) -> None:
    words = [next(iter(lab.pods)) if word == "POD" else word for word in arguments]
    (line,) = run(folder, *words, status=status).splitlines()
    assert line.startswith("Error: ")
    assert output in line


def test_missing_rights_are_named_before_any_request(nodes: SimulatedNodes, server: ApiServer, folder: Path) -> None:
    server.account("looker", [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "get"]}])
    server.kubeconfig(folder / "admin.conf", {"token": server.token("looker")})
    output = run(folder, "services", status=3)
    assert "this user may not get daemonsets.apps in kube-system; get, create pods/exec in kube-system" in output
    server.kubeconfig(folder / "admin.conf", {"token": ADMIN_TOKEN})
    assert Api(str(folder / "admin.conf")).missing_rights([("get", "", "pods/exec", "kube-system")]) == []
