# SPDX-License-Identifier: Apache-2.0
"""The agent's programs on devices with other programs: first at ingress, last at egress, and without disturbing
them.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import Object, run_program
from pyebpf_proxy.datapath.node import devices, tc
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.devices import MAPS, Node
from pyebpf_proxy.datapath.node.mounts import tcx_directory
from pyebpf_proxy.datapath.node.plan import REDIRECT_DEVICE, REDIRECT_NONE, REDIRECT_PEER, NodeConfig, Others
from tests.netns.attach.devices import carried, follow
from tests.netns.attach.router import Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.usefixtures("namespace")]

FAST = NodeConfig(fast_path=True)
AGENT_ONLY = (["tc_ethernet"], ["tc_egress"])
#: Ends the chain: later programs get no packet (as Cilium's programs do).
ENDS = """
struct __sk_buff;
__attribute__((section("tc"), used)) int ends_chain(struct __sk_buff *skb) { return 0; }
__attribute__((section("tc"), used)) int goes_on(struct __sk_buff *skb) { return -1; }
char LICENSE[] __attribute__((section("license"), used)) = "GPL";
"""
# A classic BPF program: every kernel with cls_bpf supports it.
OTHERS = "bpf bytecode '1,6 0 0 4294967295' flowid 1:1"
# As the CNI plugin `bandwidth` does through netlink, with NLM_F_EXCL.
LIMIT_TO_POD = "tc qdisc add dev pod root handle 1: tbf rate 10mbit burst 32k latency 25ms"
LIMIT_FROM_POD = """
    ip link add bwp type ifb; ip link set bwp up
    tc qdisc add dev pod ingress
    tc filter add dev pod parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev bwp
    tc qdisc add dev bwp root handle 1: tbf rate 10mbit burst 32k latency 25ms
"""


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Object]:
    """Programs of other software."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.c").write_text(ENDS)
    subprocess.run(
        ["clang", "-O2", "-g", "-target", "bpf", "-c", folder / "foreign.c", "-o", folder / "foreign.o"], check=True
    )
    with Object.open(folder / "foreign.o") as opened:
        yield opened.load()


@pytest.fixture
def pod(namespace: None, shell: Shell) -> Iterator[int]:
    """The device `pod`; its other end is in a separate network namespace."""
    name = f"pep-{os.getpid()}-pod"
    shell(f"ip netns add {name}; ip link add pod type veth peer name eth0 netns {name}; ip link set pod up")
    yield socket.if_nametoindex("pod")
    subprocess.run(["ip", "netns", "del", name], check=True)


class Agent:
    """A Node with its own maps."""

    def __init__(self, directory: Path, bpffs: Path, programs: Object) -> None:
        self.directory = directory
        self.folder = bpffs / "tcx"
        self.programs = programs
        self.reports: list[str] = []

    def start(self, use_tcx: bool = True) -> Node:
        maps = {name: self.programs.maps[name] for name in MAPS}
        self.node = Node(self.directory, FAST, maps, self.programs.btf, self.reports.append, self.folder, use_tcx)
        self.node.attach({name: program.fd for name, program in self.programs.programs.items()})
        return self.node

    def written(self, index: int) -> tuple[int, int]:
        """Redirect mode and MTU in the map."""
        value = self.programs.maps["devices"].lookup(index.to_bytes(4, sys.byteorder))
        assert value is not None
        found = self.programs.btf.struct("node_device").unpack(value)
        return found["redirect"], found["mtu"]


@pytest.fixture
def agent(tmp_path: Path, bpffs: Path, programs: Object) -> Iterator[Agent]:
    made = Agent(tmp_path, bpffs, programs)
    yield made
    if hasattr(made, "node"):
        made.node.close()


Put = Callable[[str, int, int], None]


@pytest.fixture
def put(foreign: Object) -> Iterator[Put]:
    """Attach another software's program to a device, at the head or tail of a hook."""
    links: list[int] = []

    def attach(program: str, device: int, where: int, hook: int = tcx.INGRESS) -> None:
        links.append(tcx.attach(foreign.programs[program].fd, device, hook, where))

    yield attach
    for link in links:
        os.close(link)


