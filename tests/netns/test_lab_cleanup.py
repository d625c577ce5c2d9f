# SPDX-License-Identifier: Apache-2.0
"""``--cleanup`` restores the node, also where other software has filters and tables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.lab import leftovers
from pyebpf_proxy.lab.client import ANSWERED, TIMED_OUT, UNREACHABLE, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)

# The kernel itself changes these all the time.
RESTLESS = ("nf_conntrack_count", "/stat/", "nf_conntrack_buckets", "random", "stable_secret", "base_reachable")

FOREIGN_NFT = """
table inet foreign {
    map numbers { type inet_service : ipv4_addr; elements = { 80 : 10.1.1.1, 443 : 10.1.1.2 }; }
    chain forward { type filter hook forward priority 0; policy accept; tcp dport 4444 drop; }
    chain prerouting { type nat hook prerouting priority -100; ip daddr 192.0.2.250 dnat ip to tcp dport map @numbers; }
}
"""


def snapshot(node: Node) -> dict[str, Any]:
    """The parts of a node that could differ afterwards, in a comparable and readable form."""
    run = node.namespace.run
    links = json.loads(run("ip", "-j", "-d", "link"))
    devices = [link["ifname"] for link in links]
    state: dict[str, Any] = {
        "links": links,
        "addresses": _without(json.loads(run("ip", "-j", "addr")), "valid_life_time", "preferred_life_time"),
        "routes": [run("ip", f"-{family}", "route", "show", "table", "all") for family in (4, 6)],
        "rules": [run("ip", f"-{family}", "rule") for family in (4, 6)],
        "qdiscs": json.loads(run("tc", "-j", "qdisc", "show")),
        "filters": {
            f"{device} {hook}": json.loads(run("tc", "-j", "filter", "show", "dev", device, hook) or "[]")
            for device in devices
            for hook in ("ingress", "egress")
        },
        "tcx": node.namespace.call(_tcx),
        "nft": [
            entry for entry in json.loads(run("nft", "-j", "list", "ruleset"))["nftables"] if "metainfo" not in entry
        ],
        "sysctls": node.namespace.call(_sysctls),
        "mounts": _mounts(),
        "directory": sorted(str(path) for path in node.agent.directory.rglob("*")),
    }
    return state


def _tcx() -> dict[str, list[tuple[int, ...]]]:
    """The tcx programs of every device, at ingress and at egress."""
    return {
        name: [tcx.chain(index, hook) for hook in (tcx.INGRESS, tcx.EGRESS)] for index, name in socket.if_nameindex()
    }


def _without(value: Any, *keys: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, *keys) for key, each in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(each, *keys) for each in value]
    return value


def _sysctls() -> dict[str, str]:
    found = {}
    for folder, _, names in os.walk("/proc/sys/net"):
        for name in names:
            path = f"{folder}/{name}"
            if any(part in path for part in RESTLESS):
                continue
            try:
                found[path] = Path(path).read_text()
            except OSError:  # write-only
                continue
    return found


def _mounts() -> list[str]:
    """Mount points of this process and of process 1, without those of other labs that may run at the same time."""
    points = []
    for pid in ("self", "1"):
        with open(f"/proc/{pid}/mountinfo") as file:
            points += [f"{pid} {line.split()[4]} {line.split(' - ')[1].split()[0]}" for line in file]
    mine = f"/pep-{os.getpid()}-"
    # Named namespaces are mounts too, and may be created meanwhile. Other tests mount below the temporary folder.
    others = ("/pep-", " nsfs", f"{tempfile.gettempdir()}/")
    return sorted(point for point in points if mine in point or not any(word in point for word in others))


def cgroup_programs() -> set[int]:
    """Ids of all programs attached to cgroups."""
    root = "/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"

    def tree() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bpftool", "-j", "cgroup", "tree", root], capture_output=True, text=True, check=False)

    # bpftool stops if a cgroup of another container is removed while it looks.
    shown = wait_until(lambda: done if (done := tree()).returncode == 0 else None, "bpftool can look at every group")
    return {program["id"] for group in json.loads(shown.stdout or "[]") for program in group.get("programs", [])}


def cgroup_programs_of(before: set[int], node: Node) -> set[int]:
    """Programs of ``node``: only its agent has these maps, while other agents come and go."""
    maps = set()
    for name in ("services", "socket_revnat4", "socket_revnat6"):  # each of the eight programs uses one of these
        shown = node.namespace.run("bpftool", "-j", "map", "show", "pinned", str(node.agent.pin(name)))
        maps.add(json.loads(shown)["id"])
    programs = json.loads(node.namespace.run("bpftool", "-j", "prog", "show"))
    own = {program["id"] for program in programs if maps & set(program.get("map_ids", []))}
    return own & (cgroup_programs() - before)


@pytest.fixture(params=["alone", "with others"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Lab() as lab:
        first = lab.nodes[0]
        WEB.endpoints = (lab.add_pod("web-1", first), lab.add_pod("web-2", lab.nodes[1]))
        write_nodes(lab)
        write_services(lab, WEB)
        if request.param == "with others":
            first.namespace.run("nft", "-f", "-", stdin=FOREIGN_NFT)
            first.namespace.run("tc", "qdisc", "add", "dev", "eth0", "clsact")
            for hook in ("ingress", "egress"):
                first.namespace.run(
                    "tc", "filter", "add", "dev", "eth0", hook, "protocol", "ip", "pref", "7", "u32",
                    "match", "ip", "dport", "4445", "0xffff", "flowid", "1:1",
                )  # fmt: skip
        yield first


def test_cleanup_leaves_the_node_as_before(node: Node, family: int) -> None:
    lab = node.lab
    web = WEB.target("LoadBalancer", node).address.of(family)
    # First the traffic of plain routing, which fills neighbour tables and caches.
    assert lab.client.call(ask, WEB.endpoints[0].address.of(family), 8080).kind == ANSWERED
    cgroups_before = cgroup_programs()
    before = snapshot(node)

    node.agent.start()
    node.agent.wait_synced()
    assert lab.client.call(ask, web, 80).kind == ANSWERED
    assert node.namespace.call(ask, web, 80).kind == ANSWERED
    during = snapshot(node)
    assert during["qdiscs"] == before["qdiscs"], "the agent adds no qdisc: CNI plugins would fail"
    for part in ("tcx", "nft", "directory"):
        assert during[part] != before[part], part  # otherwise this test shows nothing
    mine = cgroup_programs_of(cgroups_before, node)
    assert len(mine) == 8, mine
    node.agent.stop()
    assert snapshot(node)["tcx"] == during["tcx"]  # SIGTERM leaves everything

    node.agent.cleanup()
    after = snapshot(node)
    for part, value in before.items():
        assert after[part] == value, part
    wait_until(lambda: not mine & cgroup_programs(), "the kernel takes the programs off")
    assert lab.client.call(ask, web, 80, timeout=0.3).kind in (TIMED_OUT, UNREACHABLE)
    node.agent.cleanup()  # a second time there is nothing to do, and no error
    assert snapshot(node)["tcx"] == before["tcx"]


@pytest.mark.alone
def test_cleanup_without_a_prepared_bpffs() -> None:
    """As after a plain ``ip netns exec``: the agent finds or mounts bpffs and cgroup2, and unmounts what it has
    mounted.
    """
    with Lab(nodes=1, own_bpffs=False) as lab:
        node = lab.nodes[0]
        WEB.endpoints = (lab.add_pod("web-1", node),)
        write_nodes(lab)
        write_services(lab, WEB)
        mounts, directory = _mounts(), node.agent.directory
        before = cgroup_programs()
        node.agent.start()
        node.agent.wait_synced()
        address = WEB.target("LoadBalancer", node).address
        assert lab.client.call(ask, address.v4, 80).kind == ANSWERED
        assert node.namespace.call(ask, address.v6, 80).kind == ANSWERED
        added = cgroup_programs() - before
        assert added
        node.agent.kill()
        assert lab.client.call(ask, address.v4, 80).kind == ANSWERED
        assert node.namespace.call(ask, address.v6, 80).kind == ANSWERED
        node.agent.start()  # adopts its pins, wherever they are
        node.agent.wait_synced()
        assert lab.client.call(ask, address.v6, 80).kind == ANSWERED
        node.agent.stop()
        node.agent.cleanup()
        assert _mounts() == mounts
        assert not directory.exists() or not list(directory.rglob("*"))
        assert lab.client.call(ask, address.v4, 80, timeout=0.3).answer is None
        assert node.namespace.call(ask, address.v6, 80, timeout=0.3).answer is None


def test_nodes_on_one_kernel_do_not_disturb_each_other() -> None:
    """--cleanup of one node keeps the other's programs, pins and table."""
    with Lab() as lab:
        first, second = lab.nodes
        WEB.endpoints = (lab.add_pod("web-1", first), lab.add_pod("web-2", second))
        write_nodes(lab)
        write_services(lab, WEB)
        lab.start_agents()
        first.agent.stop()
        first.agent.cleanup()
        port = WEB.target("NodePort", second).ports["tcp"]
        for address in second.address:
            assert lab.client.call(ask, address, port).kind == ANSWERED
            assert second.namespace.call(ask, address, port).kind == ANSWERED
        for address in first.address:
            assert lab.client.call(ask, address, port, timeout=0.3).answer is None


DIES_WITH_AN_AGENT = """
import os, signal
from pyebpf_proxy.lab.cluster import Lab
with Lab(nodes=1, own_bpffs=False) as lab:
    lab.start_agents()
    print(lab.tag, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.alone  # programs on the cgroup come from all agents, and these have no other mark
def test_lab_clean_also_finds_pins_outside_the_labs_folder() -> None:
    mounts = _mounts()
    before = cgroup_programs()
    killed = subprocess.run([sys.executable, "-c", DIES_WITH_AN_AGENT], stdout=subprocess.PIPE, text=True, check=False)
    added = cgroup_programs() - before
    assert len(added) >= 8  # they are pinned: they stay when the agent is killed
    assert killed.stdout.strip() in leftovers.clean()
    wait_until(lambda: not added & cgroup_programs(), "the kernel takes the programs off")
    assert _mounts() == mounts
