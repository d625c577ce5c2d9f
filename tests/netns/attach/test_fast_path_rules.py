# SPDX-License-Identifier: Apache-2.0
"""The map ``fast_path`` while other software changes rulesets, neighbours and ip rules."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.node import fast_path, policy_routing
from pyebpf_proxy.datapath.node.fast_path import CHANGES_PER_SECOND, PROMPT_CHANGES, ClosedReason, FastPath
from pyebpf_proxy.datapath.rulesets import watch
from tests.support.fast_lab import slowness

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

Shell = Callable[[str], str]
SOON, DEADLINE = 1.0, 60.0


class Node:
    """A fast path with the real map, in the test's event loop."""

    def __init__(self, programs: Object, **options: Any) -> None:
        self.map = programs.maps["fast_path"]
        self.layout = programs.btf.struct("fast_path")
        self.reasons = programs.btf.enum("slow_path_reason")
        self.marks = programs.maps["route_marks"]
        self.fast = FastPath(self.map, self.layout, self.reasons, route_marks=self.marks, **options)

    def state(self) -> dict[str, Any]:
        value = self.map.lookup(bytes(4))
        assert value is not None
        return self.layout.unpack(value)

    async def until(self, name: str, value: int, other: bool = False) -> float:
        """Seconds until a field has this value, or with ``other`` a different one."""
        begin = time.monotonic()
        while (self.state()[name] == value) is other:
            assert time.monotonic() - begin < DEADLINE, self.state()
            await asyncio.sleep(0.005)
        return time.monotonic() - begin


@asynccontextmanager
async def following(programs: Object, **options: Any) -> AsyncIterator[Node]:
    node = Node(programs, **options)
    node.fast.follow(asyncio.get_running_loop())
    try:
        yield node
    finally:
        node.fast.close()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    asyncio.run(whole())


