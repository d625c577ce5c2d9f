# SPDX-License-Identifier: Apache-2.0
"""Invalid, duplicate and very large objects, on real packets (docs/objects.md); other objects are unaffected."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, Dual, cluster_ip, pod_cidr, vip
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, TIMED_OUT, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Object, Port, endpoint, endpoint_slice, service
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.scenario import DROPPED_AFTER
from pyebpf_proxy.lab.servers import Ports
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.logs import Log
from tests.support.see_tools import answer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

GOOD = Kind("good", 20)
WRONG = {4: ("0.0.0.0", "127.0.0.1", "169.254.169.254", "224.0.0.1"), 6: ("::", "::1", "fe80::1", "ff02::1")}
SHARED = Dual("203.0.113.200", "2001:db8:3::200")
#: Both pods of the lab answer at all these addresses; some are outside the pods' network.
MANY = 5_000
MANY_NETWORK = {4: "172.20.0.0/16", 6: "fd00:10:244:1:0:1::/96"}
PORTS = 300


def port(number: int = 80, node_port: int = 0, protocol: str = "TCP") -> Port:
    return Port("p", number, 5353 if protocol == "UDP" else 8080, protocol, node_port)


def a_slice(
    name: str, family: int, addresses: list[str], ports: list[Port], part: int = 0, node: str = "node1"
) -> Object:
    endpoints = [endpoint(address, node) for address in addresses]
    return endpoint_slice(name, family, ports, endpoints, f"{name}-{family}-{part}")


def a_service(name: str, number: int, ports: list[Port], created: str = "", **spec: Any) -> Object:
    made = service(name, ports, cluster_ip(number), **spec)
    if created:
        made["metadata"]["creationTimestamp"] = created
    return made


def write(lab: Lab, name: str, *objects: Object) -> float:
    """As one JSON list: YAML would take most of the test's time."""
    path = lab.manifests / f"{name}.json"
    hidden = path.with_name(f".{name}")
    hidden.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    moment = time.time()
    hidden.rename(path)
    return moment


def simple(lab: Lab, name: str, number: int, ports: list[Port], pod: str, **more: Any) -> list[Object]:
    """A Service with one pod as its endpoint."""
    address = lab.pods[pod].address
    made = [a_slice(name, family, [address.of(family)], ports) for family in (4, 6)]
    return [a_service(name, number, ports, **more), *made]


@pytest.fixture(scope="module")
def bad() -> Iterator[Lab]:
    with Lab(nodes=1) as lab:
        (node,) = lab.nodes
        GOOD.endpoints = tuple(lab.add_pod(name, node) for name in ("web-1", "web-2"))
        lab.add_pod("toolbox", node, serve=False)
        # Servers that a wrong endpoint must not reach, and one whose port a service's address takes.
        node.serve(Ports(http=(80, 81, 8080), echo=(), udp=()))
        write_nodes(lab)
        write_services(lab, GOOD)
        for family in (4, 6):
            target = GOOD.endpoints[0]
            wrong = [a_slice(name, family, list(WRONG[family]), [port()]) for name in ("mixed", "hopeless")]
            right = a_slice("mixed", family, [target.address.of(family)], [port()], part=1)
            write(lab, f"wrong-{family}", *wrong, right)
        write(lab, "mixed", a_service("mixed", 21, [port()], vip=vip(21)))
        write(lab, "hopeless", a_service("hopeless", 22, [port()], vip=vip(22)))
        lab.start_agents()
        yield lab


def everybody(lab: Lab) -> list[Namespace]:
    return [lab.client, lab.pods["toolbox"].namespace, lab.nodes[0].namespace]


def logged(lab: Lab, *words: str) -> int:
    """Lines of the agent's log that contain all of these."""
    return len(Log(lab.nodes[0].agent).lines(*words))


def metric(lab: Lab, name: str) -> float:
    found = re.search(rf"^pyebpf_proxy_{re.escape(name)} (\S+)$", lab.nodes[0].agent.metrics(), re.MULTILINE)
    assert found, name
    return float(found[1])


