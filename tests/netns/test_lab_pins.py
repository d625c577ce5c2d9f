# SPDX-License-Identifier: Apache-2.0
"""The bpffs with the pins is unmounted while the agent runs: pins, programs and commands must be restored."""

from __future__ import annotations

import errno
import json
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import Port, node, service
from tests.support.fast_lab import slowness
from tests.support.lab_tools import has_program, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]


@pytest.fixture
def alone() -> Iterator[Node]:
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        lab.write("nodes.yaml", [node(only.name, only.address, only.pod_cidr)])
        lab.write("web.yaml", [service("web", [Port("web", 80, 8080)], cluster_ip(10))])
        yield only


def ids(of: Node) -> dict[str, int]:
    """The id of the object behind every pin, by its path: maps, links and programs."""
    found = {}
    folder = of.agent.directory / "bpf"
    for path in sorted(folder.rglob("*")):
        kind = {"maps": "map", "tcx": "link", "links": "link", "programs": "prog", "xdp": "link"}.get(path.parent.name)
        if kind and path.is_file() and not path.is_symlink():
            shown = of.namespace.run("bpftool", "-j", kind, "show", "pinned", str(path))
            found[str(path.relative_to(folder))] = json.loads(shown)["id"]
    return found


def mount(*arguments: str) -> None:
    subprocess.run(arguments, check=True)


def serves(of: Node) -> bool:
    """Whether programs are on the device, and those of sockets refuse a Service without endpoints at once."""
    return of.namespace.call(refused) and of.namespace.call(has_program, "eth0")


def refused() -> bool:
    with socket.socket() as client:
        client.settimeout(5.0)
        return client.connect_ex((cluster_ip(10).v4, 80)) in (errno.ECONNREFUSED, errno.EPERM)


@pytest.mark.parametrize("then", ["nothing", "another bpffs"])
def test_pins_of_an_unmounted_bpffs_are_restored_at_once(alone: Node, then: str) -> None:
    alone.agent.start()
    alone.agent.wait_synced()
    before = ids(alone)
    assert {path.split("/")[-2] for path in before} == {"maps", "tcx", "links", "programs"}
    place = str(alone.agent.directory / "bpf")
    for _ in range(2):
        since = time.monotonic()
        mount("umount", "-l", place)
        if then == "another bpffs":
            mount("mount", "-t", "bpf", "bpffs", place)
        maps = Path(place)
        wait_until(lambda maps=maps: any(maps.rglob("frontends4")), "pins", 10.0)  # type: ignore[misc]
        assert time.monotonic() - since < 3.0 * slowness()
        wait_until(lambda: ids(alone) == before, "all pins with the objects of before", 10.0)
    assert "the bpffs with the pins was unmounted, it is restored" in alone.agent.log()
    assert alone.namespace.call(has_program, "eth0")
    shown = alone.namespace.run(*command(), "status", "--directory", str(alone.agent.directory), check=False)
    assert "unmounted" not in shown
    # Other programs see what the agent writes, and the next agent finds it.
    alone.agent.wait_synced(alone.lab.write("more.yaml", [service("more", [Port("web", 80, 8080)], cluster_ip(11))]))
    alone.agent.kill()
    alone.agent.start()
    alone.agent.wait_synced()
    after = ids(alone)
    assert {path: number for path, number in after.items() if "/maps/" in path} == {
        path: number for path, number in before.items() if "/maps/" in path
    }


def test_a_missing_right_to_mount_is_logged(alone: Node) -> None:
    enter = ("ip", "netns", "exec", alone.namespace.name, "setpriv", "--bounding-set=-sys_admin")
    alone.agent.start(enter=enter)
    alone.agent.wait_synced()
    before = ids(alone)
    place = str(alone.agent.directory / "bpf")
    mount("umount", "-l", place)
    try:
        wait_until(lambda: "the pins are gone" in alone.agent.log(), "a line in the log", 10.0)
        status = shlex.join([*command(), "status", "--directory", str(alone.agent.directory)])
        shown = alone.namespace.run("sh", "-c", f"{status} 2>&1", check=False)
        assert "the pins are gone" in shown
        assert serves(alone)
    finally:
        mount("mount", "-t", "bpf", "bpffs", place)
    wait_until(lambda: ids(alone) == before, "all pins with the objects of before", 10.0)
    assert serves(alone)
    alone.agent.kill()
    assert serves(alone), "the new pins hold everything"


def test_pins_that_are_removed_come_back_and_nothing_is_detached(alone: Node) -> None:
    alone.agent.start()
    alone.agent.wait_synced()
    before = ids(alone)
    folder = alone.agent.directory / "bpf"
    links = [path for path in before if "/links/" in path]
    assert len(links) == 8
    for path in links:
        (folder / path).unlink()
    wait_until(lambda: ids(alone) == before, "the same links", 10.0)
    assert "pins of socket programs were removed, they are there again" in alone.agent.log()
    assert serves(alone)
