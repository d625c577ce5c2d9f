# SPDX-License-Identifier: Apache-2.0
"""The division of CPU time among those who owe some, compared with a calculation in small steps."""

from __future__ import annotations

import random

import pytest

from pyebpf_proxy.servers.fair_clock import Debtor, FairClock


def in_steps(charges: list[tuple[float, int, float]], rate: float, end: float, step: float = 0.0005) -> list[float]:
    """What each member owes at the end, if all debtors are given equal parts in each step."""
    debts = [0.0] * (1 + max(who for _, who, _ in charges))
    left = sorted(charges, reverse=True)
    now = 0.0
    while now < end:
        while left and left[-1][0] <= now:
            _, who, used = left.pop()
            debts[who] += used
        debtors = [who for who, debt in enumerate(debts) if debt > 0]
        for who in debtors:
            debts[who] -= rate * step / len(debtors)
        now += step
    return [max(0.0, debt) for debt in debts]


@pytest.mark.parametrize("seed", range(5))
def test_debtors_are_given_equal_parts(seed: int) -> None:
    chance = random.Random(seed)
    charges = sorted((chance.uniform(0, 8), chance.randrange(5), chance.uniform(0.01, 0.3)) for _ in range(50))
    clock, members = FairClock(0.5), [Debtor() for _ in range(5)]
    clock.time(0.0)
    for now, who, used in charges:
        clock.charge(members[who], used, now)
    owed = [clock.debt(member, 9.0) for member in members]
    assert owed == pytest.approx(in_steps(charges, 0.5, 9.0), abs=0.02)
    assert sum(owed) > 0.5


def test_the_wait_is_over_when_it_was_said() -> None:
    clock, one, other = FairClock(0.1), Debtor(), Debtor()
    clock.charge(one, 1.0, 0.0)
    clock.charge(other, 3.0, 0.0)
    assert clock.wait(1.0) == pytest.approx(20.0)
    assert clock.debt(one, 20.0) == pytest.approx(0.0)
    assert clock.wait(clock.debt(other, 20.0)) == pytest.approx(20.0)
    assert clock.debt(other, 40.0) == pytest.approx(0.0)


def test_members_of_a_member_have_equal_parts_of_its_part() -> None:
    clock = FairClock(0.1)
    network, host = Debtor(), Debtor()
    inner, addresses = FairClock(parent=clock), [Debtor(), Debtor()]
    inner.time(0.0)
    clock.charge(host, 5.0, 0.0)
    for address in addresses:
        inner.charge(address, 1.0, 0.0)
        clock.charge(network, 1.0, 0.0)
    assert inner.wait(1.0) == pytest.approx(40.0)
    assert inner.debt(addresses[0], 20.0) == pytest.approx(0.5)
    assert clock.debt(network, 40.0) == pytest.approx(0.0)
    assert [inner.debt(address, 40.0) for address in addresses] == pytest.approx([0.0, 0.0])


def test_those_who_are_forgotten_leave_nothing() -> None:
    """Also while the virtual time hardly passes: one that owes much, and ever new ones."""
    clock = FairClock(0.1)
    clock.charge(Debtor(), 1000.0, 0.0)
    for number in range(10_000):
        member = Debtor()
        clock.charge(member, 0.5, number * 0.001)
        clock.remove(member)
        clock.remove(member)
    assert clock.debtors == 1
    assert len(clock._queue) < 100