def refuse(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_rules_that_could_once_not_be_listed_close_it_only_until_they_can(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with following(programs) as node:
            with monkeypatch.context() as without:
                without.setattr(policy_routing, "rules", refuse)
                shell("ip rule add to 192.0.2.0/24 priority 77 table main")
                await node.until("closed4", 0, other=True)
                assert "Too many open files" in node.fast.closed[4].text
            await node.until("closed4", 0)
            assert not node.fast.closed

    run(scene)


#: What a pod can do all the time: two commands, the second of which undoes the first.
RESTLESS = {
    "neighbour": [
        f"ip neigh replace 192.0.2.7 lladdr 02:00:00:00:00:0{number} dev v0 nud permanent" for number in (1, 2)
    ],
    "device": [f"ip link set v1 {state}" for state in ("down", "up")],
}


@pytest.mark.parametrize("what", RESTLESS)
def test_a_restless_pod_does_not_void_the_permits_of_others_all_the_time(
    programs: Object, shell: Shell, what: str
) -> None:
    """With each change, all flows of the node would take the slow path until netfilter has seen them again."""
    shell("ip link add v0 type veth peer name v1; ip link set v1 up; ip link set v0 up")

    async def scene() -> None:
        async with following(programs) as node:
            begin, before = time.monotonic(), node.state()
            for _ in range(40):
                for command in RESTLESS[what]:
                    shell(command)
                    last = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                    await asyncio.sleep(0.005)
            after, most = node.state(), PROMPT_CHANGES + 1 + (time.monotonic() - begin) * CHANGES_PER_SECOND
            for name in ("generation", "permit_generation"):
                assert PROMPT_CHANGES < after[name] - before[name] <= most
            # The last change counts, too.
            while node.fast._voided < last:
                assert time.monotonic() - begin < DEADLINE
                await asyncio.sleep(0.005)

    run(scene)


def test_neighbours_that_could_once_not_be_listed_are_listed_again(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("ip link add v0 type veth peer name v1; ip link set v1 up; ip link set v0 up")

    async def scene() -> None:
        async with following(programs) as node:
            known = node.fast._neighbours
            received = known._events.received
            with monkeypatch.context() as without:
                without.setattr(known._events, "received", lambda: [*received(), None])
                without.setattr(known, "_list", refuse)
                shell("ip neigh replace 192.0.2.7 lladdr 02:00:00:00:00:01 dev v0 nud permanent")
                while not known._stale:  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.005)
            begin = time.monotonic()
            while known._stale:
                assert time.monotonic() - begin < DEADLINE
                await asyncio.sleep(0.005)
            before = node.state()["generation"]
            shell("ip neigh replace 192.0.2.7 lladdr 02:00:00:00:00:02 dev v0 nud permanent")
            await node.until("generation", before, other=True)

    run(scene)


CHANGES = {
    "nft": ("nft add rule inet mine forward limit rate 10/second accept", "nft flush chain inet mine forward"),
    "iptables-nft": ("iptables-nft -A FORWARD -j LOG", "iptables-nft -D FORWARD -j LOG"),
    "ip6tables-nft": ("ip6tables-nft -A FORWARD -j LOG", "ip6tables-nft -D FORWARD -j LOG"),
}


@pytest.mark.alone
@pytest.mark.parametrize("which", CHANGES)
def test_a_rule_closes_the_family_and_opens_it_again(which: str, programs: Object, shell: Shell) -> None:
    add, remove = CHANGES[which]
    family = "closed6" if which.startswith("ip6") else "closed4"
    shell("nft 'table inet mine { chain forward { type filter hook forward priority 0; }; }'")

    async def scene() -> None:
        async with following(programs) as node:
            assert node.state()[family] == 0
            for command, wanted in ((add, node.reasons["STACK_RULES"]), (remove, 0)) * 2:
                before = node.state()["permit_generation"]
                shell(command)
                taken = [await node.until("permit_generation", before, other=True), await node.until(family, wanted)]
                assert max(taken) < SOON or max(taken) < SOON * slowness(), taken

    run(scene)


def test_a_table_that_ends_with_its_owner(programs: Object, shell: Shell) -> None:
    """firewalld's, for example, if it is killed. The kernel reports no change."""
    lines = (
        "add table inet mine { flags owner; }",
        "add chain inet mine c { type filter hook forward priority 0; }",
        "add rule inet mine c log",
    )

    async def scene() -> None:
        async with following(programs) as node:
            owner = await asyncio.create_subprocess_exec("nft", "-i", stdin=asyncio.subprocess.PIPE)
            try:
                assert owner.stdin is not None
                owner.stdin.write("".join(f"{line}\n" for line in lines).encode())
                await node.until("closed4", node.reasons["STACK_RULES"])
                await asyncio.sleep(0.5)  # until all changes have been read
            finally:
                owner.kill()
                await owner.wait()
            await node.until("closed4", 0)

    run(scene)


def test_the_reason_is_kept_in_words(programs: Object, shell: Shell) -> None:
    shell("iptables-legacy -A FORWARD -m limit --limit 5/sec -j ACCEPT; ip rule add dport 80 lookup 100")
    node = Node(programs)
    try:
        assert node.fast.closed == {4: ClosedReason("STACK_POLICY_ROUTED", "ip rule 32765 selects by destination port")}
        shell("ip rule del dport 80 lookup 100")
        again = Node(programs)
        words = "iptables-legacy table filter, chain FORWARD, rule 1: limit"
        assert again.fast.closed == {4: ClosedReason("STACK_RULES", words)}
        again.fast.close()
        bold = Node(programs, heed_rules=False)
        assert (bold.fast.closed, bold.fast.warnings, bold.state()["closed4"]) == ({}, {4: words}, 0)
        bold.fast.close()
    finally:
        node.fast.close()


def test_iptables_legacy_is_read_every_two_seconds(programs: Object, shell: Shell) -> None:
    async def scene() -> None:
        async with following(programs) as node:
            for command, closes in (("-A", True), ("-D", False)):
                before = node.state()["permit_generation"]
                shell(f"iptables-legacy {command} FORWARD -j LOG")
                await node.until("closed4", 0, other=closes)
                assert node.state()["permit_generation"] != before

    run(scene)


def test_changes_of_the_agents_table_void_no_permits(programs: Object, shell: Shell) -> None:
    table = Table("pyebpf-proxy-test")
    table.ensure(Behaviour(0x4000))

    async def scene() -> None:
        async with following(programs, own_table=table.name) as node:
            before = node.state()["permit_generation"]
            for number in range(1, 20):
                table.update({number: (bytes([10, 0, 0, number]), 80)})
            await asyncio.sleep(0.3)
            assert node.state()["permit_generation"] == before
            shell("nft add table inet mine")
            await node.until("permit_generation", before + 1)

    run(scene)


def test_changed_elements_of_foreign_sets_void_permits_and_are_not_read(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("nft 'table inet mine { set blocked { type ipv4_addr; }; chain a { ip saddr @blocked drop; }; }'")

    async def scene() -> None:
        async with following(programs) as node:
            started: list[int] = []
            monkeypatch.setattr(node.fast._rules, "_start", lambda: started.append(1))
            before = node.state()["permit_generation"]
            shell("nft 'add element inet mine blocked { 192.0.2.1 }'")
            await node.until("permit_generation", before + 1)
            await asyncio.sleep(0.3)
            assert started == []
            shell("nft add table inet two")
            await node.until("permit_generation", before + 2)
            await asyncio.sleep(0.3)
            assert started == [1]

    run(scene)


def test_the_first_element_of_a_set_closes_the_family_and_the_last_one_opens_it(programs: Object, shell: Shell) -> None:
    shell("""nft 'table inet mine { set some { type ipv4_addr; };
        chain a { type filter hook forward priority 0; ip saddr @some log; }; }'""")

    async def scene() -> None:
        async with following(programs) as node:
            await node.until("closed4", 0)
            for _ in range(2):
                shell("nft 'add element inet mine some { 192.0.2.1 }'")
                await node.until("closed4", 0, other=True)
                shell("nft 'delete element inet mine some { 192.0.2.1 }'")
                await node.until("closed4", 0)

    run(scene)


def test_elements_that_are_added_while_rules_are_read(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That reading has found the set empty, and the one before did not know it."""
    added = threading.Event()
    read = watch.kernel.read

    def slow() -> Any:
        found = read()
        if threading.current_thread() is not threading.main_thread():
            assert added.wait(DEADLINE)
        return found

    async def scene() -> None:
        async with following(programs) as node:
            monkeypatch.setattr(watch.kernel, "read", slow)
            shell("""nft 'table inet mine { set some { type ipv4_addr; };
                chain a { type filter hook forward priority 0; ip saddr @some log; }; }'""")
            while not node.fast._rules._reading:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)
            before = node.state()["permit_generation"]
            shell("nft 'add element inet mine some { 192.0.2.1 }'")
            await node.until("permit_generation", before, other=True)
            added.set()
            await node.until("closed4", 0, other=True)

    run(scene)


def test_restored_marks_that_choose_routes_are_written_before_the_family_opens(programs: Object, shell: Shell) -> None:
    """Then what was learned is void: it may be of packets with such a mark."""
    rule = "iptables -t mangle -{} PREROUTING -j CONNMARK --{}"
    shell("ip rule add fwmark 0x80/0x80 lookup main")
    shell(rule.format("A", "restore-mark"))
    shell("iptables -t mangle -A PREROUTING -p tcp --sport 7 -j CONNMARK --set-mark 0x80")

    async def scene() -> None:
        async with following(programs) as node:
            assert node.fast.closed.keys() == {4}
            assert node.marks.lookup(bytes(4)) == (0x80).to_bytes(4, sys.byteorder)
            shell("iptables -t mangle -D PREROUTING -p tcp --sport 7 -j CONNMARK --set-mark 0x80")
            await node.until("closed4", 0)
            shell("iptables -t mangle -A PREROUTING -p tcp -j CONNMARK --set-mark 0x80")
            before = node.state()["generation"]
            await node.until("generation", before + 1)
            assert node.marks.lookup(bytes(4)) == (0x80).to_bytes(4, sys.byteorder)
            assert not node.fast.closed
            shell("iptables -t mangle -F")
            while node.marks.lookup(bytes(4)) != bytes(4):  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    run(scene)


def test_a_mark_closes_the_family_when_an_ip_rule_uses_it(programs: Object, shell: Shell) -> None:
    shell("iptables -t mangle -A PREROUTING -j MARK --set-mark 7")

    async def scene() -> None:
        async with following(programs) as node:
            assert node.state()["closed4"] == 0
            shell("ip rule add fwmark 7 lookup 100")
            await node.until("closed4", node.reasons["STACK_RULES"])
            shell("ip rule del fwmark 7 lookup 100")
            await node.until("closed4", 0)

    run(scene)


def test_a_device_of_the_same_name_with_ethernet_headers(programs: Object, shell: Shell) -> None:
    shell("ip tuntap add two mode tun; iptables -A FORWARD -o two -j LOG")

    async def scene() -> None:
        async with following(programs) as node:
            assert node.state()["closed4"] == 0
            shell("ip link del two; ip link add two type veth peer other")
            await node.until("closed4", node.reasons["STACK_RULES"])
            shell("ip link del two; ip tuntap add two mode tun")
            await node.until("closed4", 0)

    run(scene)


@pytest.mark.parametrize(
    ("rule", "closes"),
    [
        ("from fd00::/8 lookup 100", False),
        ("to fd00::/8 lookup 100", False),
        ("iif lo lookup 100", False),
        ("oif lo lookup 100", False),
        ("fwmark 1/1 lookup 100", False),
        ("dport 80 lookup 100", True),
        ("sport 80-90 lookup 100", True),
        ("ipproto tcp lookup 100", True),
        ("tos 0x10 lookup 100", True),
        ("uidrange 5-6 lookup 100", True),
    ],
)
def test_ip_rules(rule: str, closes: bool, programs: Object, shell: Shell) -> None:
    """Rules that distinguish flows of the same two hosts close it. Others belong to the learned route."""

    async def scene() -> None:
        async with following(programs) as node:
            before = node.state()["generation"]
            shell(f"ip -6 rule add {rule}")
            await node.until("generation", before, other=True)
            assert node.state()["closed6"] == (node.reasons["STACK_POLICY_ROUTED"] if closes else 0)
            assert node.state()["closed4"] == 0

    run(scene)


MULTIPATH = {
    "by ports": ("policy=1", True),
    "by addresses": ("policy=0", False),
    "by addresses, or those of an inner packet": ("policy=2", False),
    "by addresses and protocol": ("policy=3 fields=7", False),
    "by the source port": ("policy=3 fields=17", True),
    "by an inner port": ("policy=3 fields=2048", True),
}


#: By family: two routers and a destination behind them.
HOPS = {4: ("10.1.1.2", "10.1.1.3"), 6: ("fd01::2", "fd01::3")}
BEHIND = {4: "10.9.0.0/24", 6: "fd09::/64"}
TWO_HOPS = "ip {family} route add {behind} nexthop via {first} dev one nexthop via {second} dev one"


def two_ways(shell: Shell) -> None:
    shell(
        "ip link add one type veth peer other; ip link set one up; ip link set other up;"
        "ip addr add 10.1.1.1/24 dev one; ip addr add fd01::1/64 dev one nodad"
    )


def spread(family: int, script: str) -> str:
    first, second = HOPS[family]
    return script.format(family=f"-{family}", behind=BEHIND[family], first=first, second=second)


OBJECTS = "ip {family} nexthop add id 1 via {first} dev one; ip {family} nexthop add id 2 via {second} dev one;"
#: Commands that give a route several next hops, with those before it that do not.
SEVERAL_HOPS = {
    "a route": ("true", TWO_HOPS),
    "a route of another table": ("true", TWO_HOPS.replace("route add", "route add table 7")),
    "a next hop is appended": (
        "ip {family} route add {behind} via {first} dev one",
        "ip {family} route append {behind} via {second} dev one",
    ),
    "a group of objects": (OBJECTS, "ip nexthop add id 3 group 1/2; ip {family} route add {behind} nhid 3"),
    "a group of objects, which the message of the route does not show": (
        "echo 0 > /proc/sys/net/ipv4/nexthop_compat_mode;" + OBJECTS,
        "ip nexthop add id 3 group 1/2; ip {family} route add {behind} nhid 3",
    ),
    "a group that grows": (
        OBJECTS + "ip nexthop add id 3 group 1; ip {family} route add {behind} nhid 3",
        "ip nexthop replace id 3 group 1/2",
    ),
}


@pytest.mark.parametrize(
    ("what", "family"),
    # A second IPv4 route to the same destination is not used.
    [(what, family) for what in SEVERAL_HOPS for family in (4, 6) if family == 6 or "appended" not in what],
)
def test_a_route_gets_several_next_hops(
    what: str, family: int, programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes the family at once. The setting alone closes nothing: many nodes have it, and a single router."""
    before, closes = (spread(family, script) for script in SEVERAL_HOPS[what])
    number = programs.btf.enum("slow_path_reason")["STACK_POLICY_ROUTED"]
    two_ways(shell)
    shell(f"echo 1 > /proc/sys/net/ipv{family}/fib_multipath_hash_policy;" + before)
    # What the beat would find does not count.
    monkeypatch.setattr(fast_path, "BEAT_SECONDS", 3600.0)

    async def scene() -> None:
        async with following(programs) as node:
            assert not node.fast.closed
            shell(closes)
            await node.until(f"closed{family}", number)
            assert f"the route {BEHIND[family]}" in node.fast.closed[family].text
            assert len(node.fast.closed) == 1

    run(scene)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("opens", ["ip {family} route del {behind}", "ip link del one"])
def test_the_last_route_with_several_next_hops_is_removed(
    opens: str, family: int, programs: Object, shell: Shell
) -> None:
    """The kernel does not report the IPv4 routes that it removes with their device."""
    two_ways(shell)
    shell(f"echo 1 > /proc/sys/net/ipv{family}/fib_multipath_hash_policy;" + spread(family, TWO_HOPS))

    async def scene() -> None:
        async with following(programs) as node:
            assert family in node.fast.closed
            shell(spread(family, opens))
            await node.until(f"closed{family}", 0)

    run(scene)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("what", MULTIPATH)
def test_next_hops_that_depend_on_the_flow(what: str, family: int, programs: Object, shell: Shell) -> None:
    """A permit has one next hop for all flows of a pair. The kernel reports no change of the setting."""
    settings, closes = MULTIPATH[what]
    place = f"/proc/sys/net/ipv{family}/fib_multipath_hash_"
    number = programs.btf.enum("slow_path_reason")["STACK_POLICY_ROUTED"]
    two_ways(shell)
    shell(spread(family, TWO_HOPS))

    async def scene() -> None:
        async with following(programs) as node:
            for setting in reversed(settings.split()):
                name, _, value = setting.partition("=")
                shell(f"echo {value} > {place}{name}")
            if closes:
                await node.until(f"closed{family}", number)
                assert f"net.ipv{family}.fib_multipath_hash_policy" in node.fast.closed[family].text
                shell(f"echo 0 > {place}policy")
                await node.until(f"closed{family}", 0)
            else:
                await asyncio.sleep(2 * fast_path.BEAT_SECONDS)
            assert not node.fast.closed

    run(scene)


def test_next_hops_that_depend_on_the_flow_have_precedence(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this reason the programs know that a packet's hash chooses its route."""
    monkeypatch.setattr(fast_path, "_has_ipsec", lambda: True)
    two_ways(shell)
    shell("echo 1 > /proc/sys/net/ipv4/fib_multipath_hash_policy;" + spread(4, TWO_HOPS))
    closed = fast_path.closed_on_node(fast_path.flow_hashes())
    assert {family: why.code for family, why in closed.items()} == {
        4: "STACK_POLICY_ROUTED",
        6: "STACK_IPSEC",
    }


def test_a_changed_neighbour_increments_the_generation(programs: Object, shell: Shell) -> None:
    shell(
        "ip link add one type veth peer other; ip link set one up; ip link set other up;ip addr add 10.1.1.1/24 dev one"
    )
    neighbour = "10.1.1.2 dev one nud permanent lladdr 02:00:00:00:00"

    async def scene() -> None:
        async with following(programs) as node:
            await asyncio.sleep(0.2)
            before = node.state()["generation"]
            shell(f"ip neigh add {neighbour}:01")
            await asyncio.sleep(0.2)
            assert node.state()["generation"] == before, "no packet was sent to it yet"
            shell(f"ip neigh replace {neighbour}:02")
            await node.until("generation", before + 1)
            shell("ip neigh del 10.1.1.2 dev one")
            await node.until("generation", before + 2)

    run(scene)


def test_a_neighbour_that_the_kernel_only_forgets_voids_no_permit(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many neighbours it forgets some all the time."""
    shell("ip link add one type veth peer name other; ip link set one up; ip link set other up")
    shell("ip addr add 10.1.1.1/24 dev one; ip neigh add 10.1.1.2 dev one nud stale lladdr 02:00:00:00:00:01")
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        (message,) = netlink.dump(uapi.RTM_GETNEIGH, uapi.NDMSG.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0))
    # As the kernel reports it: the entry is as it was last.
    forgotten = struct.pack("=IHHII", 16 + len(message), uapi.RTM_DELNEIGH, 0, 0, 0) + message

    async def scene() -> None:
        async with following(programs) as node:
            before = node.state()
            with monkeypatch.context() as once:
                once.setattr(node.fast._neighbours._events, "received", lambda: [forgotten])
                node.fast._read_neighbours()
            assert node.state()["generation"] == before["generation"] + 1
            assert node.state()["permit_generation"] == before["permit_generation"]

    run(scene)


CHANGES_OF_LINKS = {
    "a neighbour": "ip neigh replace 10.1.1.2 dev one nud permanent lladdr 02:00:00:00:00:02",
    "a route": "ip route replace 10.2.0.0/16 via 10.1.1.3",
    "a device": "ip link set one mtu 1400",
}


@pytest.mark.parametrize("what", CHANGES_OF_LINKS)
def test_a_change_of_links_voids_permits(what: str, programs: Object, shell: Shell) -> None:
    """They have the device and the link addresses by which new flows would leave."""
    shell("ip link add one type veth peer name other; ip link set one up; ip link set other up")
    shell("ip addr add 10.1.1.1/24 dev one; ip route add 10.2.0.0/16 via 10.1.1.2")
    shell("ip neigh add 10.1.1.2 dev one nud permanent lladdr 02:00:00:00:00:01")

    async def scene() -> None:
        async with following(programs) as node:
            await asyncio.sleep(0.2)
            before = node.state()
            shell(CHANGES_OF_LINKS[what])
            await node.until("permit_generation", before["permit_generation"], other=True)
            assert node.state()["generation"] > before["generation"]
            changed = node.state()
            node.fast.moved()
            assert node.state()["permit_generation"] == changed["permit_generation"], "an endpoint changes no link"

    run(scene)


def test_the_end(programs: Object) -> None:
    node = Node(programs)
    first = node.state()
    assert (first["draining"], node.fast.draining) == (0, False)
    assert first["alive_until"] > time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    node.fast.close()
    assert node.state()["alive_until"] == 0
    after = Node(programs)
    try:
        # Permits and entries of an earlier agent are void.
        assert after.state()["generation"] == first["generation"] + 1
        assert after.state()["permit_generation"] == first["permit_generation"] + 1
        assert after.state()["draining"] == 0
    finally:
        after.fast.close()


def test_it_holds_until_the_flows_on_its_ports_are_known(programs: Object) -> None:
    """conntrack may have masqueraded flows to ports that the young flows of the former run did not have."""
    drains = []
    for ports, admits in (
        (range(0), True),
        (range(1024, 20000), False),
        (range(1024, 20000), True),
        (range(1024, 20000), True),
        (range(1024, 32768), True),
        (range(2000, 32768), True),
        (range(1024, 32768), True),
    ):
        node = Node(programs, holds=bool(ports), snat_ports=ports)
        drains.append(node.fast.draining)
        assert node.state()["draining"] == drains[-1]
        if admits:
            node.fast.admit()
        node.fast.close()
    assert drains == [False, True, True, False, True, False, True]


def test_rules_are_read_again_after_no_thread_could_be_started(
    programs: Object, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with following(programs) as node:
            await asyncio.sleep(0.5)
            start, refused = threading.Thread.start, []

            def refuse_once(thread: threading.Thread) -> None:
                if thread.name == "rulesets" and not refused:
                    refused.append(thread)
                    raise RuntimeError("can't start new thread")
                start(thread)

            # The pause after a failed read is as long as this test waits for a change.
            monkeypatch.setattr(watch, "LONGEST", 1.0)
            monkeypatch.setattr(threading.Thread, "start", refuse_once)
            shell("iptables -A FORWARD -j LOG")
            await node.until("closed4", node.reasons["STACK_RULES"])
            assert refused

    run(scene)


def test_it_closes_while_no_flow_is_handed_to_conntrack(programs: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promoter hangs, or each of its passes fails: no new rule would meet the young flows."""
    monkeypatch.setattr(fast_path, "BEAT_SECONDS", 0.02)
    passes = 0

    async def scene() -> None:
        nonlocal passes
        async with following(programs, passes=lambda: passes) as node:
            closed = node.reasons["STACK_NO_AGENT"]
            for _ in range(20):
                passes += 1
                await asyncio.sleep(0.02)
            assert (node.state()["closed4"], node.state()["closed6"]) == (0, 0)
            await node.until("closed4", closed)
            assert node.state()["closed6"] == closed
            passes += 1
            await node.until("closed4", 0)
            assert node.fast.closed == {}

    run(scene)


def test_a_program_without_the_reason_closes_too(programs: Object, shell: Shell, bpf_objects: Path) -> None:
    shell("iptables -A FORWARD -j LOG")
    reasons = {name: number for name, number in programs.btf.enum("slow_path_reason").items() if name != "STACK_RULES"}
    layout = programs.btf.struct("fast_path")
    fast = FastPath(programs.maps["fast_path"], layout, reasons, route_marks=programs.maps["route_marks"])
    try:
        value = programs.maps["fast_path"].lookup(bytes(4))
        assert value is not None
        assert programs.btf.struct("fast_path").unpack(value)["closed4"] == reasons["STACK_POLICY_ROUTED"]
    finally:
        fast.close()
