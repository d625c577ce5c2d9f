# SPDX-License-Identifier: Apache-2.0
"""Clean-up restores a namespace, a cgroup and a bpffs, whichever parts of the instance still exist."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.node.devices import MAPS, Node
from pyebpf_proxy.datapath.node.plan import NodeConfig
from tests.netns.attach.router import Shell
from tests.support import socket_links

pytestmark = [pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.usefixtures("namespace")]


class Instance:
    """Everything of an instance, really attached. The bpffs is in its run folder, the cgroup belongs to the test."""

    def __init__(self, directory: Path, cgroup: Path, objects: Path, use_tcx: bool) -> None:
        self.use_tcx = use_tcx
        self.directory = directory
        self.cgroup = cgroup
        self._objects = objects

    @property
    def pins(self) -> Path:
        return mounts.pin_directory(self.directory / "bpf", self.directory, 1)

    def start(self) -> None:
        table = Table(mounts.table_name(self.directory))
        table.ensure(Behaviour(0x4000))
        (self.pins / "maps").mkdir(parents=True)
        with (
            Object.open(self._objects / "tc.bpf.o", self.pins / "maps") as tc,
            Object.open(self._objects / "sock.bpf.o", self.pins / "maps") as sock,
        ):
            tc.load()
            sock.load()
            fd = os.open(self.cgroup, os.O_RDONLY)
            socket_links.attach(sock.programs, fd, self.pins / "links")
            os.close(fd)
            maps = {name: tc.maps[name] for name in MAPS}
            pins = mounts.tcx_directory(self.directory / "bpf", self.directory)
            node = Node(self.directory, NodeConfig(), maps, tc.btf, print, pins, self.use_tcx)
            node.attach({name: program.fd for name, program in tc.programs.items()})
            assert len(node.attached) >= 2
            node.close()
        (self.directory / "lock").touch()


@pytest.fixture(params=[True, False], ids=["tcx", "clsact"])
def instance(
    namespace: None, tmp_path: Path, bpf_objects: Path, shell: Shell, request: pytest.FixtureRequest
) -> Iterator[Instance]:
    fd = mounts.open_cgroup2().descriptor
    cgroup = Path(os.readlink(f"/proc/self/fd/{fd}")) / f"pep-test-{os.getpid()}"
    os.close(fd)
    cgroup.mkdir()
    directory = tmp_path / "run"
    (directory / "bpf").mkdir(parents=True)
    subprocess.run(["mount", "-t", "bpf", "bpf", directory / "bpf"], check=True)
    shell("ip link add v0 type veth peer name v1; ip link add v2 type veth peer name v3")
    try:
        yield Instance(directory, cgroup, bpf_objects, request.param)
    finally:
        subprocess.run(["umount", "-q", directory / "bpf"], check=False)
        cgroup.rmdir()


def machine(shell: Shell, instance: Instance) -> dict[str, str]:
    """Everything that the agent could leave behind or remove by mistake."""
    devices = [name for _, name in socket.if_nameindex()]
    filters = [shell(f"tc filter show dev {d} {hook}") for d in devices for hook in ("ingress", "egress")]
    bpffs = shell(f"find {instance.directory / 'bpf'} -mindepth 1 2>/dev/null | sort || true")
    return {
        "links": shell("ip -o link | sed 's/state.*mode/mode/'"),
        "qdiscs": shell("tc qdisc show"),
        "filters": "\n".join(filters),
        "tcx": "\n".join(f"{device} {ingress} {egress}" for device, ingress, egress in map(chains, devices)),
        "nft": shell("nft list ruleset"),
        "cgroup": shell(f"bpftool cgroup show {instance.cgroup}"),
        "sysctls": shell(
            "sysctl -a 2>/dev/null | grep -E '^net' | grep -vE 'nf_conntrack_(count|buckets)|pktgen|random'"
        ),
        "mounts": shell(f"mount | grep -E 'on (/sys|{instance.directory})'"),  # without those of other labs
        "bpffs": "\n".join(line for line in bpffs.splitlines() if not line.endswith(".debug")),
    }


def chains(device: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    index = socket.if_nametoindex(device)
    return device, tcx.chain(index, tcx.INGRESS), tcx.chain(index, tcx.EGRESS)


def cleaned(shell: Shell, instance: Instance) -> dict[str, str]:
    """The same as soon as no program is on the cgroup: the kernel detaches a link some time after its pin is gone."""
    end = time.monotonic() + 30
    while re.search(r"^\d", shell(f"bpftool cgroup show {instance.cgroup}"), re.MULTILINE) and time.monotonic() < end:
        time.sleep(0.02)
    return machine(shell, instance)


def test_clean_up_restores_everything(instance: Instance, shell: Shell) -> None:
    # Things of other programs: a clsact without filters, one with a filter, a table, a pin folder.
    shell(f"""
        tc qdisc add dev v0 clsact
        tc qdisc add dev v1 clsact
        tc filter add dev v1 ingress pref 3 bpf bytecode '1,6 0 0 4294967295' flowid 1:1
        tc filter add dev v1 egress pref 3 bpf bytecode '1,6 0 0 4294967295' flowid 1:1
        tc qdisc add dev v2 ingress
        nft add table inet foreign
        mkdir {instance.directory}/bpf/foreign
    """)
    before = machine(shell, instance)
    instance.start()
    during = machine(shell, instance)
    places = ["tcx"] if instance.use_tcx else ["qdiscs", "filters"]
    assert [key for key in before if before[key] != during[key]] == [*places, "nft", "cgroup", "bpffs"]
    report = cleanup(instance.directory, ["lock"])
    assert report.problems == []
    assert cleaned(shell, instance) == before
    assert {"tc programs of v0", "tc programs of v3"} <= set(report.removed)
    assert os.listdir(instance.directory) == ["bpf"], "another program's mount and its folder stay"


def test_a_second_clean_up_finds_nothing(instance: Instance, shell: Shell) -> None:
    instance.start()
    cleanup(instance.directory, ["lock"])
    again = cleanup(instance.directory, ["lock"])
    assert (again.removed, again.problems) == ([], [])


@pytest.mark.parametrize(
    "damage",
    [
        "nft delete table inet {table}",
        "tc qdisc del dev v0 clsact 2>/dev/null || true",
        "rm -rf {pins}/../tcx",
        "ip link del v0",
        "rm -r {pins}/links",
        "rm -r {pins}/maps",
        "rm -rf {directory}/clsact",
        "umount {directory}/bpf",
    ],
)
def test_clean_up_works_if_parts_are_missing(damage: str, instance: Instance, shell: Shell) -> None:
    instance.start()
    shell(damage.format(table=mounts.table_name(instance.directory), pins=instance.pins, directory=instance.directory))
    report = cleanup(instance.directory, ["lock"])
    assert report.problems == []
    after = cleaned(shell, instance)
    assert "pyebpf" not in "".join(after[key] for key in ("filters", "nft", "cgroup", "bpffs"))
    assert all(line.endswith("() ()") for line in after["tcx"].splitlines())
    assert after["cgroup"].strip().count("\n") == 0
    if "clsact" not in damage or "del" in damage:
        assert "clsact" not in after["qdiscs"]


def test_one_failing_step_does_not_stop_the_others(
    instance: Instance, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.start()

    def refuses(*_: object) -> bool:
        raise PermissionError(1, "no")

    monkeypatch.setattr(Table, "remove", refuses)
    report = cleanup(instance.directory, ["lock"])
    assert len(report.problems) == 1
    after = machine(shell, instance)
    assert "pyebpf" not in after["filters"] + after["bpffs"]
    assert "pyebpf" in after["nft"]


def test_foreign_files_in_the_run_directory_stay(instance: Instance, tmp_path: Path) -> None:
    instance.start()
    (instance.directory / "notes").write_text("mine")
    cleanup(instance.directory, ["lock"])
    assert sorted(os.listdir(instance.directory)) == ["bpf", "notes"]


def test_another_instance_in_the_same_bpffs_stays(instance: Instance, shell: Shell) -> None:
    other = instance.directory.with_name("other")
    kept = mounts.pin_directory(instance.directory / "bpf", other, 1)
    kept.mkdir(parents=True)
    instance.start()
    cleanup(instance.directory, ["lock"])
    assert kept.is_dir()
    assert not instance.pins.exists()
