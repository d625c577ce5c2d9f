# SPDX-License-Identifier: Apache-2.0
"""Every program with every setting that changes what the verifier reads: each must load if all together do.

Verifiers differ: some verify functions that are never called, and reject maps that do not exist then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS, Loaded, Settings, load
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.see.doctor import loading

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]

SIZES = dict.fromkeys(("flows", "backends4", "backends6", "frontends4", "frontends6", "slots"), 64)
FAST: dict[str, Any] = {"fast_path": True, "snat_port_min": 1024, "snat_port_max": 32767}
ALL = {**FAST, "pod_sockets": True, "xdp": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no lookup": {"conntrack_lookup": False},
    "nft mode": {"nft_mode": True, "masquerade_all": True, "localhost_node_ports": True},
    "cidr": {**FAST, "detector4": 1, "detector6": 1},
    "device": {**FAST, "detector4": 2, "detector6": 2},
    "datagrams": {"mark_datagrams": True},
    "pods": {"pod_sockets": True},
    "fast": {"fast_path": True},
    "fast, no lookup": {**FAST, "conntrack_lookup": False},
    "weak memory": {**ALL, "weak_memory": True},
    "generic xdp": {**FAST, "xdp": True, "xdp_generic": True},
    **{f"scheduler {number}": {**FAST, "scheduler": number} for number in sorted(set(SCHEDULERS.values()))},
    # 8 is lblcr.
    "everything": {**ALL, "conntrack_lookup": False, "weak_memory": True, "scheduler": SCHEDULERS["lblcr"]},
}


@pytest.fixture(scope="module")
def best() -> Iterator[Loaded]:
    """What this kernel supports of everything; conntrack's modules are loaded with the table, as for the agent."""
    table = Table("settings_load")
    table.ensure(Behaviour(masquerade_mark=0x4000))
    try:
        loaded = load(Settings(netns_cookie=1, **ALL), sizes=SIZES)
        yield loaded
        loaded.close()
    finally:
        table.remove()


def test_no_program_is_refused(best: Loaded) -> None:
    """With all capabilities. Every kernel that these suites name supports everything."""
    assert not best.refusals


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_loads_like_all_together(best: Loaded, bpf_objects: Path, name: str) -> None:
    wanted = SETTINGS[name]
    loaded = load(Settings(netns_cookie=1, **wanted), sizes=SIZES, objects=bpf_objects)
    try:
        assert loaded.refusals.keys() <= best.refusals.keys(), loaded.refusals
        if "conntrack lookup" not in best.refusals:
            assert loaded.settings.conntrack_lookup == wanted.get("conntrack_lookup", True)
    finally:
        loaded.close()


@pytest.mark.parametrize("attempt", loading.ATTEMPTS, ids=lambda attempt: attempt[0])
def test_doctor_finds_the_same(best: Loaded, attempt: tuple[str, str, dict[str, int], str, str]) -> None:
    name, _, settings, program, _ = attempt
    named = {"socketLB: all": "sockets of pods"}
    refused = named.get(name, name) in best.refusals
    with pytest.raises(BpfError) if refused else nullcontext():
        loading.attempt(program, settings)
