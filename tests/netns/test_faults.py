# SPDX-License-Identifier: Apache-2.0
"""One fault after the other, under load: what of ``python -m tests.faults`` is quick and certain.

docs/reliability.md has all faults, with figures. Here nothing is measured: no connection fails, none breaks, the fault
is named, and what changed meanwhile is served afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.faults import faults, measure
from tests.faults.faults import FAULTS
from tests.faults.ground import MEANWHILE, Ground, wait_until
from tests.faults.measure import Fault, Outcome
from tests.support.damage import CannotBeMadeError
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.alone]

#: New connections a second, and of each load in each part of a test: a slow machine makes them, too.
RATE, CONNECTIONS = 900, 40


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """All faults on one node, one after the other."""
    with Ground() as made:
        yield made


def put(ground: Ground, name: str) -> Outcome:
    """The fault under load; what changed meanwhile is taken back."""
    try:
        found = measure.run(ground, FAULTS[name], rate=RATE, count=CONNECTIONS)
    except CannotBeMadeError as error:
        ground.end_traffic()
        pytest.skip(str(error))
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
        ("disk-full", ""),
        ("read-only", ""),
        ("renamed", ""),
        ("neighbours", ""),
        ("descriptors", "cannot be read: Too many open files"),
    ],
)
def test_no_connection_notices(ground: Ground, name: str, named: str) -> None:
    found = put(ground, name)
    assert any(named in text for text in (*found.status, *found.log)) or not named, found


def test_rules_that_are_flushed_are_back_at_once(ground: Ground) -> None:
    """By a notification, which is what the line says, and not at the next sync, up to half a minute later."""

    def said() -> int:
        return len(Log(ground.proxy.complaints()).lines(Message.TABLE_RESTORED))

    before = said()
    with faults.rules_flushed(ground):
        wait_until(lambda: faults.has_rules(ground), "the table is back")
    # The line follows the table.
    wait_until(lambda: said() > before, "the agent logs it")
    assert said() == before + 1


def test_the_fast_path_opens_again_when_there_are_descriptors_again(ground: Ground) -> None:
    """No event tells of it: rules that could not be read are read again."""

    def closed() -> bool:
        page = ground.proxy.metrics()
        return bool(re.search(r"^pyebpf_proxy_fast_path_closed\{.*\} 1", page, re.MULTILINE))

    wait_until(lambda: not closed(), "the fast path is open")
    log = Log(ground.node.agent).from_now()
    with faults.no_descriptors(ground):
        # Somebody's rule: the rules are read, which fails.
        ground.node.namespace.run("nft", "add", "table", "inet", "somebodys")
        log.wait("iptables-legacy could not be read")
    wait_until(lambda: not closed(), "the fast path is open again")


def test_every_fault_has_words_and_a_reason_where_kube_proxy_is_left_out() -> None:
    for fault in FAULTS.values():
        assert isinstance(fault, Fault)
        assert fault.words
        assert fault.once or fault.seconds