def limit(node: Node, index: int) -> tuple[int, str]:
    state = node.devices[index]
    return state.redirect, state.limit


def test_a_pod_s_device_without_others(agent: Agent, pod: int, shell: Shell) -> None:
    node = agent.start()
    assert carried("pod") == AGENT_ONLY
    assert limit(node, pod) == (REDIRECT_PEER, "")
    assert agent.written(pod) == (REDIRECT_PEER, 0), "the other end is down"
    assert "qdisc noqueue" in shell("tc qdisc show dev pod")
    assert "clsact" not in shell("tc qdisc show")
    shell(f"ip -n pep-{os.getpid()}-pod link set eth0 up")
    follow(node, lambda: agent.written(pod) == (REDIRECT_PEER, 1500))
    shell("ip link set pod mtu 1400")
    follow(node, lambda: agent.written(pod) == (REDIRECT_PEER, 1400))


@pytest.mark.parametrize("program", ["ends_chain", "goes_on"])
def test_an_existing_program_runs_after_the_agents(program: str, agent: Agent, pod: int, put: Put) -> None:
    """Also a program that ends the chain: it would keep every packet from the agent's program (finding D2)."""
    put(program, pod, tcx.BEFORE)
    node = agent.start()
    assert carried("pod") == (["tc_ethernet", program], ["tc_egress"])
    assert limit(node, pod) == (REDIRECT_NONE, f"after the agent's program: tcx program {program}")
    assert agent.written(pod)[0] == REDIRECT_NONE


def test_a_later_program_is_detected_and_runs_after_the_agents(agent: Agent, pod: int, put: Put) -> None:
    node = agent.start()
    before = tcx.chain(pod, tcx.INGRESS)
    put("ends_chain", pod, tcx.BEFORE)
    assert carried("pod")[0] == ["ends_chain", "tc_ethernet"]
    node.look()
    assert carried("pod")[0] == ["tc_ethernet", "ends_chain"]
    assert tcx.chain(pod, tcx.INGRESS)[:1] == before, "the program itself, not the stand-in"
    assert agent.written(pod)[0] == REDIRECT_NONE
    assert sorted(os.listdir(agent.folder)) == sorted(
        f"{index}-{hook}" for index in node.attached for hook in ("ingress", "egress")
    )
    put("goes_on", pod, tcx.AFTER)
    node.look()
    assert limit(node, pod) == (
        REDIRECT_NONE,
        "after the agent's program: tcx program ends_chain, tcx program goes_on",
    )


def test_programs_after_the_agents_are_reported(agent: Agent, pod: int, foreign: Object) -> None:
    """They may translate a packet after the agent's program has decided about it."""
    node = agent.start()
    reported: list[bool] = []
    node.on_programs_behind = reported.append
    for where in (tcx.AFTER, tcx.BEFORE):
        link = tcx.attach(foreign.programs["goes_on"].fd, pod, tcx.INGRESS, where)
        node.look()
        assert reported[-1]
        os.close(link)
        node.look()
        assert not reported[-1]
    link = tcx.attach(foreign.programs["goes_on"].fd, pod, tcx.EGRESS, tcx.AFTER)
    node.look()
    assert not reported[-1]
    os.close(link)


