# SPDX-License-Identifier: Apache-2.0
"""Tools that find and report differences of flows: the reducer, random objects, SCTP packets that tests build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.flows import sctp
from tests.flows.differences import difference
from tests.flows.flow import DROPPED, Flow, Ground, Seen
from tests.flows.generated import scenarios
from tests.flows.objects import End, Port, Svc
from tests.flows.reduce import as_code, reduce
from tests.flows.scenarios import MODES, Scenario, all_scenarios
from tests.flows.world import Silence, with_evidence
from tests.kernels import report
from tests.kernels.guest import Outcome
from tests.kernels.image import Kernel


def test_a_failure_is_reduced_to_its_causes() -> None:
    """It fails while some service has a terminating endpoint and affinity under masqueradeAll."""

    def fails(scenario: Scenario) -> bool:
        return bool(scenario.config.get("masqueradeAll")) and any(
            service.spec.get("sessionAffinity") and any(end.terminating for ends in service.ends for end in ends)
            for service in scenario.services
        )

    guilty = Svc(
        "guilty",
        3,
        [[End("local-1"), End("remote-1", ready=False, terminating=True, zones=("zone-a",))], [End("local-2")]],
        [Port(80, name="web", node_port=30000), Port(53, "UDP", name="dns")],
        spec={"sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local"},
    )
    others = [Svc(f"other-{number}", number, [[End("local-1")]]) for number in range(4)]
    found = reduce(Scenario("it", [*others, guilty], {"masqueradeAll": True, "clusterCIDR": "::/0"}), fails, 60)
    assert fails(found)
    (service,) = found.services
    assert found.config == {"masqueradeAll": True}
    assert service.ends == [[End("remote-1", terminating=True)]]
    assert service.spec == {"sessionAffinity": "ClientIP"}
    assert len(service.ports) == 1
    assert not service.external
    assert not service.load_balancer
    names = {"Scenario": Scenario, "Svc": Svc, "End": End, "Port": Port}
    assert eval(as_code(found), names) == found


def test_t2_an_outcome_that_was_seen_once_counts() -> None:
    """A lost answer can be chance. A wrong endpoint cannot, however rare it is (finding T2)."""
    right, wrong = "local-1:8080 <- client", "remote-1:8080 <- node"
    assert with_evidence(Seen.of([right, wrong]), Seen.of([right])) == Seen.of([right, wrong])
    assert with_evidence(Seen.of([DROPPED, right]), Seen.of([right])) == Seen.of([right])
    assert with_evidence(Seen.of([DROPPED]), Seen.of([DROPPED])) == Seen.of([DROPPED])
    assert with_evidence(Seen.of(["refused (RST)"]), Seen.of([right])) == Seen.of(["refused (RST)", right])


def test_t2_a_busy_machine_may_lose_one_answer_in_fifty() -> None:
    assert not Silence(1000, 20).too_much(50)
    assert Silence(1000, 21).too_much(50)
    assert Silence(0, 0).too_much(50)  # no request was made
    assert not Silence(2000, 60).is_more_than(Silence(1000, 20))
    assert Silence(2000, 61).is_more_than(Silence(1000, 20))


def test_t9_a_difference_explains_only_its_own_outcomes() -> None:
    """An excuse needs its mode, its policy and both of its outcomes (finding T9)."""
    flow = Flow("node1", "NodePort:30080 on 127.0.0.1", "127.0.0.1", 30080, "tcp", local=True)
    ground = Ground("iptables", {"clusterCIDR": "0.0.0.0/1,::/0"})
    lost, served = Seen.of([DROPPED]), Seen.of(["local-1:8080 <- node"])
    name = "NodePorts on loopback of a node in the range of pods"
    assert difference(flow, ground, lost, served) == name
    assert difference(flow, ground._replace(config={"detectLocalMode": "ClusterCIDR", **ground.config}), lost, served)
    itself = "host-node1:8080 <- node"
    assert difference(flow, ground, Seen.of([DROPPED, itself]), Seen.of(["local-1:8080 <- node", itself])) == name
    assert difference(flow, ground, Seen.of([DROPPED, itself]), served) is None
    assert difference(flow, ground, Seen.of([itself]), served) is None
    assert difference(flow, ground, lost, Seen.of(["refused"])) is None
    assert difference(flow, ground, lost, Seen.of(["local-1:8080 <- node", DROPPED])) is None
    assert difference(flow._replace(what="VIP:80"), ground, lost, served) is None


@pytest.mark.parametrize(
    ("local", "mode", "config"),
    [
        (False, "iptables", {"clusterCIDR": "0.0.0.0/1,::/0"}),
        (True, "nftables", {"clusterCIDR": "0.0.0.0/1,::/0"}),
        (True, "iptables", {"clusterCIDR": "10.244.0.0/16"}),
        (True, "iptables", {"clusterCIDR": "192.0.0.0/8,::/0"}),
        (True, "iptables", {"clusterCIDR": "0.0.0.0/1,::/0", "detectLocalMode": "NodeCIDR"}),
        (True, "iptables", {}),
    ],
)
def test_t9_a_loss_on_loopback_is_explained_only_within_the_pages_limits(
    local: bool, mode: str, config: dict[str, str]
) -> None:
    flow = Flow("node1", "NodePort:30080 on 127.0.0.1", "127.0.0.1", 30080, "tcp", local=local)
    assert difference(flow, Ground(mode, config), Seen.of([DROPPED]), Seen.of(["local-1:8080 <- node"])) is None


def test_t9_the_other_differences_apply_only_in_their_mode() -> None:
    datagram = Flow("node1", "a by NodePort:53", "192.0.2.10", 30053, "udp", local=True)
    lost, refused = Seen.of([DROPPED]), Seen.of(["refused"])
    assert difference(datagram, Ground("iptables", {}), lost, refused) == "datagrams to NodePorts of the node itself"
    assert difference(datagram, Ground("nftables", {}), lost, refused) is None
    assert difference(datagram._replace(local=False), Ground("iptables", {}), lost, refused) is None
    hairpin = Flow("local-1", "a by ClusterIP:80", "10.96.0.10", 80, "tcp")
    served = Seen.of(["local-1:8080 <- node"])
    name = "a pod that calls itself and is placed nowhere"
    assert difference(hairpin, Ground("nftables", {}), lost, served) == name
    assert difference(hairpin, Ground("iptables", {}), lost, served) is None


def test_t11_a_suite_of_a_guest_that_left_no_results_has_failed(tmp_path: Path) -> None:
    """Also with exit status 1 or 0 (finding T11)."""
    (tmp_path / "probe.json").write_text("{}")
    (tmp_path / "start.status").write_text("1")
    (tmp_path / "load.status").write_text("0")
    kernel = Kernel("6.12", "6.12.1", tmp_path, tmp_path)
    row = report.read(kernel, Outcome("", "", 1.0), tmp_path, {"start", "load", "sctp"})
    assert row.suites["start"].failed == ["no results, though pytest ended with exit status 1"]
    assert row.suites["load"].failed == ["no results, though pytest ended with exit status 0"]
    assert row.suites["sctp"].failed == ["it was to run and did not"]
    assert row.failed
    assert "netem" not in row.suites


def test_a_reducer_without_time_changes_nothing() -> None:
    scenario = Scenario("it", [Svc("a", 1), Svc("b", 2)])
    assert reduce(scenario, lambda _: True, 0) == scenario


def test_random_objects_have_no_undefined_duplicates() -> None:
    """If several slices have an endpoint, it is in one state, or once terminating and once not."""
    seen = 0
    for seed in range(60):
        for scenario in scenarios(seed, "iptables", 3):
            for service in scenario.services:
                places: dict[tuple[str, bool], set[int]] = {}
                states: dict[tuple[str, bool], set[str]] = {}
                for at, ends in enumerate(service.ends):
                    for end in ends:
                        key = end.pod, bool(end.terminating)
                        places.setdefault(key, set()).add(at)
                        states.setdefault(key, set()).add(repr(end))
                for key, where in places.items():
                    seen += len(where) > 1
                    assert len(where) == 1 or len(states[key]) == 1, service
    assert seen > 20


def test_the_same_seed_makes_the_same_objects() -> None:
    assert list(map(repr, scenarios(7, "nftables", 4))) == list(map(repr, scenarios(7, "nftables", 4)))
    assert list(map(repr, scenarios(7, "nftables", 4))) != list(map(repr, scenarios(8, "nftables", 4)))


def test_the_checksum_of_sctp_is_that_of_the_rfc() -> None:
    """The check value of CRC-32C (iSCSI)."""
    assert sctp.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("family", [4, 6])
def test_an_answer_is_read_only_by_its_receiver(family: int) -> None:
    flow = Flow("client", "it", "::1" if family == 6 else "127.0.0.1", 36412, "sctp")
    port, packet = sctp.init(flow.port)
    assert sctp.is_whole(packet)
    assert sctp.has_ports(packet[:8], port, flow.port)
    assert not sctp.has_ports(packet[:8], port + 1, flow.port)
    assert not sctp.has_ports(packet[:8], port, flow.port + 1)
    header = b"" if family == 6 else b"\x45" + bytes(19)
    cookie = b'{"pod": "a"}'
    body = sctp._INIT.pack(1, 65536, 1, 1, 1) + (7).to_bytes(2) + (4 + len(cookie)).to_bytes(2) + cookie
    reply = sctp.packet(flow.port, port, port + 1, sctp.INIT_ACK, body)
    assert sctp.answer(header + reply, flow, port) == cookie
    assert sctp.answer(header + reply, flow, port + 1) is None
    broken = reply[:-1] + bytes([reply[-1] ^ 1])
    assert sctp.answer(header + broken, flow, port) is None
    assert sctp.answer(header + sctp.packet(flow.port, port, port + 1, sctp.ABORT), flow, port) == b""
    assert sctp.answer(header + sctp.packet(flow.port, port, 0, sctp.INIT_ACK, body), flow, port) is None


def test_every_rule_names_flows_that_exist_and_every_scenario_shows_a_rule() -> None:
    """The table of docs/parity.md, by sections of spec/service-semantics."""
    text = (ROOT / "docs" / "parity.md").read_text()
    rows = re.findall(r"^\| (§.+) \| (`.+`) \|$", text.partition("\n## Which flows show which rule\n")[2], re.MULTILINE)
    names: dict[str, set[str]] = {}
    for mode in MODES:
        for scenario in all_scenarios(mode):
            names.setdefault(scenario.name, set()).update(flow.what for flow in scenario.flows())
    shown = set()
    for rule, flows in rows:
        for text in re.findall(r"`([^`]+)`", flows):
            # The name of a scenario may contain a colon too.
            found = max((name for name in names if text == name or text.startswith(f"{name}: ")), key=len, default="")
            assert found, f"{rule}: no scenario {text}"
            begin = text.removeprefix(found).removeprefix(": ")
            assert any(what.startswith(begin) for what in names[found]), f"{rule}: no flow {text}"
            shown.add(found)
    assert set(names) == shown
    for section, least in {"§5": 15, "§6": 4, "§7": 5, "§8": 3, "§9": 4, "§13": 6}.items():
        assert sum(rule.startswith(f"{section} ") for rule, _ in rows) >= least, section