def answerers(
    lab: Lab, origin: Namespace, address: str, number: int, protocol: str = "tcp", count: int = 12
) -> set[str]:
    outcomes = origin.call(ask_many, count, address, number, protocol)
    return {outcome.answer.pod if outcome.answer else str(outcome) for outcome in outcomes}


@pytest.fixture(autouse=True)
def others_untouched(bad: Lab, family: int) -> Iterator[None]:
    """During and after every test all endpoints of the good service are reached."""
    yield
    for origin in everybody(bad):
        found = answerers(bad, origin, vip(20).of(family), 80, count=24)
        assert found == {"web-1", "web-2"}


def test_endpoints_at_forbidden_addresses(bad: Lab, family: int) -> None:
    for origin in everybody(bad):
        assert answerers(bad, origin, vip(21).of(family), 80) == {"web-1"}
        # In mode iptables, packets of the node to a VIP without endpoints are not changed.
        address = vip(22) if origin is bad.client else cluster_ip(22)
        assert origin.call(ask, address.of(family), 80).kind == REFUSED
    for name in ("mixed", "hopeless"):
        for i, address in enumerate(WRONG[family]):
            which = f"EndpointSlice default/{name}-{family}-0: endpoints[{i}].addresses[0]:"
            assert logged(bad, which, json.dumps(address)[1:-1], "left out") == 1
    assert metric(bad, 'bad_objects{kind="EndpointSlice",outcome="used_in_part"}') == 4


def test_a_vip_that_is_an_address_of_the_node(bad: Lab, family: int) -> None:
    """The Service is served at its port; other ports belong to the node itself and to NodePorts (spec/service-semantics
    §13).
    """
    address = bad.nodes[0].address
    assert answerers(bad, bad.client, address.of(family), 80) == {"host-node1"}
    since = write(bad, "on-node", *simple(bad, "on-node", 23, [port(80, 30023)], "web-2", vip=address))
    try:
        bad.wait_synced(since)
        for origin in everybody(bad):
            assert answerers(bad, origin, address.of(family), 80) == {"web-2"}
            assert answerers(bad, origin, address.of(family), 81) == {"host-node1"}
            assert answerers(bad, origin, address.of(family), 30023) == {"web-2"}
        which = "Service default/on-node: status.loadBalancer.ingress:"
        assert logged(bad, which, address.of(family), "is an address of Node node1") >= 1
        assert metric(bad, "service_addresses_of_nodes") == 2
    finally:
        (bad.manifests / "on-node.json").unlink()
    wait_until(lambda: metric(bad, "service_addresses_of_nodes") == 0, "the service is planned away", 60)
    wait_until(lambda: answerers(bad, bad.client, address.of(family), 80) == {"host-node1"}, "and out of the maps")