def test_programs_after_the_agents_are_reported_though_they_could_not_be_listed_at_first(
    agent: Agent, pod: int, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = agent.start()
    node.look()
    reported: list[bool] = []
    node.on_programs_behind = reported.append

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    put("goes_on", pod, tcx.AFTER)
    with monkeypatch.context() as without:
        without.setattr(node._attachments, "others", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            node.look()
    node.look()
    assert reported[-1:] == [True]


def test_programs_after_the_agents_are_reported_before_the_agents_are_attached(
    agent: Agent, pod: int, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("goes_on", pod, tcx.AFTER)
    reported: list[tuple[bool, list[str]]] = []

    class Reporting(Node):
        def attach(self, programs: Mapping[str, int]) -> None:
            self.on_programs_behind = lambda any_: reported.append((any_, carried("pod")[0]))
            super().attach(programs)

    monkeypatch.setattr(f"{__name__}.Node", Reporting)
    agent.start()
    assert reported[0] == (True, ["goes_on"])
    assert reported[-1] == (True, ["tc_ethernet", "goes_on"])


def test_a_program_on_a_bridge_is_after_the_agents_on_its_ports(
    agent: Agent, pod: int, foreign: Object, shell: Shell
) -> None:
    shell("ip link add bridge type bridge; ip link set bridge up; ip link add other type bridge")
    node = agent.start()
    reported: list[bool] = []
    node.on_programs_behind = reported.append
    link = tcx.attach(foreign.programs["goes_on"].fd, socket.if_nametoindex("bridge"), tcx.INGRESS, tcx.AFTER)
    node.look()
    assert not reported[-1], "no packet passes the agent's program first"
    shell("ip link set pod master bridge")
    follow(node, lambda: node.attached[pod] == "tc_bridge_port")
    assert reported[-1]
    shell("ip link set pod master other")
    follow(node, lambda: not reported[-1])
    shell("ip link set pod master bridge")
    follow(node, lambda: reported[-1])
    os.close(link)
    node.look()
    assert not reported[-1]


def test_a_program_that_keeps_moving_to_the_head_is_left_there(agent: Agent, pod: int, foreign: Object) -> None:
    node = agent.start()
    for _ in range(30):
        link = tcx.attach(foreign.programs["goes_on"].fd, pod, tcx.INGRESS, tcx.BEFORE)
        node.look()
        os.close(link)
    assert any("keeps moving or removing the agent's tc program" in report for report in agent.reports)
    assert carried("pod")[0][-1] == "tc_ethernet"
    assert len(agent.reports) < 13


def test_a_program_that_was_removed_often_is_attached_again_a_minute_later(
    agent: Agent, pod: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = agent.start()
    for _ in range(devices.REATTACH_LIMIT + 1):
        link = tcx.open_pinned(agent.folder / f"{pod}-ingress")
        tcx.detach(link)
        os.close(link)
        node.look()
    assert carried("pod")[0] == []
    later = time.monotonic() + devices.REATTACH_SECONDS + 1
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: later))
    node.look()
    assert carried("pod") == AGENT_ONLY


def test_an_earlier_program_at_egress_keeps_packets_in_the_queue(agent: Agent, pod: int, put: Put) -> None:
    put("goes_on", pod, tcx.AFTER, tcx.EGRESS)
    node = agent.start()
    assert carried("pod")[1] == ["goes_on", "tc_egress"]
    assert limit(node, pod) == (REDIRECT_DEVICE, "behind the fast path: tcx program goes_on")
    put("ends_chain", pod, tcx.AFTER, tcx.EGRESS)
    node.look()
    assert carried("pod")[1] == ["goes_on", "ends_chain", "tc_egress"]


def test_filters_and_qdiscs_come_and_go(agent: Agent, pod: int, shell: Shell) -> None:
    node = agent.start()
    shell(f"tc qdisc add dev pod clsact; tc filter add dev pod egress pref 7 {OTHERS}")
    follow(node, lambda: limit(node, pod)[0] == REDIRECT_DEVICE)
    assert limit(node, pod)[1] == "behind the fast path: clsact egress filter pref 7 bpf"
    shell(f"tc filter add dev pod ingress pref 1 {OTHERS}")
    follow(node, lambda: limit(node, pod) == (REDIRECT_NONE, "after the agent's program: clsact filter pref 1 bpf"))
    assert agent.written(pod)[0] == REDIRECT_NONE
    shell("tc qdisc del dev pod clsact")
    follow(node, lambda: limit(node, pod) == (REDIRECT_PEER, ""))
    assert carried("pod") == AGENT_ONLY
    assert agent.written(pod)[0] == REDIRECT_PEER


def test_filters_of_a_shared_block_come_and_go(agent: Agent, pod: int, shell: Shell) -> None:
    """The kernel reports such a filter for no device."""
    shell("tc qdisc add dev pod ingress_block 22 clsact")
    node = agent.start()
    assert limit(node, pod)[0] != REDIRECT_NONE
    shell(f"tc filter add block 22 protocol ip prio 10 {OTHERS}")
    follow(node, lambda: limit(node, pod)[0] == REDIRECT_NONE)
    shell("tc filter del block 22 protocol ip prio 10")
    follow(node, lambda: limit(node, pod)[0] != REDIRECT_NONE)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_the_bandwidth_plugin_can_add_its_qdiscs(first: bool, agent: Agent, pod: int, shell: Shell) -> None:
    """The plugin fails if the agent's qdisc exists first (finding D2)."""
    if first:
        shell(LIMIT_TO_POD + LIMIT_FROM_POD)
    node = agent.start()
    if not first:
        shell(LIMIT_TO_POD)
        follow(node, lambda: limit(node, pod) == (REDIRECT_DEVICE, "qdisc tbf"))
        shell(LIMIT_FROM_POD)
    follow(node, lambda: limit(node, pod)[0] == REDIRECT_NONE)
    assert limit(node, pod)[1].startswith("after the agent's program: ingress filter pref 49152 u32")
    assert carried("pod") == AGENT_ONLY


def test_a_device_that_appears_later(agent: Agent, shell: Shell) -> None:
    node = agent.start()
    shell("ip link add late type veth peer name late1")
    index = socket.if_nametoindex("late")
    follow(node, lambda: index in node.attached)
    assert carried("late") == AGENT_ONLY
    shell("ip link del late")
    follow(node, lambda: index not in node.attached)
    assert [name for name in os.listdir(agent.folder) if name.startswith(f"{index}-")] == []


def test_a_link_that_was_detached_comes_back(agent: Agent, pod: int) -> None:
    node = agent.start()
    link = tcx.open_pinned(agent.folder / f"{pod}-ingress")
    tcx.detach(link)
    os.close(link)
    assert carried("pod")[0] == []
    node.look()
    assert carried("pod") == AGENT_ONLY
    assert agent.reports == ["device pod: the agent's tc program is gone, attaching it again"]


def test_another_run_takes_the_links_over(agent: Agent, pod: int, put: Put, bpf_objects: Path) -> None:
    agent.start().close()
    put("ends_chain", pod, tcx.AFTER)
    before = {name: _link_id(agent.folder / name) for name in os.listdir(agent.folder)}
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        again = Agent(agent.directory, agent.folder.parent, opened.load())
        again.start().close()
        assert carried("pod") == (["tc_ethernet", "ends_chain"], ["tc_egress"])
        assert {name: _link_id(again.folder / name) for name in os.listdir(again.folder)} == before
        assert tcx.chain(pod, tcx.INGRESS)[0] == tcx.described(opened.programs["tc_ethernet"].fd)["prog_id"]


def _link_id(pin: Path) -> int:
    link = tcx.open_pinned(pin)
    try:
        return tcx.described(link)["link_id"]
    finally:
        os.close(link)


def test_kill_9_during_a_move(agent: Agent, pod: int, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at every step: the agent's program stays on the device, and the next run restores the order."""
    agent.start().close()
    fd = agent.programs.programs["tc_ethernet"].fd
    for step in range(1, 5):
        link = tcx.attach(agent.programs.programs["tc_l3"].fd, pod, tcx.INGRESS, tcx.BEFORE)
        child = os.fork()
        if child == 0:
            _die_at(step, monkeypatch)
            agent.start()
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, f"step {step} was not reached"
        assert {"tc_ethernet", "pep_move"} & set(carried("pod")[0])
        agent.start().close()
        assert carried("pod")[0] == ["tc_ethernet", "tc_l3"]
        assert tcx.chain(pod, tcx.INGRESS)[0] == tcx.described(fd)["prog_id"]
        assert [name for name in os.listdir(agent.folder) if "moved" in name or "table" in name] == []
        os.close(link)


def test_the_stand_in_during_a_move_runs_the_program(agent: Agent, bpffs: Path, foreign: Object) -> None:
    for name, verdict in (("ends_chain", 0), ("goes_on", -1)):
        with tcx.stand_in(foreign.programs[name].fd, bpffs / "table") as fd:
            assert run_program(fd, "pep_move", bytes(64)).retval == verdict
            (bpffs / "table").unlink()
    assert foreign.programs["ends_chain"].test_run(bytes(64)).retval == 0


def _die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill this process after one of the steps: stand-in loaded, attached, old link detached, new one updated."""
    left = [step]

    def counting(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            result = real(*arguments)
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    moving = tcx.stand_in

    def stand_in(*arguments: object) -> object:
        for name in ("attach", "detach", "update", "pin"):
            monkeypatch.setattr(tcx, name, counting(getattr(tcx, name)))
        return moving(*arguments)

    monkeypatch.setattr(tcx, "stand_in", stand_in)


@pytest.mark.parametrize("others", ["", f"tc filter add dev pod ingress pref 300 {OTHERS}"])
def test_an_older_versions_filter_is_replaced_without_a_gap(
    others: str, agent: Agent, pod: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = {name: program.fd for name, program in agent.programs.programs.items()}
    earlier = tc.Filters(agent.directory)
    earlier.attach(pod, "pod", fds["tc_l3"])
    earlier._add(pod, "pod", fds["tc_l3"], tc.INGRESS, 235)
    earlier._remove(pod, "pod", tc.INGRESS, 1)
    earlier.close()
    shell(others)
    seen: list[list[str]] = []
    for what, name in ((tcx, "attach"), (tc.Filters, "_add"), (tc.Filters, "_remove")):
        monkeypatch.setattr(what, name, _and_look(getattr(what, name), seen))
    agent.start()
    monkeypatch.undo()
    assert ["tc_ethernet", "tc_ethernet"] in seen
    assert all(each and len(set(each)) == 1 for each in seen), "two programs that decide differently, or none"
    assert carried("pod") == AGENT_ONLY
    # While a clsact is created or deleted, the kernel drops packets: it stays, and the next start keeps it.
    assert "clsact" in shell("tc qdisc show dev pod")
    assert not [each for each in tc.filters(pod, tc.INGRESS) if each.own]
    agent.node.close()
    agent.start()
    assert "clsact" in shell("tc qdisc show dev pod")
    attachments = Attachments(agent.directory, agent.folder)
    assert attachments.detach(pod, "pod")
    attachments.close()
    assert ("clsact" in shell("tc qdisc show dev pod")) == bool(others), "the clean-up removes it"


def _and_look(real: Callable[..., object], seen: list[list[str]]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        result = real(*arguments)
        seen.append(carried("pod")[0])
        return result

    return call


def test_clean_up_leaves_other_programs_alone(agent: Agent, pod: int, put: Put, shell: Shell) -> None:
    shell(LIMIT_TO_POD + LIMIT_FROM_POD)
    put("ends_chain", pod, tcx.BEFORE)
    put("goes_on", pod, tcx.AFTER, tcx.EGRESS)
    before = shell("tc qdisc show | sed 's/ refcnt.*//'; tc filter show dev pod ingress")
    node = agent.start()
    for index in node.attached:
        assert node._attachments.detach(index, "pod")
    assert carried("pod") == (["ends_chain"], ["goes_on"])
    assert shell("tc qdisc show | sed 's/ refcnt.*//'; tc filter show dev pod ingress") == before
    assert os.listdir(agent.folder) == []


# ---- kernels without tcx --------------------------------------------------------------


def test_without_tcx_foreign_filters_come_after_the_agents(agent: Agent, pod: int, shell: Shell) -> None:
    shell(f"tc qdisc add dev pod clsact; tc filter add dev pod ingress pref 2 {OTHERS}")
    node = agent.start(use_tcx=False)
    assert carried("pod") == AGENT_ONLY
    assert limit(node, pod) == (REDIRECT_NONE, "after the agent's program: clsact filter pref 2 bpf")
    shell("tc filter del dev pod ingress pref 2")
    follow(node, lambda: limit(node, pod) == (REDIRECT_PEER, ""))


def test_without_tcx_an_ingress_qdisc_offers_no_egress_hook(agent: Agent, pod: int, shell: Shell) -> None:
    shell("tc qdisc add dev pod ingress")
    node = agent.start(use_tcx=False)
    assert carried("pod") == (["tc_ethernet"], [])
    assert limit(node, pod) == (
        REDIRECT_NONE,
        "the agent's program is not at its egress: its ingress qdisc is another's and has no egress",
    )


# ---- bridges ----------------------------------------------------------------------------


def test_a_bridge_that_processes_frames_closes_its_ports(agent: Agent, pod: int, shell: Shell) -> None:
    shell("ip link add br0 type bridge; ip link set pod master br0")
    node = agent.start()
    assert carried("pod") == (["tc_bridge_port"], ["tc_egress"])
    assert limit(node, pod) == (REDIRECT_PEER, "")
    shell("nft add table bridge watch; nft 'add chain bridge watch forward { type filter hook forward priority 0; }'")
    node.look()
    assert limit(node, pod) == (REDIRECT_PEER, ""), "a chain that accepts everything"
    shell("nft add rule bridge watch forward counter")
    node.look()
    assert limit(node, pod) == (REDIRECT_NONE, "nftables rule in table bridge watch, chain forward")
    shell("nft flush chain bridge watch forward; nft 'chain bridge watch forward { policy drop; }'")
    node.look()
    assert limit(node, pod) == (REDIRECT_NONE, "nftables chain forward of table bridge watch, whose policy is drop")
    shell("nft delete table bridge watch")
    node.look()
    assert limit(node, pod) == (REDIRECT_PEER, "")


def test_the_programs_of_a_new_bridge_are_listed_with_its_first_port(
    agent: Agent, pod: int, shell: Shell, put: Put
) -> None:
    """The agent attaches nothing to the bridge, and netlink does not report tcx programs."""
    node = agent.start()
    shell("ip link add br0 type bridge")
    put("goes_on", socket.if_nametoindex("br0"), tcx.BEFORE, tcx.EGRESS)
    shell("ip link set pod master br0")
    follow(node, lambda: carried("pod")[0] == ["tc_bridge_port"])
    assert limit(node, pod) == (REDIRECT_NONE, "on bridge br0: tcx program goes_on")


def test_a_new_device_does_not_list_the_programs_of_others(
    agent: Agent, pod: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listed device waits for the kernel's lock of all network settings."""
    node = agent.start()
    listed: list[list[int]] = []
    others = node._attachments.others

    def note(devices: Collection[int]) -> dict[int, Others]:
        listed.append(list(devices))
        return others(devices)

    monkeypatch.setattr(node._attachments, "others", note)
    shell("ip link add another type veth peer name its-peer")
    another = socket.if_nametoindex("another")
    follow(node, lambda: another in node.devices)
    assert listed
    assert pod not in {index for devices in listed for index in devices}


def test_nothing_is_left_after_the_instances_clean_up(agent: Agent, pod: int, tmp_path: Path) -> None:
    """By the command itself, which finds the pins where the agent has put them."""
    directory = tmp_path / "run"
    (directory / "bpf").mkdir(parents=True)
    subprocess.run(["mount", "-t", "bpf", "bpf", directory / "bpf"], check=True)
    try:
        agent.directory, agent.folder = directory, tcx_directory(directory / "bpf", directory)
        agent.start()
        assert carried("pod") == AGENT_ONLY
        assert "tc programs of pod" in cleanup(directory).removed
        assert carried("pod") == ([], [])
    finally:
        subprocess.run(["umount", "-l", directory / "bpf"], check=True)


def test_a_link_that_is_detached_just_before_listing_comes_back(agent: Agent, pod: int) -> None:
    node = agent.start()
    node.look()
    link = tcx.open_pinned(agent.folder / f"{pod}-egress")
    tcx.detach(link)
    os.close(link)
    # As after a change of another device.
    node._see_others()
    node.look()
    assert carried("pod") == AGENT_ONLY
