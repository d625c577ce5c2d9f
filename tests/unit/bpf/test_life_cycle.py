# SPDX-License-Identifier: Apache-2.0
"""The life of a flow (life_cycle.py): every reachable state of the model, and whether the model matches the
programs.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.bpf import life_cycle
from tests.unit.bpf.sources import functions

MODEL = Path(life_cycle.__file__)
#: What is left out for a search of some seconds, and the minimum number of states. life_cycle.py itself leaves out
#: nothing and takes a minute.
PARTS = {
    "how connections end": (("draining", "dies", "rule", "ODD"), 80_000),
    "the agent dies and starts again": (("draining", "rule", "FORGED", "FIN"), 80_000),
    "rules change, and the table is drained": (("dies", "FORGED", "ODD", "FIN"), 50_000),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_state_satisfies_the_invariants(part: str) -> None:
    without, least = PARTS[part]
    assert life_cycle.explore(without=without) > least


def test_a_forged_reset_on_a_flow_that_one_side_has_closed_ends_it() -> None:
    """docs/fast-path.md names this limit. The search finds it, so it would find similar ones."""
    with pytest.raises(life_cycle.Broken, match="a live connection is lost"):
        life_cycle.explore(forged_twice=True, without=("draining", "dies", "rule", "ODD"))


# Changes of the model, as a developer might change the programs, and which property they violate.
MUTANTS = {
    "promoted before conntrack has it": (
        '(("create",) if found else',
        '(("promote", True) if found else',
        "lost|untranslated|does not have",
    ),
    "a FIN of one side is enough to be swept": (
        "(there.closing and reply.closing)",
        "(there.closing or reply.closing)",
        "lost",
    ),
    "a rule voids no permit": ("denied=True, permit=False", "denied=True", "a permit is used"),
    "counted after it can be found": (
        'yield state._replace(count=state.count + 1), ("insert there", side, kind)',
        'yield state._replace(count=state.count + 2), ("insert there", side, kind)',
        "counted that is not there",
    ),
    "an entry is forgotten and the flow is not counted out": (
        "yield state._replace(count=max(state.count - 1, 0)), after(side, kind, then)",
        "yield state, after(side, kind, then)",
        "counted that is not there",
    ),
    "any RST ends the flow": (
        '"DATA" if kind == "FORGED" else kind)',
        '"DATA" if kind == "FORGED" else kind) if kind != "FORGED" else ("forget", side, "DATA", "")',
        "lost|untranslated",
    ),
    "a stale entry of a young flow is swept": (
        "entry is not None and not entry.young and state.alive",
        "entry is not None and state.alive",
        "lost|untranslated|counted",
    ),
    "a forged RST is not noted": ("state._replace(restore=RESTORE) if both", "state if both", "lost"),
    "a restoration is requested once": ("RESTORING if state.restore == RESTORE else 0", "0", "lost"),
    "an endpoint's packet for the kernel continues": (
        "yield after, None  # DROP_AWAITING_PROMOTION",
        "yield to_netfilter(after, side, 'DATA', False), None",
        "untranslated",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_each_mutant(name: str) -> None:
    old, new, what = MUTANTS[name]
    source = MODEL.read_text()
    assert source.count(old) == 1
    changed = types.ModuleType("life_cycle_changed")
    sys.modules["life_cycle_changed"] = changed
    try:
        exec(compile(source.replace(old, new), str(MODEL), "exec"), changed.__dict__)
        with pytest.raises(changed.Broken, match=what):
            changed.explore(without=("draining",))
    finally:
        del sys.modules["life_cycle_changed"]


# The accesses of each function, in the order of the model's steps.
ORDER = {
    "permit.h:read_permit": ["&permits", "->permit_generation"],
    "young.h:open_young": ["why_not_young(", "read_permit(", "insert_young("],
    "young.h:insert_young": [
        "bpf_map_update_elem(&flows, &d->reply_key, &d->reply, BPF_NOEXIST)",
        "insert_client_entry(&d->key, &d->there, &d->reply_key, open)",
    ],
    "exchange.h:move_to_table": [
        "bpf_map_update_elem(&flows, &d->reply_key, &d->reply, BPF_NOEXIST)",
        "insert_client_entry(&d->key, &d->there, &d->reply_key, open)",
    ],
    "flow_table.h:insert_client_entry": [
        "\tcount_young(",
        "bpf_map_update_elem(&flows, key, f, BPF_NOEXIST)",
        "uncount_young(",
        "bpf_map_delete_elem(&flows, reply_key)",
    ],
    "young.h:is_taken_by_young": ["young_reply_entry(", "other_direction(", "request_promotion("],
    "flow_table.h:forget_flow": [
        "bpf_map_delete_elem(&flows, &other)",
        "bpf_map_delete_elem(&flows, key)",
        "uncount_young(",
    ],
    "flow_send.h:send_by_table": [
        "bpf_map_lookup_elem(&flows, p)",
        "begins_anew(",
        "forget_flow(",
        "send_kernels(",
        "send_young(",
    ],
    "flow_send.h:judge_syn": ["other_direction(", "CLOSING_IN_SEQUENCE", "SYN_OF_ANOTHER", "ends_by_reset("],
    "flow_send.h:send_young": ["why_kernel(", "leave_young(", "end_young(", "rewrite_and_send(", "forget_flow("],
    "flow_send.h:end_young": ["other_direction(", "f->closing = CLOSING;", "f->closing = CLOSING_IN_SEQUENCE;"],
    "flow_send.h:send_kernels": [
        "fast_path_closed(",
        "note_ending(",
        "now >= known->confirmed_until",
        "rewrite_and_send(",
    ],
    "flow_send.h:note_ending": ["unconfirm_from(known", "unconfirm_from(other"],
    "tc.bpf.c:leave_young": ["request_promotion(", "leave_to_netfilter("],
    "tc.bpf.c:leave_to_netfilter": ["drop_until_promotion(", "set_choice("],
    "flow_send.h:note_elsewhere": ["other_direction(", "is_out_of_sequence(", "known->promote = RESTORE"],
    "sweep.h:request_restoration": ["bpf_map_push_elem(&promotions", "f->promote = "],
    "sweep.h:sweep_flow": [
        "request_restoration(",
        "kernel_flow_is_stale(",
        "young_flow_is_over(",
        "forget_flow(",
        "is_due_for_promotion(",
    ],
    "sweep.h:young_flow_is_over": ["!reply)", "have_closed(f, reply)", "!reply->packets"],
    "sweep.h:promote": ["confirmed_until = 0", "other->young = 0", "f->young = 0", "uncount_young("],
    "observer.h:confirm": ["matches_rewrite(", "f->confirmed_until = "],
}


@pytest.mark.parametrize("function", ORDER)
def test_the_programs_access_the_table_in_the_order_of_the_model(function: str) -> None:
    file, _, name = function.partition(":")
    found = next((each.body for each in functions() if (each.file, each.name) == (file, name)), None)
    assert found is not None, f"{function} is not there: does the model still fit?"
    at = 0
    for access in ORDER[function]:
        assert (at := found.find(access, at)) >= 0, f"{function}: {access!r} is not where the model has it"


def test_the_agent_creates_the_entry_before_it_promotes() -> None:
    text = (ROOT / "pyebpf_proxy" / "datapath" / "connections" / "promotion.py").read_text()
    body = text.partition("def _hand_over(")[2].partition("def _end_sources(")[0]
    calls = ("self._flows.read(key)", "create.create(", "self._promote(", "create.abandon(")
    places = [body.index(call) for call in calls]
    assert places == sorted(places)


def test_the_model_uses_the_names_of_the_programs() -> None:
    headers = {path.name: path.read_text() for path in (ROOT / "bpf").glob("*.[hc]")}
    for name in ("CLOSING", "CLOSING_IN_SEQUENCE", "CLOSING_BY_RESET", "RESTORE", "RESTORING"):
        assert re.search(rf"\b{name} = {getattr(life_cycle, name)},", headers["flow_maps.h"])
    struct = headers["flow_maps.h"].partition("struct flow {")[2].partition("};")[0]
    for field in ("young", "closing", "confirmed_until", "packets", "reply"):
        assert re.search(rf"\b{field}\b", struct)
    text = MODEL.read_text()
    words = " ".join([*re.findall(r"#.*", text), *re.findall(r"\"\"\".*?\"\"\"", text, re.DOTALL)])
    named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", words))
    known = " ".join(headers.values())
    own = {"life_cycle", "test_life_cycle"}
    assert {name for name in named - own if not re.search(rf"\b{name}\b", known)} == set()