def test_one_node_port_and_one_address_of_two_services(bad: Lab, family: int) -> None:
    """The older Service has them; another protocol is another address; the other Service is served when the older one
    leaves (finding T1).
    """
    both: dict[str, Any] = {"externalIPs": list(SHARED)}
    old = simple(bad, "older", 25, [port(80, 30024)], "web-1", created="2024-01-01T00:00:00Z", **both)
    new = simple(bad, "newer", 24, [port(80, 30024)], "web-2", created="2024-02-01T00:00:00Z", **both)
    other = simple(bad, "other", 26, [port(80, 30024, "UDP")], "web-2", **both)
    # And one, older than all of them, that claims the ClusterIP and VIP of another.
    theft = [cluster_ip(20).v4, cluster_ip(20).v6, *vip(20)]
    thief = simple(bad, "thief", 27, [port(80)], "web-1", created="2020-01-01T00:00:00Z", externalIPs=theft)
    old[0]["metadata"]["creationTimestamp"] = "2024-01-01T00:00:00Z"
    before = metric(bad, "service_port_problems")
    written = {"newer": new, "other": other, "thief": thief, "older": old}
    node = bad.nodes[0].address.of(family)
    own = bad.pods["toolbox"].namespace
    try:
        for name, objects in written.items():
            bad.wait_synced(write(bad, name, *objects))
        for origin in everybody(bad):
            for address, number in ((SHARED.of(family), 80), (node, 30024)):
                assert answerers(bad, origin, address, number) == {"web-1"}
                assert answerers(bad, origin, address, number, "udp") == {"web-2"}
        assert answerers(bad, own, cluster_ip(24).of(family), 80) == {"web-2"}
        # Of two endpoints, 24 requests miss one once in eight million runs.
        assert answerers(bad, own, cluster_ip(20).of(family), 80, count=24) == {"web-1", "web-2"}
        # In each family: the address, the NodePort, and the two of the third Service.
        assert metric(bad, "service_port_problems") == before + 8
        lost = "is already used by Service default/older, not served there"
        assert logged(bad, "Service default/newer: spec.externalIPs:", SHARED.of(family), lost) >= 1
        assert logged(bad, "Service default/newer: spec.ports.nodePort: NodePort 30024/TCP", lost) >= 1
        assert logged(bad, "Service default/thief: spec.externalIPs:", cluster_ip(20).of(family), "default/good") >= 1
        said = answer(bad.nodes[0], "services", "newer")["notServed"]
        assert [each for each in said if SHARED.of(family) in each and lost in each], said
        assert answer(bad.nodes[0], "services", "older")["notServed"] == []
        warnings = [each["what"] for each in answer(bad.nodes[0], "status", status=1)["warnings"]]
        assert [each for each in warnings if "not served there; 1 other Service has such addresses" in each], warnings
        (bad.manifests / "older.json").unlink()
        wait_until(lambda: metric(bad, "service_port_problems") == before + 4, "the older one is gone", 60)
        for address, number in ((SHARED.of(family), 80), (node, 30024)):
            assert answerers(bad, bad.client, address, number) == {"web-2"}
    finally:
        for name in written:
            (bad.manifests / f"{name}.json").unlink(missing_ok=True)
    wait_until(lambda: metric(bad, "service_port_problems") == before, "all are gone", 60)


def test_an_older_tenants_external_ips_take_no_address_of_a_later_service(bad: Lab, family: int) -> None:
    """Its externalIPs claim what a later Service gets: its ClusterIP, its VIP, its NodePort on the node."""
    tenant = simple(
        bad, "first", 35, [port(80), Port("n", 30036, 8080)], "web-1", created="2020-01-01T00:00:00Z",
        externalIPs=[*cluster_ip(36), *vip(36), *bad.nodes[0].address],
    )  # fmt: skip
    for made in tenant:
        made["metadata"]["namespace"] = "tenant"
    later = simple(bad, "later", 36, [port(80, 30036)], "web-2", created="2024-01-01T00:00:00Z", vip=vip(36))
    before = metric(bad, "service_port_problems")
    asked = [(cluster_ip(36), 80), (vip(36), 80), (bad.nodes[0].address, 30036)]
    try:
        bad.wait_synced(write(bad, "tenant", *tenant))
        assert answerers(bad, bad.client, vip(36).of(family), 80) == {"web-1"}
        bad.wait_synced(write(bad, "later", *later))
        for origin in everybody(bad):
            for address, number in asked:
                if origin is not bad.client or address != cluster_ip(36):
                    assert answerers(bad, origin, address.of(family), number) == {"web-2"}
        # In each family: the ClusterIP, the VIP, the NodePort on the node's address.
        assert metric(bad, "service_port_problems") == before + 6
        which = "Service tenant/first: spec.externalIPs:"
        refused = "is NodePort 30036/TCP of Service default/later on Node node1: refused, not served there"
        assert logged(bad, which, bad.nodes[0].address.of(family), refused) >= 1
        assert logged(bad, which, f"{cluster_ip(36).of(family)}", "is already used by Service default/later") >= 1
    finally:
        for name in ("later", "tenant"):
            (bad.manifests / f"{name}.json").unlink(missing_ok=True)
    wait_until(lambda: metric(bad, "service_port_problems") == before, "all are gone", 60)


