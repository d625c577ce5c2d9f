# SPDX-License-Identifier: Apache-2.0
"""The task pods of ``pyebpf-proxy cluster`` on a node with the real kube-proxy."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pyebpf_proxy.cluster import objects, peer
from pyebpf_proxy.lab.addresses import Dual, cluster_ip, vip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.cluster.beside import NODE, NODE_IP, Side
from tests.support.apiserver import ApiServer, Object, running
from tests.support.kube_proxy_tools import remove

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]
PORTS = [Port("http", 80, 8080)]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    yield from running()


def tools(folder: Path, kind: str) -> Path:
    """A folder in which ``iptables`` and its like are of this kind, as kube-proxy's image chooses them."""
    folder.mkdir()
    for command, action in itertools.product(("iptables", "ip6tables"), ("", "-save", "-restore")):
        (folder / f"{command}{action}").symlink_to(shutil.which(f"{command}-{kind}{action}") or "/nowhere")
    return folder


@pytest.mark.parametrize(("mode", "kind"), [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")])
def test_rules_are_awaited_and_removed(server: ApiServer, tmp_path: Path, mode: str, kind: str) -> None:
    """Kube-proxy's rules are found once it has written them; ``verify`` removes what it left, and asks the Service.

    With the capabilities of the task pods and no others. What another program uses stays, and is named.
    """
    pod = objects.task_pod("verify", "e", "n1", "x:1", ["true"])
    (container,) = pod["spec"]["containers"]
    added = ",".join(f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"])
    few_rights = ["setpriv", f"--bounding-set=-all,{added}", f"--inh-caps=-all,{added}"]
    endpoint = Dual("198.51.100.7", "2001:db8::7")
    addresses = [{"type": "InternalIP", "address": NODE_IP}]
    server.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": {"addresses": addresses}})
    for item in (service("web", PORTS, cluster_ip(11)), *slices("web", PORTS, [(endpoint, "elsewhere")])):
        server.apply(item)
    places = [cluster_ip(11).v4, "80", cluster_ip(11).v6, "80"]
    with Side("kube-proxy", server, tmp_path) as side:
        side.programs = tools(tmp_path / "programs", kind)

        def task(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "pyebpf_proxy", "cluster", "on-node", *arguments]
            inside = ["ip", "netns", "exec", side.namespace.name, *few_rights, *command]
            return subprocess.run(inside, capture_output=True, text=True, check=False, timeout=100)

        command = [sys.executable, "-m", "pyebpf_proxy", "cluster", "on-node", "kube-proxy", *places]
        waiting = subprocess.Popen(
            ["ip", "netns", "exec", side.namespace.name, *few_rights, *command],
            stdout=subprocess.PIPE,
            text=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
        side.start({"mode": mode, "clusterCIDR": "10.244.0.0/16", mode: {"syncPeriod": "30s"}})
        output, _ = waiting.communicate(timeout=30)
        assert (waiting.returncode, output) == (0, "all is well\n")
        side.stop()
        if mode == "iptables":
            # As portmap with externalSetMarkChain.
            side.namespace.run(f"iptables-{kind}", "-t", "nat", "-N", "CNI-HOSTPORT-SETMARK")
            side.namespace.run(f"iptables-{kind}", "-t", "nat", "-A", "CNI-HOSTPORT-SETMARK", "-j", "KUBE-MARK-MASQ")
        done = task("verify")
        assert done.returncode == 0, done
        assert "removed what kube-proxy left behind: " in done.stdout
        kept = (
            f"warning: iptables-{kind} IPv4: table nat: chain KUBE-MARK-MASQ stays, because a rule of another program"
        )
        assert (kept in done.stdout) == (mode == "iptables"), done
        left = side.namespace.run(f"iptables-{kind}-save") + side.namespace.run("nft", "list", "tables")
        assert "KUBE-SVC" not in left
        assert "kube-proxy" not in left
        done = task("fit")
        assert (done.returncode, done.stdout) == (0, "all is well\n")


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_the_probe_waits_until_kube_proxy_has_written_rules(server: ApiServer, tmp_path: Path, mode: str) -> None:
    """Its health page is good before. A clean-up that follows the probe would leave the node without Services."""
    addresses = [{"type": "InternalIP", "address": NODE_IP}]
    server.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": {"addresses": addresses}})

    def reads(group: str, name: str) -> Object:
        return {"apiGroups": [group], "resources": [name], "verbs": ["list", "watch"]}

    rules = [reads("", "services"), reads("", "nodes"), reads("networking.k8s.io", "servicecidrs")]
    account = f"no-slices-{mode}"
    server.account(account, rules)
    with Side("kube-proxy", server, tmp_path) as side:
        side.token = server.token(account)
        side.start({"mode": mode, "clusterCIDR": "10.244.0.0/16"})
        command = [sys.executable, "-m", "pyebpf_proxy", "probe", "kube-proxy"]
        probe = subprocess.Popen(
            ["ip", "netns", "exec", side.namespace.name, *command], stdout=subprocess.PIPE, text=True
        )
        with pytest.raises(subprocess.TimeoutExpired):
            probe.wait(3)
        server.account(account, [*rules, reads("discovery.k8s.io", "endpointslices")])
        output, _ = probe.communicate(timeout=60)
    assert probe.returncode == 0
    # Between these, IPv4 may be programmed before IPv6.
    first, *_, last = output.splitlines()
    assert first == "waiting for kube-proxy at 127.0.0.1:10256: it has not programmed the node yet (IPv4, IPv6)"
    assert last == "kube-proxy has programmed this node: IPv4, IPv6"


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_the_probe_waits_if_kube_proxys_rules_were_removed(server: ApiServer, tmp_path: Path, mode: str) -> None:
    """As by an agent that restarts beside kube-proxy. In mode nftables kube-proxy writes them again within an hour."""
    with Side("kube-proxy", server, tmp_path) as side:
        side.start({"mode": mode, "clusterCIDR": "10.244.0.0/16", mode: {"syncPeriod": "1h"}})
        command = ["ip", "netns", "exec", side.namespace.name, sys.executable, "-m", "pyebpf_proxy", "probe"]
        subprocess.run([*command, "kube-proxy"], check=True, timeout=60)
        assert remove(side.namespace, at_start=True).removed
        probe = subprocess.Popen([*command, "kube-proxy"], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            probe.wait(3)
        probe.terminate()
        output, _ = probe.communicate(timeout=60)
    assert "its rules are gone (IPv4, IPv6): an agent that starts removes them; restart kube-proxy" in output


def test_verify_connects_to_services() -> None:
    namespace = Namespace(f"task-{os.getpid()}")
    namespace.create()
    try:
        namespace.ip("link set lo up")
        listening = [
            sys.executable,
            "-c",
            "import socket; s = socket.create_server(('127.0.0.1', 80))\n"
            "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 53))\n"
            "while True: data, who = u.recvfrom(512); u.sendto(data[:2], who)",
        ]
        with subprocess.Popen(["ip", "netns", "exec", namespace.name, *listening]) as process:
            command = [sys.executable, "-m", "pyebpf_proxy", "cluster", "on-node", "connect", "127.0.0.1", "80"]
            results = [
                subprocess.run(
                    ["ip", "netns", "exec", namespace.name, *command, *more],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                for more in (["127.0.0.1", "53/UDP"], ["127.0.0.1", "81"])
            ]
            process.kill()
    finally:
        namespace.remove()
    assert [each.returncode for each in results] == [0, 1], results
    assert results[0].stdout == "reached 127.0.0.1 80\nreached 127.0.0.1 53/UDP\nall is well\n"
    assert results[1].stdout.splitlines()[-1] == "no connection to the Service at 127.0.0.1 port 81: Connection refused"


# ---- the pods of `cluster test` ------------------------------------------------------------------------------------


def test_peers_ask_and_answer_through_the_agent() -> None:
    """Real pods behind a real agent: what `cluster test` requests is reached, and what is not is reported."""
    ports = [Port("tcp", 80, peer.PORT, node_port=30080), Port("udp", 80, peer.PORT, "UDP", node_port=30080)]
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        pods = [lab.add_pod(name, only, serve=False) for name in ("one", "two")]
        places = [(pod.address, only.name) for pod in pods]
        lab.write("node.yaml", [node(only.name, only.address, only.pod_cidr)])
        items = [service("web", ports, cluster_ip(11), vip=vip(11)), *slices("web", ports, places)]
        lab.write("web.yaml", items)
        lab.start_agents()
        rows = [
            {"address": address, "port": port, "protocol": protocol, "size": 1 if protocol == "UDP" else 65536}
            for target, port in ((cluster_ip(11), 80), (only.address, 30080), (vip(11), 80))
            for address in target
            for protocol in ("TCP", "UDP")
        ]
        command = [sys.executable, "-m", "pyebpf_proxy", "cluster", "on-node", "peer"]
        with ExitStack() as stack:

            def start(namespace: str, name: str, plan: list[dict[str, object]]) -> subprocess.Popen[str]:
                environment = {**os.environ, "PEER_NAME": name, "PEER_PLAN": json.dumps(plan)}
                process = subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *command], env=environment, stdout=subprocess.PIPE, text=True
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
                return process

            hairpin = [rows[0] | {"only": pod.name} for pod in pods]
            running = [start(pod.namespace.name, pod.name, [*rows, hairpin[i]]) for i, pod in enumerate(pods)]
            running.append(start(only.namespace.name, "", rows))
            for index, process in enumerate(running):
                assert process.stdout is not None
                lines = list(iter(process.stdout.readline, "done\n"))
                answers = [json.loads(line) for line in lines]
                assert [answer["ok"] for answer in answers] == [True] * len(answers), answers
                if index < 2:
                    assert answers[-1]["detail"] == pods[index].name, "hairpin"
            assert running[2].wait(10) == 0
            missing = only.namespace.call(peer.ask, rows[0] | {"only": "three"}, 0.0)
            assert not missing["ok"]
            assert missing["detail"] == "one, two answered, not three"
            refused = only.namespace.call(peer.ask, rows[0] | {"port": 81}, 0.0)
            assert not refused["ok"]
