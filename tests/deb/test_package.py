# SPDX-License-Identifier: Apache-2.0
"""The Debian package: installed, started, upgraded, removed and purged, with real connections through it.

It takes minutes and needs a Debian mirror, so ``make test`` leaves it out: ``make test-deb``.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.load import Load, failed
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.servers import Ports
from tests.deb.machine import ROOT, Machine, make_root
from tests.support.conversation import PORT as LONG
from tests.support.conversation import Conversation, serve

pytestmark = [pytest.mark.slow, pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

FOLDER = ROOT / "build" / "deb-test"
UNIT = "pyebpf-proxy.service"


@pytest.fixture(scope="module")
def packages() -> tuple[Path, Path]:
    """The package from ``make deb``, and the same with a later version."""
    (made,) = (ROOT / "dist").glob(f"pyebpf-proxy_{__version__}_*.deb")
    unpacked = FOLDER / "later"
    shutil.rmtree(unpacked, ignore_errors=True)
    # dpkg-deb makes only the last folder of the path.
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["dpkg-deb", "-R", made, unpacked], check=True)
    control = unpacked / "DEBIAN" / "control"
    control.write_text(control.read_text().replace(f"Version: {__version__}\n", f"Version: {__version__}+1\n"))
    later = FOLDER / "later.deb"
    subprocess.run(["dpkg-deb", "-Zgzip", "-z1", "--build", unpacked, later], check=True)
    return made, later


@pytest.fixture(scope="module")
def root(packages: tuple[Path, Path]) -> Path:
    """A root in which apt has installed the package with its dependencies; without a running systemd."""
    return make_root(FOLDER, packages)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(nodes=1) as made:
        (only,) = made.nodes
        pod = made.add_pod("web-1", only, Ports(http=(8080,), echo=(), udp=()))
        ports = [Port("http", 80, 8080), Port("long", LONG, LONG)]
        objects = [service("web", ports, cluster_ip(1), vip=vip(1)), *slices("web", ports, [(pod.address, only.name)])]
        made.write("all.yaml", [node(only.name, only.address, only.pod_cidr), *objects])
        yield made


@pytest.fixture
def machine(root: Path, lab: Lab) -> Iterator[Machine]:
    """The node of the lab, with the package and the lab's configuration installed."""
    (only,) = lab.nodes
    with Machine(root, only.namespace.name) as made:
        # Start from a clean state: an earlier test may have upgraded or purged it.
        made.run("dpkg", "--purge", "pyebpf-proxy")
        made.run("dpkg", "-i", "/root/package.deb")
        (root / "etc/pyebpf-proxy/config.yaml").write_text(yaml.safe_dump(only.agent.configuration()))
        shutil.copy(lab.manifests / "all.yaml", root / "etc/pyebpf-proxy/manifests")
        yield made


def start(machine: Machine) -> None:
    machine.run("systemctl", "start", UNIT)
    machine.wait_for(" ready ")