def test_a_service_that_names_65_792_addresses_and_ports_fills_no_map(bad: Lab, family: int) -> None:
    """256 externalIPs with 256 ports: its ClusterIP and its first externalIPs are served, and so are other Services."""
    ports = [Port(f"p{i}", 2000 + i, 8080, "TCP") for i in range(256)]
    first = int(ip_address(Dual("198.18.0.1", "2001:db8:4::1").of(family)))
    addresses = [str(type(ip_address(vip(20).of(family)))(first + i)) for i in range(256)]
    made = simple(bad, "big", 37, ports, "web-1", externalIPs=addresses)
    name = 'service_over_limit{namespace="default",service="big"}'
    own = bad.pods["toolbox"].namespace
    try:
        bad.wait_synced(write(bad, "big", *made))
        for address in (cluster_ip(37).of(family), addresses[0]):
            assert answerers(bad, own, address, 2255) == {"web-1"}
        assert metric(bad, name) == 1
        assert metric(bad, f'map_entries{{map="frontends{family}"}}') < 5000
        assert logged(bad, "Service default/big: spec.externalIPs: 256", "the first 8 are served") >= 1
    finally:
        (bad.manifests / "big.json").unlink()
    wait_until(lambda: name not in bad.nodes[0].agent.metrics(), "it is gone", 60)


def test_ranges_of_the_wrong_family_or_unreadable(bad: Lab, family: int) -> None:
    """Only ranges of the address's family restrict; malformed ones do not (spec/service-semantics §1.2, §7)."""
    elsewhere = {4: "192.0.2.128/25", 6: "2001:db8:ffff::/48"}
    ranges = {
        "foreign": [elsewhere[10 - family]],
        "broken": ["300.0.0.0/8", "10.0.0.0/33", "fd00::/200", "text"],
        "mixed-up": ["text", elsewhere[family]],
    }
    for number, (name, texts) in enumerate(ranges.items(), 28):
        made = simple(bad, name, number, [port()], "web-1", vip=vip(number), loadBalancerSourceRanges=texts)
        bad.wait_synced(write(bad, name, *made))
    try:
        assert answerers(bad, bad.client, vip(28).of(family), 80) == {"web-1"}
        assert answerers(bad, bad.client, vip(29).of(family), 80) == {"web-1"}
        assert bad.client.call(ask, vip(30).of(family), 80, timeout=DROPPED_AFTER).kind == TIMED_OUT
        other = bad.client.call(ask, vip(28).of(10 - family), 80, timeout=DROPPED_AFTER)
        assert other.kind == TIMED_OUT
        place = f"status.loadBalancer.ingress[{family // 2 - 2}].ip:"
        assert logged(bad, f"Service default/foreign: {place}", "accepts every source: no range of spec") >= 1
        for i, text in enumerate(ranges["broken"]):
            assert logged(bad, f"Service default/broken: spec.loadBalancerSourceRanges[{i}]:", text, "left out") >= 1
        assert metric(bad, 'bad_objects{kind="Service",outcome="used_in_part"}') == 3
    finally:
        for name in ranges:
            (bad.manifests / f"{name}.json").unlink()
    wait_until(lambda: metric(bad, 'bad_objects{kind="Service",outcome="used_in_part"}') == 0, "all are gone", 60)


def test_an_object_that_becomes_invalid_keeps_its_last_valid_state(bad: Lab, family: int) -> None:
    good = simple(bad, "turning", 31, [port()], "web-2", vip=vip(31))
    bad.wait_synced(write(bad, "turning", *good))
    broken = [json.loads(json.dumps(made)) for made in good]
    broken[0]["spec"]["ports"][0]["port"] = 70000
    write(bad, "turning", *broken)
    try:
        wait_until(lambda: metric(bad, 'bad_objects{kind="Service",outcome="refused"}') == 1, "it was refused", 60)
        assert logged(bad, "Service default/turning: spec.ports[0].port: 70000 is not a port", "good state stays") >= 1
        for origin in everybody(bad):
            assert answerers(bad, origin, vip(31).of(family), 80) == {"web-2"}
    finally:
        (bad.manifests / "turning.json").unlink()
    wait_until(lambda: metric(bad, 'bad_objects{kind="Service",outcome="refused"}') == 0, "it is gone", 60)


