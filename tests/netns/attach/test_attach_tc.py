# SPDX-License-Identifier: Apache-2.0
"""The agent's filter on a device: next to other filters, replaced in place, and removed completely."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.netlink.rtnetlink import NetlinkError
from pyebpf_proxy.datapath.node import tc
from pyebpf_proxy.datapath.node.tc import EGRESS, INGRESS, NAME, Filters
from tests.netns.attach.router import Shell

# A classic BPF program: every kernel with cls_bpf supports it.
OTHERS = "bpf bytecode '1,6 0 0 4294967295' flowid 1:1"

pytestmark = [pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.usefixtures("namespace")]


@pytest.fixture
def filters(tmp_path: Path, namespace: None) -> Iterator[Filters]:
    made = Filters(tmp_path)
    yield made
    made.close()


@pytest.fixture
def device(namespace: None, shell: Shell) -> int:
    shell("ip link add v0 type veth peer name v1")
    return socket.if_nametoindex("v0")


@pytest.fixture
def fds(programs: Object) -> tuple[int, int]:
    return programs.programs["tc_ethernet"].fd, programs.programs["tc_l3"].fd


def everything(shell: Shell) -> str:
    """Every qdisc and filter of the namespace, without counters."""
    found = [shell("tc qdisc show")]
    for name in shell("ls /proc/sys/net/ipv4/conf").split():
        if name not in ("all", "default"):
            found += [shell(f"tc filter show dev {name} {hook}") for hook in ("ingress", "egress")]
    return "\n".join(found)


def own(shell: Shell, name: str = "v0") -> list[dict[str, Any]]:
    listed = json.loads(shell(f"tc -j filter show dev {name} ingress") or "[]")
    options = [entry["options"] for entry in listed if "options" in entry]
    return [entry for entry in options if entry.get("bpf_name") == NAME]


def test_the_program_is_at_ingress_in_direct_action_mode(
    filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    assert filters.attach(device, "v0", fds[0])
    (found,) = own(shell)
    assert found["handle"] == "0xeb"
    assert found["direct-action"]
    assert found["prog"]["name"] == "tc_ethernet"
    assert filters.attached() == [device]


def test_detach_leaves_nothing(filters: Filters, device: int, fds: tuple[int, int], shell: Shell) -> None:
    before = everything(shell)
    filters.attach(device, "v0", fds[0])
    assert everything(shell) != before
    assert filters.detach(device, "v0")
    assert everything(shell) == before
    assert filters.recorded() == []
    assert not filters.detach(device, "v0")


def test_a_second_attach_replaces_the_program_in_place(
    filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    filters.attach(device, "v0", fds[0])
    filters.attach(device, "v0", fds[1])
    (found,) = own(shell)
    assert found["prog"]["name"] == "tc_l3"


def test_another_run_replaces_the_program_and_knows_who_created_the_clsact(
    filters: Filters, device: int, fds: tuple[int, int], shell: Shell, tmp_path: Path
) -> None:
    before = everything(shell)
    filters.attach(device, "v0", fds[0])
    again = Filters(tmp_path)
    again.attach(device, "v0", fds[1])
    assert len(own(shell)) == 1
    again.detach(device, "v0")
    again.close()
    assert everything(shell) == before


@pytest.mark.parametrize("qdisc", ["clsact", "ingress"])
def test_an_existing_qdisc_stays(qdisc: str, filters: Filters, device: int, fds: tuple[int, int], shell: Shell) -> None:
    shell(f"tc qdisc add dev v0 {qdisc}")
    before = everything(shell)
    filters.attach(device, "v0", fds[0])
    assert len(own(shell)) == 1
    filters.detach(device, "v0")
    assert everything(shell) == before


def test_foreign_filters_stay_and_run_before_and_after_the_agents(
    filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    shell("tc qdisc add dev v0 clsact")
    for hook in ("ingress", "egress"):
        shell(f"tc filter add dev v0 {hook} pref 1 {OTHERS}")
        shell(f"tc filter add dev v0 {hook} pref 60000 {OTHERS}")
    before = everything(shell)
    filters.attach(device, "v0", fds[0])
    assert len(own(shell)) == 1
    filters.detach(device, "v0")
    assert everything(shell) == before


@pytest.mark.parametrize("hook", ["ingress", "egress"])
def test_the_agents_clsact_stays_while_it_has_foreign_filters(
    hook: str, filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    filters.attach(device, "v0", fds[0])
    shell(f"tc filter add dev v0 {hook} pref 9 {OTHERS}")
    filters.detach(device, "v0")
    assert own(shell) == []
    assert "bytecode" in shell(f"tc filter show dev v0 {hook}")


@pytest.mark.parametrize(
    "others", [f"protocol all handle 0xeb {OTHERS}", "protocol ip u32 match u32 0 0", f"protocol ip {OTHERS}"]
)
def test_a_foreign_filter_at_the_agents_priority_stays(
    others: str, filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    """A foreign filter with the same handle, of another kind, or for one protocol: the agent's gets the next
    priority.
    """
    shell("tc qdisc add dev v0 clsact")
    shell(f"tc filter add dev v0 ingress pref 1 {others}")
    shell(f"tc filter add dev v0 egress pref 65535 {others}")
    before = everything(shell)
    filters.attach(device, "v0", fds[0])
    filters.attach(device, "v0", fds[1], EGRESS)
    assert [(each.priority, each.own) for each in tc.filters(device, INGRESS)][-1] == (2, True)
    assert next((each.priority, each.own) for each in tc.filters(device, EGRESS)) == (65534, True)
    assert filters.detach(device, "v0")
    assert everything(shell) == before


def test_the_agents_filter_is_before_another_of_the_same_priority(
    filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    shell("tc qdisc add dev v0 clsact")
    shell(f"tc filter add dev v0 ingress pref 1 handle 1 {OTHERS}")
    filters.attach(device, "v0", fds[0])
    assert [(each.priority, each.own) for each in tc.filters(device, INGRESS)] == [(1, True), (1, False)]


@pytest.mark.parametrize("others", ["", f"tc filter add dev v0 ingress pref 3 {OTHERS}"])
def test_a_filter_of_an_earlier_version_is_replaced(
    others: str, filters: Filters, device: int, fds: tuple[int, int], shell: Shell
) -> None:
    before = everything(shell)
    filters.attach(device, "v0", fds[0])  # its clsact, with its record
    shell("tc filter del dev v0 ingress pref 1")
    shell(others)
    filters._add(device, "v0", fds[0], INGRESS, 235)
    filters.attach(device, "v0", fds[1])
    (found,) = own(shell)
    assert found["prog"]["name"] == "tc_l3"
    assert [each.priority for each in tc.filters(device, INGRESS) if each.own] == [1]
    filters.detach(device, "v0")
    assert others or everything(shell) == before


def test_a_program_that_the_kernel_refuses_leaves_no_qdisc(filters: Filters, device: int, shell: Shell) -> None:
    before = everything(shell)
    with pytest.raises(NetlinkError, match="tc filter on v0: attach: Invalid argument"):
        filters.attach(device, "v0", 0)
    assert everything(shell) == before
    assert filters.recorded() == []


def test_a_removed_device_is_no_error(filters: Filters, device: int, fds: tuple[int, int], shell: Shell) -> None:
    filters.attach(device, "v0", fds[0])
    shell("ip link del v0")
    assert not filters.attach(device, "v0", fds[0])
    assert not filters.detach(device, "v0")
    assert filters.recorded() == []


@pytest.mark.parametrize("late", [False, True], ids=["before", "at the same time"])
def test_files_of_another_folder_are_no_records(
    filters: Filters, device: int, fds: tuple[int, int], tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of the agent can put a link there, and /etc/cni/net.d has files with such names."""
    other = tmp_path / "net.d"
    other.mkdir()
    names = {f"{device}-example.conflist", "99999-example.conf"}
    for name in names:
        (other / name).touch()
    (tmp_path / "clsact").symlink_to(other)
    if late:  # as if it had been put there just after a check
        monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    assert filters.recorded() == []
    filters.forget(99999)
    assert filters.attach(device, "v0", fds[0])
    assert filters.detach(device, "v0")
    assert {entry.name for entry in other.iterdir()} == names


def test_strange_names_of_records_are_ignored(filters: Filters, tmp_path: Path) -> None:
    (tmp_path / "clsact").mkdir()
    for name in ("\u00b2-v0", f"{10**30}-v0", "7-v0"):
        (tmp_path / "clsact" / name).touch()
    assert filters.recorded() == [(7, "v0")]


def test_a_renamed_device_keeps_its_record(filters: Filters, device: int, fds: tuple[int, int], shell: Shell) -> None:
    filters.attach(device, "v0", fds[0])
    shell("ip link set v0 name pod0")
    before = shell("tc qdisc show dev pod0")
    filters.attach(device, "pod0", fds[0])
    filters.detach(device, "pod0")
    assert "clsact" in before
    assert "clsact" not in shell("tc qdisc show dev pod0")
