# SPDX-License-Identifier: Apache-2.0
"""The agent's nft rules for packets of the node itself: created, changed and removed; a flow keeps its endpoint."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec
import pytest

from pyebpf_proxy.datapath.netfilter.host_rules import HostRules, HostTraffic
from pyebpf_proxy.datapath.netfilter.nft import NftError, Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)
from tests.flows import sctp
from tests.netns.attach.datagrams import MARK, SECONDS, af, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

PORT = 36412
NAME = ServicePortName("default", "amf", "s1ap", Protocol.SCTP, IPFamily.IPV4)
OTHER = NAME._replace(name="mme", port="")
PODS = ipaddress.ip_network("10.2.0.0/16")
ENDPOINTS = ("10.2.0.2", "10.2.0.3", "10.2.0.4")


def service(number: int = 1, ends: Sequence[str] = ENDPOINTS) -> ServicePort:
    """Service number 1 is at the router's VIP."""
    listed = tuple(Endpoint(packed(address), 3868, True) for address in ends)
    frontends = (
        Frontend(FrontendKind.CLUSTER_IP, packed(f"10.96.0.{number}"), PORT),
        Frontend(FrontendKind.LOAD_BALANCER, packed(f"203.0.113.{number}"), PORT),
        Frontend(FrontendKind.NODE_PORT, bytes(4), 30300 + number),
    )
    name = NAME if number == 1 else OTHER
    return ServicePort(name, frontends, cluster=listed, local=listed[:1], any_endpoints=bool(ends))


RICH = msgspec.structs.replace(
    service(),
    affinity_seconds=600,
    internal_local=True,
    source_ranges=(SourceRange(packed("10.0.0.0"), 8), SourceRange(packed("10.1.0.0"), 16)),
    vip_source_allowed=True,
)
PLAIN6 = ServicePort(
    NAME._replace(family=IPFamily.IPV6),
    (Frontend(FrontendKind.CLUSTER_IP, packed("fd96::9"), PORT),),
    cluster=(Endpoint(packed("fd02::2"), 3868, False),),
    any_endpoints=True,
)
NOTHING = HostRules(HostTraffic(MARK, detectors={IPFamily.IPV4: PODS, IPFamily.IPV6: None}, localhost_node_ports=True))


def with_services(own: HostRules, *plans: ServicePort) -> HostRules:
    """The state with exactly these services."""
    changed = own.after({plan.name: plan for plan in plans}, complete=True)
    return own if changed is None else changed


def lines(shell: Shell) -> list[str]:
    return sorted(re.sub(r" expires \w+", "", shell("nft list ruleset")).splitlines())


_used: set[int] = set()


def init() -> bytes:
    """An INIT from a new source port: conntrack keeps the endpoint of a flow that it knows."""
    while (drawn := sctp.init(PORT))[0] in _used:
        pass
    _used.add(drawn[0])
    return drawn[1]


def reached(router: Router, shell: Shell, destination: str, times: int) -> Counter[str]:
    """Which endpoints so many INITs of the node reach."""
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        with router.inside("server"):
            server = stack.enter_context(closing(socket.socket(socket.AF_INET, socket.SOCK_RAW, sctp.PROTOCOL)))
        client = stack.enter_context(closing(socket.socket(socket.AF_INET, socket.SOCK_RAW, sctp.PROTOCOL)))
        server.settimeout(SECONDS)
        for _ in range(times):
            client.sendto(init(), (destination, 0))
            text = server.recv(2000)
            assert sctp.is_whole(text[20:])
            found[socket.inet_ntoa(text[16:20])] += 1
    return found


@pytest.fixture
def routed(router: Router, shell: Shell) -> Router:
    """The endpoints are in the server's namespace, and every other address is routed there too."""
    with router.inside("server"):
        shell("; ".join(f"ip addr add {address}/24 dev eth0" for address in ENDPOINTS[1:]))
    shell(f"ip route add default via {router.SERVER[4]}; ip -6 route add default via {router.SERVER[6]}")
    return router


