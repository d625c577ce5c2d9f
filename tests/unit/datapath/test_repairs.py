# SPDX-License-Identifier: Apache-2.0
"""How often the agent has restored what another program removed, and how ``status`` names it."""

from __future__ import annotations

from pyebpf_proxy.datapath.repairs import Repair, Repairs
from pyebpf_proxy.see import status


def test_only_the_last_minute_counts_as_recent() -> None:
    repairs = Repairs()
    assert set(repairs.view(0.0)["total"].values()) == {0}
    repairs.note(Repair.TC_PROGRAM, now=10.0)
    repairs.note(Repair.SOCKET_PROGRAM, 3, now=40.0)
    repairs.note(Repair.PINS, 0, now=40.0)
    assert repairs.view(69.0)["lastMinute"] == {"tc_program": 1, "socket_program": 3}
    assert repairs.view(71.0)["lastMinute"] == {"socket_program": 3}
    found = repairs.view(200.0)
    assert found["lastMinute"] == {}
    assert (found["total"]["tc_program"], found["total"]["socket_program"], found["total"]["pins"]) == (1, 3, 0)


def test_the_totals_count_more_than_what_is_remembered() -> None:
    """Another program may remove a program again and again."""
    repairs = Repairs()
    for number in range(5000):
        repairs.note(Repair.TC_PROGRAM, now=number / 1000)
    found = repairs.view(5.0)
    assert found["total"]["tc_program"] == 5000
    assert 1000 <= found["lastMinute"]["tc_program"] < 5000


def test_status_names_every_kind_of_repair() -> None:
    for kind in Repair:
        (once,) = status._about_repairs({"repairs": {"lastMinute": {str(kind): 1}}})
        (often,) = status._about_repairs({"repairs": {"lastMinute": {str(kind): 4}}})
        assert once.what.startswith("once in the last minute: another program removed or changed ")
        assert often.what.startswith("4 times in the last minute: ")
        assert once.remedy
    assert list(status._about_repairs({})) == list(status._about_repairs({"repairs": {"lastMinute": {}}})) == []