def wait_until(condition: Callable[[], object], deadline: float = 30.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def talking(client: Namespace, address: str) -> Iterator[Conversation]:
    """One long connection with requests and answers."""
    conversation = Conversation(client, address, "tcp", LONG)
    try:
        conversation.wait()
        yield conversation
    finally:
        conversation.end()


def state(machine: Machine) -> str:
    return machine.run("systemctl", "is-active", UNIT, status=None)


def test_nothing_starts_by_itself_or_while_another_proxy_runs(machine: Machine, lab: Lab) -> None:
    assert machine.run("systemctl", "is-enabled", UNIT, status=1) == "disabled"
    assert state(machine) == "inactive"
    (only,) = lab.nodes
    # A process with the health port is a proxy: kube-proxy inside its container, or a DaemonSet's agent.
    listener = only.namespace.start(_listen, 10256)
    try:
        wait_until(lambda: only.namespace.call(_connects, 10256))
        machine.run("systemctl", "start", UNIT, status=None)
        machine.wait_for("not started: another proxy serves this node, it listens at 127.0.0.1:10256; end it first")
    finally:
        listener.stop()
    assert state(machine) == "inactive"
    # A kube-proxy without a health page.
    machine.run("cp", "/bin/sleep", "/root/kube-proxy")
    machine.run("systemd-run", "--unit=other", "/root/kube-proxy", "1000")
    machine.run("systemctl", "start", UNIT, status=None)
    machine.wait_for("not started: kube-proxy runs on this node (process ")
    assert state(machine) == "inactive"
    machine.run("systemctl", "stop", "other")
    assert only.namespace.run("nft", "list", "tables") == "", "nothing was changed"
    start(machine)
    assert state(machine) == "active"


def test_upgraded_without_losing_a_connection_then_removed_and_purged(
    machine: Machine, lab: Lab, packages: tuple[Path, Path]
) -> None:
    (only,) = lab.nodes
    (pod,) = lab.pods.values()
    # systemd accepts this comment and the space, a shell does not.
    options = "; of the unit\nOPTIONS=--manifests=/etc/pyebpf-proxy/manifests --v=2\n"
    (machine.root / "etc/default/pyebpf-proxy").write_text(options)
    machine.run("systemctl", "enable", UNIT)
    start(machine)
    shown = machine.run("systemctl", "show", UNIT, "--property=MainPID")
    status = machine.run("cat", f"/proc/{shown.partition('=')[2]}/status")
    # NET_ADMIN, PERFMON and BPF: bits 12, 38, 39.
    assert f"CapBnd:\t{1 << 12 | 1 << 38 | 1 << 39:016x}" in status
    assert "NoNewPrivs:\t1" in status
    assert "agent      process" in machine.run("pyebpf-proxy", "status", status=None)
    assert machine.run("pyebpf-proxy", "doctor", "-o", "json", status=None).startswith("{")
    serve(pod)
    with ExitStack() as stack:
        places = [vip(1).v4, vip(1).v6]
        conversations = [stack.enter_context(talking(lab.client, address)) for address in places]
        loads = [Load(lab.client, address, 80) for address in places]
        time.sleep(1)
        before = [conversation.answers for conversation in conversations]
        machine.run("dpkg", "-i", "/root/later.deb")
        machine.wait_for(" ready ", count=2)
        time.sleep(1)
        assert f"Version: {__version__}+1" in machine.run("dpkg", "-s", "pyebpf-proxy")
        assert state(machine) == "active", "a service that ran is started again"
        for conversation in conversations:
            conversation.wait(20)
        assert all(conversation.answers > was for conversation, was in zip(conversations, before, strict=True))
        assert not (machine.root / "run/pyebpf-proxy-unit/restart").exists()
        # Removed, including the kernel's state, since no program is left that could remove it later.
        samples = [sample for load in loads for sample in load.stop()]
        assert len(samples) > 50
        assert failed(samples) == []
        machine.run("apt-get", "-q", "-y", "remove", "pyebpf-proxy")
    assert "pyebpf-proxy" not in only.namespace.run("nft", "list", "tables")
    assert machine.run("sh", "-c", "ls /sys/fs/bpf /run | grep pyebpf", status=1) == ""
    assert lab.client.call(ask, vip(1).v4, 80).kind != ANSWERED
    assert (machine.root / "etc/pyebpf-proxy/config.yaml").exists(), "configuration stays until the purge"
    machine.run("apt-get", "-q", "-y", "purge", "pyebpf-proxy")
    left = machine.run("sh", "-c", "find / -xdev -name '*pyebpf*proxy*' -not -path '/proc/*' -not -path '/root/*'")
    assert [line for line in left.splitlines() if "/var/log/journal" not in line] == []
    assert machine.run("systemctl", "is-system-running", status=None) == "running"


def test_installed_beside_another_agent_it_removes_nothing(machine: Machine, lab: Lab) -> None:
    """On a node with another agent, such as a DaemonSet's, also while that agent is being replaced."""
    (only,) = lab.nodes
    arguments = ["--config=/etc/pyebpf-proxy/config.yaml", "--manifests=/etc/pyebpf-proxy/manifests"]
    machine.run("systemd-run", "--unit=pod", "/usr/sbin/pyebpf-proxy", *arguments)
    wait_until(lambda: lab.client.call(ask, vip(1).v4, 80).kind == ANSWERED)
    machine.run("systemctl", "stop", "pod")
    machine.run("apt-get", "-q", "-y", "purge", "pyebpf-proxy")
    assert "pyebpf-proxy" in only.namespace.run("nft", "list", "tables")
    assert lab.client.call(ask, vip(1).v4, 80).kind == ANSWERED


def _listen(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(600)


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
