# SPDX-License-Identifier: Apache-2.0
"""``services``, ``backends``, ``frontends`` on a node of the lab, with the agent and without it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import endpoint
from pyebpf_proxy.see import model, unserved
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.see_tools import answer, error, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
NEARBY = Kind(
    "nearby",
    11,
    externalTrafficPolicy="Local",
    sessionAffinity="ClientIP",
    loadBalancerSourceRanges=["198.51.100.0/24", "2001:db8:2::/64"],
)
EMPTY = Kind("empty", 12)
RENAMED = Kind("renamed", 13)
HINTED = Kind("hinted", 14, trafficDistribution="PreferSameNode")


def _unserved(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "shop", "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


#: ``we`` is also the beginning of the name of ``web``, which is served.
UNSERVED = [
    _unserved("we", clusterIP="None", ports=[{"port": 80}]),
    _unserved("mail", type="ExternalName", externalName="mail.example.com"),
    _unserved(
        "mesh",
        {"service.kubernetes.io/service-proxy-name": "mesh"},
        clusterIP=cluster_ip(90).v4,
        ports=[{"port": 80}],
    ),
]


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with Lab(nodes=2) as made:
        pods = (made.add_pod("web-1", made.nodes[0]), made.add_pod("web-2", made.nodes[1]))
        WEB.endpoints = NEARBY.endpoints = RENAMED.endpoints = HINTED.endpoints = pods
        write_nodes(made)
        write_services(made, WEB, NEARBY, EMPTY, RENAMED)
        _rename_port(made)
        _add_hints(made)
        made.write("unserved.yaml", UNSERVED)
        _terminating(made)
        made.start_agents()
        yield made


def _terminating(lab: Lab) -> None:
    """``web`` gets two more endpoints: one that terminates and still serves, and one that is not ready."""
    objects = WEB.objects()
    for each in objects[1:]:
        family = 6 if each["addressType"] == "IPv6" else 4
        more = [("10.244.2.50", "fd00:10:244:2::50"), ("10.244.2.51", "fd00:10:244:2::51")]
        each["endpoints"] += [
            endpoint(more[0][family == 6], "node2", ready=False, serving=True, terminating=True),
            endpoint(more[1][family == 6], "node2", ready=False, serving=False),
        ]
    lab.write("web.yaml", objects)


def _rename_port(lab: Lab) -> None:
    """The slices of ``renamed`` keep the former name of its port ``http``."""
    objects = RENAMED.objects()
    for each in objects[1:]:
        each["ports"] = [{**port, "name": port["name"].replace("http", "web")} for port in each["ports"]]
    lab.write("renamed.yaml", objects)


def _add_hints(lab: Lab) -> None:
    """Each endpoint of ``hinted`` is meant for its own node."""
    objects = HINTED.objects()
    for each in objects[1:]:
        for made in each["endpoints"]:
            made["hints"] = {"forNodes": [{"name": made["nodeName"]}]}
    lab.write("hinted.yaml", objects)


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def test_the_answer_matches_the_schema(node: Node) -> None:
    ran = see(node, "services", "-o", "json")
    found = msgspec.json.decode(ran.stdout, type=model.Services)
    assert [view.name for view in found.services if view.family == 4] == [
        *("default/empty:dns", "default/empty:http"),
        *("default/hinted:dns", "default/hinted:http"),
        *("default/nearby:dns", "default/nearby:http"),
        *("default/renamed:dns", "default/renamed:http"),
        *("default/web:dns", "default/web:http"),
    ]
    view = next(view for view in found.services if view.name == "default/nearby:http" and view.family == 4)
    assert {(each.kind, each.address, each.port) for each in view.frontends} == {
        ("ClusterIP", cluster_ip(11).v4, 80),
        ("LoadBalancer", vip(11).v4, 80),
        ("ExternalIP", NEARBY.external_ip.v4, 80),
        ("NodePort", "0.0.0.0", 30011),
    }
    assert [(each.address, each.local, each.lists) for each in view.endpoints] == [
        ("10.244.1.10:8080", True, ["cluster", "local"]),
        ("10.244.2.10:8080", False, ["cluster"]),
    ]
    assert (view.internal_traffic_policy, view.external_traffic_policy) == ("Cluster", "Local")
    assert (view.affinity_seconds, view.source_ranges) == (10800, ["198.51.100.0/24"])


def test_the_table_shows_the_same(node: Node) -> None:
    lines = see(node, "services").stdout.splitlines()
    (nearby,) = (line for line in lines if "default/nearby:http" in line and cluster_ip(11).v4 in line)
    assert nearby.split() == [
        *("default/nearby:http", "TCP", f"{cluster_ip(11).v4}:80"),
        *(f"{NEARBY.external_ip.v4}:80,", f"{vip(11).v4}:80", "30011"),
        *("2", "(1", "local)", "external", "Local,", "1", "source", "ranges", "3h"),
    ]


def test_one_service_with_the_endpoints_that_are_left_out(node: Node) -> None:
    found = answer(node, "services", "web:dns")["services"]
    assert [(view["family"], view["protocol"]) for view in found] == [(4, "UDP"), (6, "UDP")]
    assert {each["address"]: each["leftOut"] for each in found[0]["endpoints"]} == {
        "10.244.1.10:5353": "",
        "10.244.2.10:5353": "",
        "10.244.2.50:5353": "terminating, and others are ready",
        "10.244.2.51:5353": "not ready",
    }
    text = see(node, "services", "web:dns").stdout
    assert re.search(r"10\.244\.2\.51:5353 +remote +not ready", text)
    assert re.search(r"10\.244\.1\.10:5353 +default/web-1 +local +all traffic", text)
    assert [each["pod"] for each in found[1]["endpoints"]] == ["default/web-1", "default/web-2", "", ""]


def test_a_service_without_endpoints_is_shown_as_refused(node: Node) -> None:
    assert "no endpoints: refused (port unreachable)" in see(node, "services", "default/empty").stdout


RENAMED_PORT = 'its IPv4 EndpointSlices have the ports "dns"/UDP, "web"/TCP, but not "http"/TCP'


@pytest.mark.parametrize("source", [(), ("--manifests", "--hostname-override=node1")], ids=["agent", "manifests"])
def test_a_port_that_the_slices_do_not_have_is_named(node: Node, world: Lab, source: tuple[str, ...]) -> None:
    more = [word.replace("--manifests", f"--manifests={world.manifests}") for word in source]
    found = answer(node, "services", "renamed", *more)["services"]
    assert {view["port"]: view["noEndpoints"] for view in found if view["family"] == 4} == {
        "dns": "",
        "http": RENAMED_PORT,
    }
    text = see(node, "services", "renamed:http", *more).stdout
    assert f"  no endpoints: refused (port unreachable)\n  {RENAMED_PORT}\n" in text
    steps = answer(node, "explain", CLIENT.v4, f"{vip(13).v4}:80", *more, status=1)["steps"]
    assert steps[-1] == f"default/renamed:http: {RENAMED_PORT}"


def test_a_refused_packet_is_shown_with_the_reason_that_the_agent_knows(node: Node, world: Lab) -> None:
    with pytest.raises(ConnectionRefusedError):
        world.client.call(connect, vip(13).v4)
    drops = {each["reason"]: each for each in answer(node, "drops", status=1)["drops"]}
    refused = drops["reject_no_endpoints"]
    assert (refused["service"], refused["noEndpoints"]) == ("default/renamed:http", RENAMED_PORT)
    assert f"  default/renamed:http: {RENAMED_PORT}\n" in see(node, "drops").stdout
    assert f"(default/renamed:http: {RENAMED_PORT})" in see(node, "status").stdout


def connect(address: str) -> None:
    socket.create_connection((address, 80), timeout=5).close()


def test_topology_hints_are_named(node: Node) -> None:
    note = "topology hints: only endpoints for this node"
    views = answer(node, "services", "hinted:http")["services"]
    assert [view["endpointNotes"] for view in views] == [[note], [note]]
    assert f"  endpoints      {note}\n" in see(node, "services", "hinted:http").stdout
    steps = answer(node, "explain", CLIENT.v4, f"{vip(14).v4}:80")["steps"]
    assert steps[-2:] == ["externalTrafficPolicy Cluster: all endpoints, masqueraded", note]
    assert answer(node, "services", "web:http")["services"][0]["endpointNotes"] == []


def test_backends_and_frontends(node: Node) -> None:
    backends = answer(node, "backends", "web:http")["backends"]
    assert [(each["address"], each["local"]) for each in backends] == [
        ("10.244.1.10:8080", True),
        ("10.244.2.10:8080", False),
        ("[fd00:10:244:1::10]:8080", True),
        ("[fd00:10:244:2::10]:8080", False),
    ]
    assert [each["pod"] for each in backends] == ["default/web-1", "default/web-2"] * 2
    frontends = answer(node, "frontends", "--address", vip(10).v6)["frontends"]
    assert [(each["port"], each["protocol"], each["kind"], each["service"]) for each in frontends] == [
        (53, "UDP", "LoadBalancer", "default/web:dns"),
        (80, "TCP", "LoadBalancer", "default/web:http"),
    ]


def test_diff_shows_differences_and_nothing_else(node: Node, world: Lab) -> None:
    ran = see(node, "services", "--diff")
    assert (ran.stdout, ran.returncode) == ("the kernel has the desired state\n", 0)
    key = cluster_ip(10).v4.split(".")
    pin = node.agent.pin("frontends4")
    node.namespace.run("bpftool", "map", "delete", "pinned", str(pin), "key", *key, "80", "0", "6", "0")
    try:
        (view,) = answer(node, "services", "--diff", status=1)["services"]
        assert (view["name"], view["family"]) == ("default/web:http", 4)
        assert view["differences"] == [f"address ClusterIP {cluster_ip(10).v4}:80 is desired, but not in the kernel"]
    finally:
        value = [*_words(view["id"]), *_words(1)]
        words = ["pinned", str(pin), "key", *key, "80", "0", "6", "0", "value", *value]
        node.namespace.run("bpftool", "map", "update", *words)
    assert see(node, "services", "--diff").returncode == 0


def _words(number: int) -> list[str]:
    return [str(byte) for byte in number.to_bytes(4, "little")]


def test_diff_against_another_source(node: Node, tmp_path: Path) -> None:
    """No service port is wanted there: each one is reported as superfluous, and so is each of its endpoints."""
    found = answer(node, "services", "--diff", "--manifests", str(tmp_path), status=1)["services"]
    assert len(found) == 20
    assert {tuple(view["differences"]) for view in found} == {("in the kernel, but not desired",)}


def test_only_terminals_get_colours(node: Node) -> None:
    shown = _on_a_terminal(node, "services", "default/empty:http")
    assert "\x1b[31mno endpoints" in shown
    assert "\x1b" not in _on_a_terminal(node, "services", "default/empty:http", NO_COLOR="1")


def _on_a_terminal(node: Node, *arguments: str, **environment: str) -> str:
    script = ["script", "-qec", " ".join([*command(), *arguments]), "/dev/null"]
    known = {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory), "TERM": "xterm"}
    run = ["ip", "netns", "exec", node.namespace.name, *script]
    return subprocess.run(run, env=os.environ | known | environment, capture_output=True, text=True, check=True).stdout


HEADLESS = (
    "Service shop/we is not served: it is headless (clusterIP: None), so it has no address: DNS answers with those of"
    " its pods"
)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("services", "we"), HEADLESS),
        (("services", "shop/we:http", "-o", "json"), HEADLESS),
        (("services", "-n", "shop", "we"), HEADLESS),
        (("backends", "we"), HEADLESS),
        (("frontends", "we"), HEADLESS),
        (
            ("services", "mail"),
            "Service shop/mail is not served: its type is ExternalName, so it has no address: DNS answers with another"
            " name",
        ),
        (
            ("top", "mesh", "--once"),
            "Service shop/mesh is not served: its label service.kubernetes.io/service-proxy-name leaves it to another"
            ' proxy, "mesh"',
        ),
        (("services", "shop/wbe"), "no Service is called shop/wbe"),
        (("services", "-n", "shop"), "no Service of namespace shop is served"),
    ],
)
def test_a_service_that_is_never_served_is_named(node: Node, words: tuple[str, ...], text: str) -> None:
    assert error(node, *words, status=2) == text


def test_a_beginning_of_a_name_still_counts_in_another_namespace(node: Node) -> None:
    found = answer(node, "services", "default/we")["services"]
    assert {view["service"] for view in found} == {"web"}


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("services", "wbe"), 2, "no Service is called wbe; did you mean web?"),
        (("services", "-n", "defalt"), 2, "no Service of namespace defalt is served; did you mean default?"),
        (("backends", "web:dnss"), 2, "default/web has no port dnss: it has dns, http"),
        (("frontends", "--address", "10.96.0"), 2, "10.96.0 is not an IP address"),
        (("frontends", "--address", "10.96.0.99"), 2, "no service has the address 10.96.0.99"),
        (
            ("services", "--diff", "--hostname-override", "node1"),
            2,
            "--hostname-override requires --manifests or --config",
        ),
        (("services", "--diff", "--manifests", "/none"), 3, "the manifests folder /none does not exist"),
    ],
)
def test_invalid_arguments(node: Node, words: tuple[str, ...], status: int, text: str) -> None:
    assert error(node, *words, status=status) == text


def test_another_run_folder_is_reported_as_empty(node: Node, tmp_path: Path) -> None:
    line = error(node, "services", status=3, PYEBPF_PROXY_DIRECTORY=str(tmp_path / "elsewhere"))
    assert line.startswith(f"no maps are pinned for the run folder {tmp_path / 'elsewhere'}")
    assert line.endswith("start the agent, or name its run folder with --directory")


def test_without_the_agent_the_kernel_still_answers(node: Node, world: Lab) -> None:
    before = see(node, "services", "-o", "json").stdout
    node.agent.kill()
    try:
        assert json.loads(see(node, "services", "-o", "json").stdout) == json.loads(before)
        assert see(node, "backends", "web").returncode == see(node, "frontends").returncode == 0
        unknown = error(node, "services", "mail", status=2)
        assert unknown == f"no Service is called mail{unserved.NOTE}"
        assert error(node, "services", "--diff", status=3) == (
            f"no agent runs on {node.agent.directory}, so the desired state is unknown: name the source with"
            " --manifests or --config"
        )
        more = ("--manifests", str(world.manifests), "--config", str(node.agent.folder / "config.yaml"))
        assert see(node, "services", "--diff", *more).stdout == "the kernel has the desired state\n"
        more = ("--manifests", str(world.manifests), "--hostname-override", "node1")
        assert see(node, "services", "--diff", *more).stdout == "the kernel has the desired state\n"
    finally:
        node.agent.start()
        node.agent.wait_synced()
