# SPDX-License-Identifier: Apache-2.0
"""Which of the kernel's messages about neighbours invalidate the known link addresses."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from pyebpf_proxy.datapath.node.neighbours import Neighbours
from tests.netns.attach.router import Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

ADDRESS = {4: "192.0.2.7", 6: "2001:db8::7"}
FIRST, SECOND = "02:00:00:00:00:01", "02:00:00:00:00:02"
#: From one entry to another: whether the old one would send frames to the wrong address.
STEPS = {
    "a new one": ("", f"lladdr {FIRST} nud reachable", False),
    "another link address": (f"lladdr {FIRST} nud reachable", f"lladdr {SECOND} nud reachable", True),
    "the same, for ever": (f"lladdr {FIRST} nud reachable", f"lladdr {FIRST} nud permanent", False),
    "stale": (f"lladdr {FIRST} nud reachable", f"lladdr {FIRST} nud stale", False),
    "no answer": (f"lladdr {FIRST} nud reachable", f"lladdr {FIRST} nud failed", True),
    "taken out": (f"lladdr {FIRST} nud reachable", "", True),
}


@pytest.fixture
def neighbours(shell: Shell) -> Iterator[Neighbours]:
    shell("ip link add v0 type veth peer name v1; ip link set v1 up; ip link set v0 up")
    # A device without addresses has no neighbours, so no other message comes first.
    found = Neighbours()
    yield found
    found.close()


def reported(neighbours: Neighbours) -> bool:
    """What can be read now: the kernel sends the message before `ip` ends."""
    assert select.select([neighbours], [], [], 30.0)[0], "no message came"
    return neighbours.read()


@pytest.mark.parametrize("step", STEPS)
def test_neighbour_changes_that_matter(neighbours: Neighbours, shell: Shell, family: int, step: str) -> None:
    before, after, counts = STEPS[step]
    if before:
        shell(f"ip neigh replace {ADDRESS[family]} {before} dev v0")
        assert not reported(neighbours)
    verb = f"replace {ADDRESS[family]} {after}" if after else f"del {ADDRESS[family]}"
    shell(f"ip neigh {verb} dev v0")
    assert reported(neighbours) == counts


def test_existing_neighbours_are_known(neighbours: Neighbours, shell: Shell, family: int) -> None:
    shell(f"ip neigh replace {ADDRESS[family]} lladdr {FIRST} dev v0 nud permanent")
    later = Neighbours()
    try:
        shell(f"ip neigh replace {ADDRESS[family]} lladdr {SECOND} dev v0 nud permanent")
        assert reported(later)
    finally:
        later.close()


def test_lost_neighbour_messages_count_as_a_change(neighbours: Neighbours, shell: Shell) -> None:
    """More messages than the socket has room for; the relevant one is lost."""
    shell(f"ip neigh replace 192.0.2.7 lladdr {FIRST} dev v0 nud permanent")
    assert not reported(neighbours)
    lines = (f"neigh replace 10.{n >> 8}.{n & 255}.1 lladdr {FIRST} dev v0 nud permanent" for n in range(900))
    shell("ip -batch - <<'END'\n" + "\n".join(lines) + "\nEND")
    shell("ip neigh del 192.0.2.7 dev v0")
    assert reported(neighbours)
    assert not select.select([neighbours], [], [], 0)[0]
