# SPDX-License-Identifier: Apache-2.0
"""Every program with every setting that changes what the verifier reads: each must load as one with all of them does.

Verifiers differ: some read a function by itself although nobody calls it, and refuse maps that are not made then.
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
from pyebpf_proxy.see import loading

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]

SIZES = dict.fromkeys(("flows", "backends4", "backends6", "frontends4", "frontends6", "slots"), 64)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"nft_mode": True, "masquerade_all": True, "localhost_node_ports": True},
    {"detector4": 1, "detector6": 1},
    {"mark_datagrams": True},
    {"pod_sockets": True},
    {"fast_path": True},
    {"xdp": True},
    {"xdp": True, "xdp_generic": True, "fast_path": True},
    {"direct_lane": False},
    {"direct_lane": False, "fast_path": True, "xdp": True},
    {"direct_lane": False, "conntrack_lookup": False},
    *({"scheduler": number} for number in sorted(set(SCHEDULERS.values()))),  # 8: lblcr
    {"scheduler": SCHEDULERS["lblcr"], "pod_sockets": True, "fast_path": True, "xdp": True},
)


@pytest.fixture(scope="module")
def best() -> Iterator[Loaded]:
    """What this kernel carries of everything; conntrack's modules come with the table, as for the agent."""
    table = Table("guest_load")
    table.ensure(Behaviour(masquerade_mark=0x4000))
    try:
        loaded = load(Settings(netns_cookie=1, pod_sockets=True, fast_path=True, xdp=True), sizes=SIZES)
        yield loaded
        loaded.close()
    finally:
        table.remove()


@pytest.mark.parametrize(
    "wanted", SETTINGS, ids=lambda wanted: " ".join(f"{name}-{int(wanted[name])}" for name in wanted) or "plain"
)
def test_each_setting_loads_as_all_together_do(best: Loaded, bpf_objects: Path, wanted: dict[str, Any]) -> None:
    loaded = load(Settings(netns_cookie=1, **wanted), sizes=SIZES, objects=bpf_objects)
    try:
        assert loaded.lane == (best.lane if wanted.get("direct_lane", True) else "netfilter"), loaded.why
        assert loaded.settings.conntrack_lookup == wanted.get("conntrack_lookup", True), loaded.why
        if wanted.get("pod_sockets"):
            assert bool(loaded.why_not_pods) == bool(best.why_not_pods), loaded.why_not_pods
        if wanted.get("fast_path"):
            assert bool(loaded.why_not_fast) == bool(best.why_not_fast), loaded.why_not_fast
        if wanted.get("xdp") and (loaded.lane == "direct" or loaded.settings.fast_path):
            assert bool(loaded.why_not_xdp) == bool(best.why_not_xdp), loaded.why_not_xdp
    finally:
        loaded.close()


@pytest.mark.parametrize("attempt", loading.ATTEMPTS, ids=lambda attempt: attempt[0])
def test_doctor_finds_the_same(best: Loaded, attempt: tuple[str, str, dict[str, int], str, str]) -> None:
    name, _, settings, program, _ = attempt
    refused = {
        "direct lane": best.lane != "direct",
        "socketLB: all": bool(best.why_not_pods),
        "fast path": bool(best.why_not_fast),
    }
    with pytest.raises(BpfError) if refused.get(name) else nullcontext():
        loading.attempt(program, loading.in_lane(name, settings, best.lane == "direct"))
