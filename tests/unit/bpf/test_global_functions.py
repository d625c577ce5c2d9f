# SPDX-License-Identifier: Apache-2.0
"""Global functions of the BPF programs: those that are not static.

A kernel before Linux 6.8 verifies them even if no program calls them. They must read the setting before they refer to a
map that the setting can leave out.
"""

from __future__ import annotations

import re

import pytest

from pyebpf_proxy.datapath.loader.abilities import STORAGE_MAPS
from pyebpf_proxy.datapath.loader.programs import unused_maps
from tests.unit.bpf.sources import functions

#: Maps that a setting leaves out, without socket storage: only one function refers to each of those, and it reads the
#: setting.
MAPS = {
    "fast_path": unused_maps(0, True, False, True) - unused_maps(0, True, True, True),
    "pod_sockets": unused_maps(0, False, True, True) - unused_maps(0, True, True, True) - set(STORAGE_MAPS),
}
#: Bodies by name: of static functions, and of global ones.
STATIC = {each.name: each.body for each in functions() if each.static}
GLOBAL = {each.name: each.body for each in functions() if not each.static}


def first_use(body: str, maps: set[str], users: set[str]) -> int:
    """The position of the first use of one of these maps, or of a function that uses one; -1: none."""
    found = re.search(rf"&(?:{'|'.join(sorted(maps))})\b|\b(?:{'|'.join(sorted(users)) or '$'})\(", body)
    return found.start() if found else -1


def users_of(maps: set[str]) -> set[str]:
    """Static functions that use one of these maps, also through others."""
    users: set[str] = set()
    while True:
        more = {name for name, body in STATIC.items() if name not in users and first_use(body, maps, users) >= 0}
        if not more:
            return users
        users |= more


USES = [
    (name, setting, at)
    for setting, maps in MAPS.items()
    for name, body in GLOBAL.items()
    if (at := first_use(body, maps, users_of(maps))) >= 0
]


def test_global_functions_exist() -> None:
    assert {("open_young", "fast_path"), ("translate_for_pod", "pod_sockets")} <= {each[:2] for each in USES}


@pytest.mark.parametrize(("name", "setting", "at"), USES, ids=[f"{name}, {setting}" for name, setting, _ in USES])
def test_the_setting_is_read_before_the_map(name: str, setting: str, at: int) -> None:
    assert re.search(rf"if \(!settings\.{setting}\b", GLOBAL[name][:at])