def test_without_sctp_services_there_are_no_host_rules(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    before = shell("nft list ruleset")
    table.set_host_rules(NOTHING)
    assert NOTHING.after({NAME._replace(protocol=Protocol.TCP): service()}) is None
    assert shell("nft list ruleset") == before
    table.set_host_rules(with_services(NOTHING, RICH, PLAIN6))
    assert "host_output" in shell("nft list ruleset")
    table.set_host_rules(NOTHING)
    assert shell("nft list ruleset") == before


def test_changes_from_every_state_to_every_other(table: Table, shell: Shell) -> None:
    """An incremental change gives the same rules as a new table."""
    other = service(2, ENDPOINTS[:1])
    states = [
        with_services(NOTHING, *plans)
        for plans in (
            (),
            (service(),),
            (RICH, other),
            (msgspec.structs.replace(RICH, affinity_seconds=5, cluster=RICH.cluster[1:]), PLAIN6),
            (service(ends=()), msgspec.structs.replace(other, external_local=True, local=())),
            (msgspec.structs.replace(service(), frontends=other.frontends), PLAIN6),
        )
    ]
    states += [state for plain in states if (state := plain.with_traffic(HostTraffic(MARK, nft_mode=True)))]
    fresh = []
    for state in states:
        shell("nft flush ruleset")
        made = Table()
        made.ensure(Behaviour(MARK))
        made.set_host_rules(state)
        fresh.append(lines(shell))
    table.ensure(Behaviour(MARK))
    for first, wanted in zip(states, fresh, strict=True):
        for second in states:
            table.set_host_rules(second)
            table.set_host_rules(first)
            assert lines(shell) == wanted


def test_a_change_affects_its_own_service_only(table: Table, shell: Shell) -> None:
    def handles(name: str) -> str:
        return "\n".join(
            line for line in shell("nft -a list ruleset").splitlines() if f"chain host4/sctp/default/{name}/" in line
        )

    table.ensure(Behaviour(MARK))
    before = with_services(NOTHING, RICH, service(2))
    table.set_host_rules(before)
    kept = handles("mme")
    after = before.after({NAME: service(ends=ENDPOINTS[:2]), OTHER: service(2)})
    assert after is not None
    table.set_host_rules(after)
    assert handles("mme") == kept
    generation = table._generation()
    table.set_host_rules(after)
    assert after.after({OTHER: service(2)}) is None
    assert table._generation() == generation


@pytest.mark.parametrize("how", ["a restart", "nft flush ruleset", "an older shape"])
def test_host_rules_are_adopted_and_repaired(how: str, table: Table, shell: Shell) -> None:
    own = with_services(NOTHING, RICH, PLAIN6)
    table.ensure(Behaviour(MARK))
    table.set_host_rules(own)
    wanted = lines(shell)
    if how == "nft flush ruleset":
        shell(how)
        table.ensure(Behaviour(MARK))
        assert lines(shell) == wanted
        shell(how)
        # If an incremental change fails, all rules are created again.
        table.set_host_rules(with_services(own, RICH))
        table.set_host_rules(own)
    else:
        if how == "an older shape":
            shell(f"nft delete chain inet {table.name} reject_local")
        again = Table()
        again.ensure(Behaviour(MARK))
        if how == "a restart":
            assert lines(shell) == wanted, "the rules stay until the new agent knows its services"
        # One service fewer than before: its rules are removed.
        again.set_host_rules(with_services(NOTHING, RICH))
        assert "host6/" not in shell("nft list ruleset")
        again.set_host_rules(own)
    assert lines(shell) == wanted


def test_a_change_that_the_kernel_refuses_has_no_effect(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    own = with_services(NOTHING, RICH)
    table.set_host_rules(own)
    wanted = lines(shell)
    impossible = own.with_traffic(HostTraffic(1 << 40))
    assert impossible is not None
    with pytest.raises(NftError):
        table.set_host_rules(impossible)
    assert lines(shell) == wanted
    table.set_host_rules(own)
    assert lines(shell) == wanted


def test_endpoints_are_chosen_at_random_and_kept_with_affinity(routed: Router, table: Table, shell: Shell) -> None:
    vip = routed.VIP[4]
    table.ensure(Behaviour(MARK))
    own = with_services(NOTHING, service())
    table.set_host_rules(own)
    found = reached(routed, shell, vip, 60)
    # One of the endpoints gets no packet once in twelve thousand million runs.
    assert set(found) == set(ENDPOINTS)
    sticky = msgspec.structs.replace(service(), affinity_seconds=600)
    table.set_host_rules(own := with_services(own, sticky))
    (chosen,) = reached(routed, shell, vip, 20)
    # Affinity covers all addresses of the service port, and survives a restart and changes of other endpoints.
    assert set(reached(routed, shell, "203.0.113.1", 20)) == {chosen}
    again = Table()
    again.ensure(Behaviour(MARK))
    again.set_host_rules(with_services(NOTHING, sticky))
    assert set(reached(routed, shell, vip, 20)) == {chosen}
    fewer = [address for address in ENDPOINTS if address != chosen]
    two = msgspec.structs.replace(sticky, cluster=service(ends=(fewer[0], chosen)).cluster)
    again.set_host_rules(with_services(NOTHING, two))
    assert set(reached(routed, shell, vip, 20)) == {chosen}
    gone = msgspec.structs.replace(sticky, cluster=service(ends=fewer).cluster)
    again.set_host_rules(with_services(NOTHING, gone))
    assert set(reached(routed, shell, vip, 20)) < set(fewer)


def test_remote_endpoints_need_no_chains(routed: Router, table: Table, shell: Shell) -> None:
    """In a large cluster most endpoints are remote: one rule with a map chooses among them."""
    table.ensure(Behaviour(MARK))
    away = tuple(msgspec.structs.replace(endpoint, local=False) for endpoint in service().cluster)
    table.set_host_rules(with_services(NOTHING, msgspec.structs.replace(service(), cluster=away)))
    assert "10.2.0.2.3868" not in shell("nft list chains inet")
    assert set(reached(routed, shell, routed.VIP[4], 60)) == set(ENDPOINTS)


ALL = HostRules(HostTraffic(MARK, protocols=frozenset(Protocol)))


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize("local", [True, False], ids=["here", "elsewhere"])
def test_host_rules_serve_all_protocols_without_socket_programs(
    local: bool, protocol: Protocol, routed: Router, table: Table, shell: Shell
) -> None:
    """One name and port exists in every protocol: each is served separately, and a removed one is not served."""
    kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM
    ends = tuple(Endpoint(packed(address), 3868, local) for address in ENDPOINTS)
    plan = msgspec.structs.replace(service(), name=NAME._replace(protocol=protocol), cluster=ends)
    table.ensure(Behaviour(MARK))
    table.set_host_rules(NOTHING)
    table.set_host_rules(with_services(ALL, plan, service()))
    seen = set()
    with ExitStack() as stack:
        with routed.inside("server"):
            server = stack.enter_context(closing(socket.socket(af(4), kind)))
        server.bind(("0.0.0.0", 3868))
        server.settimeout(SECONDS)
        if protocol is Protocol.TCP:
            server.listen()
        for number in range(20):
            client = stack.enter_context(closing(socket.socket(af(4), kind)))
            client.settimeout(SECONDS)
            client.connect((("10.96.0.1", PORT), ("203.0.113.1", PORT), (routed.TOWARDS_SERVER[4], 30301))[number % 3])
            client.send(b"question")
            if protocol is Protocol.TCP:
                connection = stack.enter_context(closing(server.accept()[0]))
                seen.add(connection.getsockname()[0])
            else:
                server.recv(100)
    if protocol is Protocol.TCP:
        assert len(seen) > 1, "twenty connections reach more than one of three endpoints"
    table.set_host_rules(with_services(ALL, service()))
    with closing(socket.socket(af(4), kind)) as client, pytest.raises((TimeoutError, ConnectionRefusedError, OSError)):
        client.settimeout(0.3)
        client.connect(("10.96.0.1", PORT))
        client.send(b"question")
        client.recv(100)


OLDER = """
table inet pyebpf-proxy {
    map sctp_services4 {
        type ipv4_addr . inet_service : verdict
        elements = { 10.96.0.1 . 36412 : goto sctp4/default/amf/s1ap/cluster }
    }
    map sctp_node_ports4 { type inet_service : verdict ; }
    set sctp4/default/amf/s1ap/10.2.0.2.3868 { type ipv4_addr ; flags dynamic,timeout ; }
    chain host_sctp {
        type nat hook output priority -100
        ip daddr . sctp dport vmap @sctp_services4
    }
    chain sctp_reject { counter reject with icmpx type port-unreachable ; }
    chain sctp4/default/amf/s1ap/cluster { meta l4proto sctp dnat ip to 10.2.0.2:3868 ; }
}
"""


@pytest.mark.parametrize("some", [False, True], ids=["no services", "services"])
def test_rules_of_an_older_version_are_removed(some: bool, table: Table, shell: Shell) -> None:
    wanted = with_services(NOTHING, RICH) if some else NOTHING
    shell(f"nft -f - <<'END'\n{OLDER}\nEND")
    table.ensure(Behaviour(MARK))
    assert "host_sctp" in shell("nft list ruleset"), "the old chain serves until the services are known"
    table.set_host_rules(wanted)
    found = lines(shell)
    assert not [line for line in found if "host_sctp" in line or ("sctp4/" in line and "host4/" not in line)]
    assert not [line for line in found if "sctp_" in line]
    table.remove()
    table.ensure(Behaviour(MARK))
    table.set_host_rules(wanted)
    assert lines(shell) == found


def test_affinity_of_host_rules_expires(routed: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.set_host_rules(with_services(NOTHING, msgspec.structs.replace(service(), affinity_seconds=1)))

    def remembered() -> int:
        reached(routed, shell, routed.VIP[4], 1)
        return len(re.findall(r"\bexpires \w+", shell("nft list ruleset")))

    # On a machine that pauses meanwhile, the timeout of a second may be over.
    assert next((count for _ in range(10) if (count := remembered())), 0) == 1
    found = Counter[str]()
    while len(found) < 2:
        # Connect only after the entry has expired.
        shell(f"while nft list table inet {table.name} | grep -q expires; do sleep 0.1; done")
        found += reached(routed, shell, routed.VIP[4], 1)


@pytest.mark.parametrize(("destination", "verdict"), [("10.96.0.1", "host_reject"), ("203.0.113.2", "host_drop")])
def test_refused_packets_are_counted(
    destination: str, verdict: str, table: Table, routed: Router, shell: Shell
) -> None:
    """Without endpoints: rejected. Without local endpoints, or outside the ranges: dropped."""
    refused = service(ends=())
    guarded = msgspec.structs.replace(service(2), source_ranges=(SourceRange(packed("10.99.0.0"), 16),))
    table.ensure(Behaviour(MARK))
    table.set_host_rules(
        with_services(NOTHING, msgspec.structs.replace(refused, frontends=refused.frontends[:1]), guarded)
    )
    with closing(socket.socket(af(4), socket.SOCK_RAW, sctp.PROTOCOL)) as client, pytest.raises(PermissionError):
        client.sendto(init(), (destination, 0))
    chain = shell(f"nft list chain inet {table.name} {verdict}")
    assert "counter packets 1 " in chain


def test_a_tenant_s_service_with_many_endpoints_is_quickly_there(table: Table, shell: Shell) -> None:
    ends = tuple(Endpoint((0x0A000000 + n).to_bytes(4), 3868, False) for n in range(32768))
    plan = msgspec.structs.replace(service(), cluster=ends, local=(), affinity_seconds=600)
    rules = NOTHING
    table.ensure(Behaviour(MARK))
    for number in (1000, len(ends)):
        rules = with_services(rules, msgspec.structs.replace(plan, cluster=ends[:number]))
        begin = time.monotonic()
        table.set_host_rules(rules)
        assert time.monotonic() - begin < 10.0
    assert bool(rules.crowded)
    assert shell(f"nft list table inet {table.name}").count("chain host4/sctp") < 10