def test_300_ports_of_one_service(bad: Lab, family: int) -> None:
    ports = [Port(f"p{i}", 1000 + i, 8080, "TCP", 31000 + i) for i in range(PORTS)]
    bad.wait_synced(write(bad, "ports", *simple(bad, "ports", 32, ports, "web-1", vip=vip(32))))
    try:
        for number in (0, PORTS // 2, PORTS - 1):
            for origin in everybody(bad):
                assert answerers(bad, origin, vip(32).of(family), 1000 + number, count=3) == {"web-1"}
                assert answerers(bad, origin, bad.nodes[0].address.of(family), 31000 + number, count=3) == {"web-1"}
    finally:
        (bad.manifests / "ports.json").unlink()
    address, port_number = bad.nodes[0].address.of(family), 31000 + PORTS - 1
    wait_until(lambda: bad.client.call(ask, address, port_number).kind == REFUSED, "the ports are gone", 60)


def crowd(lab: Lab, family: int) -> list[Object]:
    """5 000 addresses where web-1 answers, and slices with them."""
    pod, network = lab.pods["web-1"], MANY_NETWORK[family]
    lab.nodes[0].namespace.ip(f"route add {network} via {pod.address.of(family)} dev {pod.device}")
    pod.namespace.ip(f"route add local {network} dev lo")
    addresses = many_addresses(family)
    return [a_slice("many", family, addresses[i : i + 100], [port()], part=i // 100) for i in range(0, MANY, 100)]


def many_addresses(family: int) -> list[str]:
    first = int(ip_address(MANY_NETWORK[family].partition("/")[0])) + 1
    return [str(ip_address(first + i)) for i in range(MANY)]


def disperse(lab: Lab, family: int) -> None:
    network = MANY_NETWORK[family]
    lab.nodes[0].namespace.ip(f"route del {network}")
    lab.pods["web-1"].namespace.ip(f"route del local {network} dev lo")


def test_5000_endpoints_of_one_service(bad: Lab, family: int) -> None:
    """In 50 slices, then with affinity, then with one endpoint again."""
    addresses = many_addresses(family)
    # In one family they are addresses of the pod network, in the other they are not.
    assert (family == 6) == (ip_address(addresses[0]) in ip_network(pod_cidr(1).of(family)))
    made = crowd(bad, family)
    target = vip(33).of(family)
    try:
        bad.wait_synced(write(bad, "many", a_service("many", 33, [port()], vip=vip(33)), *made))
        for origin in everybody(bad):
            outcomes = origin.call(ask_many, 30, target, 80)
            assert {outcome.kind for outcome in outcomes} == {ANSWERED}
            reached = {outcome.answer.local[0] for outcome in outcomes if outcome.answer}
            assert reached <= set(addresses)
            # 30 of 5 000 at random: fewer than 25 different ones occur once in ten million runs.
            assert len(reached) >= 25
        sticky = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
        bad.wait_synced(write(bad, "many", a_service("many", 33, [port()], vip=vip(33), **sticky), *made))
        outcomes = bad.client.call(ask_many, 10, target, 80, source=CLIENT.of(family))
        assert len({outcome.answer.local[0] if outcome.answer else str(outcome) for outcome in outcomes}) == 1
        assert metric(bad, "service_port_problems") == 0
        last = outcomes[0].answer
        assert last is not None
        # The remembered endpoint is removed, and with it a whole list.
        kept = next(address for address in reversed(addresses) if address != last.local[0])
        few = a_slice("many", family, [kept], [port()])
        bad.wait_synced(write(bad, "many", a_service("many", 33, [port()], vip=vip(33), **sticky), few))
        outcome = bad.client.call(ask, target, 80)
        assert outcome.answer is not None
        assert outcome.answer.local[0] == kept
    finally:
        (bad.manifests / "many.json").unlink()
        disperse(bad, family)
    wait_until(lambda: bad.client.call(ask, target, 80, timeout=1).kind != ANSWERED, "the service is gone", 60)
