# SPDX-License-Identifier: Apache-2.0
"""One fault after the other, under load: the quick and reliable ones of ``python -m tests.faults``.

docs/reliability.md has all faults with measurements. Here nothing is measured: no connection may fail or break, the
fault must be named, and changes that happened meanwhile must be served afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from tests.faults import measure, of_node, of_process
from tests.faults.faults import FAULTS
from tests.faults.ground import MEANWHILE, SHOP, Ground, answers, wait_until
from tests.faults.measure import Fault, Outcome
from tests.support.damage import CannotBeMadeError
from tests.support.fast_lab import slowness
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.alone]

#: New connections a second, and per load in each part of a test: a slow machine manages them too.
RATE, CONNECTIONS = 900, 40


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """All faults on one node, one after the other."""
    with Ground() as made:
        yield made


def put(ground: Ground, name: str) -> Outcome:
    """Inject the fault under load; changes are reverted afterwards."""
    try:
        found = measure.run(ground, FAULTS[name], rate=RATE, count=CONNECTIONS)
    except CannotBeMadeError as error:
        ground.end_traffic()
        pytest.skip(str(error))
    except BaseException:
        ground.end_traffic()
        raise
    for file in ("meanwhile", "afterwards"):
        (ground.lab.manifests / f"{file}.yaml").unlink()
    wait_until(lambda: not ground.serves(MEANWHILE), "it is gone")
    assert (found.failed, found.how, found.lost) == (0, {}, 0), found
    assert found.change_right < measure.NEVER, found
    assert found.healed < measure.NEVER, found
    assert found.tried > CONNECTIONS
    return found


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("stopped", "does not respond"),
        ("killed", "the agent is not running"),
        ("memory", "the agent is not running"),
        ("disk-full", "cannot be written to: its file system is full"),
        ("read-only", "cannot be written to: it is read-only"),
        ("renamed", ""),
        ("uplink-renamed", ""),
        ("moved", ""),
        ("neighbours", ""),
        ("descriptors", "cannot be read: Too many open files"),
    ],
)
def test_no_connection_notices(ground: Ground, name: str, named: str) -> None:
    found = put(ground, name)
    assert any(named in text for text in (*found.status, *found.log)) or not named, found


def test_overrun_netlink_sockets_are_counted_without_failed_connections(ground: Ground) -> None:
    """The fault itself checks the kernel's count of dropped messages."""
    found = put(ground, "netlink")
    assert found.metrics.get("netlink_overruns: route", 0) > 0, found


@pytest.mark.parametrize("name", ["source-ports-udp", "source-ports-ipv6"])
def test_flows_without_a_source_port_are_counted_and_named(ground: Ground, name: str) -> None:
    found = put(ground, name)
    assert found.metrics["conntrack_refusals: insert_failed"] >= 20, found
    assert any("conntrack refused a new flow whose ports are in use" in text for text in found.status), found


def test_flushed_rules_are_restored_at_once(ground: Ground) -> None:
    """Triggered by a notification, as the log reports, and not by the next sync up to half a minute later."""

    def logged() -> int:
        return len(Log(ground.proxy.complaints()).lines(Message.TABLE_RESTORED))

    before = logged()
    with of_node.rules_flushed(ground):
        wait_until(lambda: of_node.has_rules(ground), "the table is back")
    # The log line comes after the table.
    wait_until(lambda: logged() > before, "the agent logs it")
    assert logged() == before + 1
    assert_named(ground, "the nftables table", {"nftables_table": 1})


def test_rules_flushed_while_there_are_no_descriptors_are_restored_when_there_are(ground: Ground) -> None:
    """libnftables ends the process if it gets no socket. The next sync may be half a minute away."""
    agent = ground.proxy.pid
    log = Log(ground.node.agent).from_now()
    with of_process.no_descriptors(ground), of_node.rules_flushed(ground):
        log.wait("the nftables table could not be restored, will retry")
        assert not of_node.has_rules(ground)
    wait_until(lambda: of_node.has_rules(ground), "the table is back", 5.0 * slowness())
    assert ground.proxy.pid == agent
    ground.node.namespace.call(answers, cluster_ip(SHOP), 80)


def test_detached_socket_programs_are_restored_within_a_second(ground: Ground) -> None:
    """The next sync, which repairs everything, may be half a minute away."""
    log = Log(ground.node.agent).from_now()
    with of_node.sockets_detached(ground):
        assert not of_node.has_socket_programs(ground)
        wait_until(lambda: of_node.has_socket_programs(ground), "the programs are back", 5.0 * slowness())
    log.wait(Message.SOCKET_PROGRAMS_ATTACHED_AGAIN)
    assert_named(ground, "socket programs", {"socket_program": 8})
    assert ground.node.namespace.call(answers, cluster_ip(SHOP), 80)


def test_detached_tc_programs_are_restored_counted_and_named(ground: Ground) -> None:
    log = Log(ground.node.agent).from_now()
    with of_node.programs_detached(ground):
        wait_until(lambda: of_node.has_programs(ground), "the programs are back")
    log.wait("attaching it again")
    assert_named(ground, "tc programs", {"tc_program": 5})


def assert_named(ground: Ground, what: str, at_least: dict[str, int]) -> None:
    """The agent has counted these repairs, and ``status`` names them."""
    metrics = measure.reasons(ground)
    assert all(metrics[f"repairs: {name}"] >= count for name, count in at_least.items()), metrics
    assert any(f"another program removed or changed {what}" in text for text in ground.status()), ground.status()


def test_the_fast_path_opens_again_when_descriptors_are_available(ground: Ground) -> None:
    """No event reports it: rules that could not be read are read again."""

    def closed() -> bool:
        page = ground.proxy.metrics()
        return bool(re.search(r"^pyebpf_proxy_fast_path_closed\{.*\} 1", page, re.MULTILINE))

    wait_until(lambda: not closed(), "the fast path is open")
    log = Log(ground.node.agent).from_now()
    with of_process.no_descriptors(ground):
        # A foreign rule makes the agent read the rules, which fails.
        ground.node.namespace.run("nft", "add", "table", "inet", "foreign")
        log.wait("iptables-legacy could not be read")
    wait_until(lambda: not closed(), "the fast path is open again")


def test_every_fault_has_words_and_a_reason_where_kube_proxy_is_left_out() -> None:
    for fault in FAULTS.values():
        assert isinstance(fault, Fault)
        assert fault.words
        assert fault.once or fault.seconds
