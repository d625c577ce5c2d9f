# SPDX-License-Identifier: Apache-2.0
"""Break one rule of the data plane at a time, and show which packet tests fail.

Not part of `make test`: it compiles and runs the suite once per mutant. The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT
from tests.packet.compiled import FLAGS
from tests.packet.flow_mutants import FLOW_MUTANTS

#: Where the names of the mutants are.
_SOURCES = ("tests/packet/mutants.py", "tests/packet/flow_mutants.py")
# name → (file, original text, replacement)
MUTANTS: dict[str, tuple[str, str, str]] = {
    "entries for any TCP segment": ("parse.h", "== TCP_SYN;\n", ">= 0;\n"),
    "replies to a bridge that is no gateway": ("bridge.h", "if (!frame || !known)", "if (!frame)"),
    "a header of another packet": ("tc.bpf.c", "bpf_ntohs(ip->tot_len) != skb->len", "false"),
    "connections picked up midstream": ("tc.bpf.c", "skb->priority = PRIORITY_MIDSTREAM;", ""),
    "stale UDP kept": (
        "conntrack.h",
        "UNANSWERED_FLOW_REPLACED : STALE_UDP_REPLACED;",
        "UNANSWERED_FLOW_REPLACED : NOT_COUNTED;",
    ),
    "unanswered TCP kept": (
        "conntrack.h",
        "UNANSWERED_FLOW_REPLACED : STALE_UDP_REPLACED;",
        "NOT_COUNTED : STALE_UDP_REPLACED;",
    ),
    "answered TCP replaced": ("conntrack.h", "if (p->protocol == TCP && ct->status & IPS_SEEN_REPLY_)", "if (false)"),
    "TCP replaced in any state": (
        "conntrack.h",
        "if (p->protocol == TCP && ct->proto.tcp.state != TCP_STATE_SYN_SENT)",
        "if (false)",
    ),
    "unanswered TCP replaced although its endpoint serves": (
        "conntrack.h",
        "if (endpoint_serves(ct, p, p->protocol == TCP ? 0 : service))",
        "if (p->protocol != TCP && endpoint_serves(ct, p, service))",
    ),
    "both sides open at once: ended": (
        "conntrack.h",
        "(ct->proto.tcp.state == TCP_STATE_TIME_WAIT || ct->proto.tcp.state == TCP_STATE_CLOSE);\n}",
        "ct->proto.tcp.state >= TCP_STATE_TIME_WAIT;\n}",
    ),
    "UDP expired without endpoints": ("conntrack.h", "!any_endpoints || has_ended", "has_ended"),
    "hairpin not masqueraded": ("serve.h", "e.masquerade = true;", ";"),
    "later fragments parsed": ("parse.h", "|| (ip->frag_off & bpf_htons(0x1fff))", ""),
    "affinity by no client": ("backend.h", "affinity_client(p, &r->key);", ""),
    "affinity for ever": (
        "backend.h",
        "r->next.last_used < r->last->last_used + e->affinity_seconds * NANOSECONDS",
        "true",
    ),
    "affinity lost to another CPU's clock": (
        "backend.h",
        "r->next.last_used < r->last->last_used + e->affinity_seconds * NANOSECONDS",
        "r->next.last_used - r->last->last_used < e->affinity_seconds * NANOSECONDS",
    ),
    "affinity not refreshed": ("backend.h", "r->last->last_used = r->next.last_used;", ""),
    "affinity's hint not mended": ("backend.h", "r->last->position = position;", ""),
    "always the first endpoint": ("slots.h", "return ((__u64)bpf_get_prandom_u32() * e->count) >> 32;", "return 0;"),
    "rr without turns": ("scheduler.h", "__sync_fetch_and_add(turn, 1) % e->count", "*turn % e->count"),
    "rr with one turn for all lists": ("scheduler.h", "__u32 list = e->first_slot;", "__u32 list = 1;"),
    "sh by the destination": (
        "scheduler.h",
        "position_of(hash_of(&p->source), e)",
        "position_of(hash_of(&p->destination), e)",
    ),
    "dh by the source": (
        "scheduler.h",
        "position_of(hash_of(&p->destination), e)",
        "position_of(hash_of(&p->source), e)",
    ),
    "hashes that mix nothing": ("scheduler.h", "return x ^ x >> 33;", "return 1;"),
    "mh without the port": ("scheduler.h", "hash_of(&p->source) + port", "hash_of(&p->source)"),
    "mh by position": ("scheduler.h", "c->client + hash_of(&b.address) + b.port", "c->client + i"),
    "lc without the count": ("connections.h", "l->active = counted->active;", ""),
    "lc without choices": ("connections.h", "l->active += since;", ";"),
    "lc counts choices twice": ("connections.h", "since -= counted->choices;", ""),
    "lc with choices from before": ("connections.h", "if (since > 0)", ""),
    "inactive as active": ("connections.h", "#define INACTIVE_PER_ACTIVE 256", "#define INACTIVE_PER_ACTIVE 1"),
    "sed with inactive": ("connections.h", "if (scheduler == SHORTEST_DELAY)", "if (false)"),
    "scans from the first": ("connections.h", "s->start = s->position = random_position(e);", ""),
    "scheduler before affinity": ("backend.h", "position = scheduler_affinity(p, e);", ""),
    "affinity's flows not counted": (
        "backend.h",
        "if (scheduler >= LEAST_CONNECTIONS)",
        "if (scheduler >= LEAST_CONNECTIONS && !e->affinity_seconds)",
    ),
    "lblc for all addresses": ("connections.h", "__builtin_memcpy(key->client, &p->destination, 16);", ""),
    "lblc leaves without an idle one": ("connections.h", "if (position && !s.idle)", "if (false)"),
    "lblcr set of one": ("connections.h", "set->backends[i] = id;", ""),
    "lblcr set never shrinks": ("connections.h", "set->backends[s.worst_member % SET_SIZE] = 0;", ""),
    "lblcr shrinks at once": ("connections.h", "now > set->changed + SET_SETTLED_SECONDS * NANOSECONDS", "true"),
    "lblcr takes any of the set": (
        "connections.h",
        "if (!s->present || overhead < s->least_member)",
        "if (!s->present)",
    ),
    "ranges for every kind": ("policy.h", "f->kind != LOAD_BALANCER || ", ""),
    "NodePorts on every address": ("frontend.h", "if (node && node->node_ports)", "if (true)"),
    "NodePorts of all the world": (
        "frontend.h",
        "return is_unserved_node_port(&p->destination, p->ipv6);",
        "return !settings.nft_mode;",
    ),
    "refused where none is served, in both modes": ("frontend.h", "if (settings.nft_mode)\n\t\treturn false;", ""),
    "nothing refused where none is served": (
        "policy.h",
        "return refuse_unserved(config, reason);",
        "return VERDICT_PASS;",
    ),
    "dropped where none is served": ("policy.h", "if (!config->external_local || config->local_count)", "if (false)"),
    "loopback let in": (
        "tc.bpf.c",
        "return drop_packet(skb, &p, DROP_LOOPBACK_DESTINATION);",
        "count(DROP_LOOPBACK_DESTINATION);",
    ),
    "loopback always guarded": ("serve.h", "settings.localhost_node_ports && !p->ipv6", "!p->ipv6"),
    "one loopback address only": (
        "packet.h",
        "(address & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000)",
        "address == bpf_htonl(0x7f000001)",
    ),
    "XDP: a choice is not handed over": ("ctx_xdp.h", "bpf_map_update_elem(&xdp_choices, p, &choice, BPF_ANY);", ""),
    "XDP: a choice is taken over twice": ("tc.bpf.c", "bpf_map_delete_elem(&xdp_choices, p);", ""),
    "XDP: other addresses' frames": ("xdp.bpf.c", "device && is_for(ctx, device->mac)", "device"),
    "XDP: flows opened everywhere": ("xdp.bpf.c", "|| !device->starts_flow", ""),
    "XDP: no guard of loopback": (
        "xdp.bpf.c",
        "device_of_node(ctx) ? drop_packet(ctx, &p, DROP_LOOPBACK_DESTINATION) :",
        "",
    ),
    "XDP: several buffers as one": ("ctx_xdp.h", "frames == ONE_BUFFER && ", "frames == ONE_BUFFER || "),
    "XDP: partial checksums": ("ctx_xdp.h", "|| lacks_checksum(p, *check)", ""),
    "XDP: flows opened with partial checksums": (
        "xdp.bpf.c",
        "settings.fast_path && may_be_young(ctx, p)",
        "settings.fast_path",
    ),
    "XDP: flows renewed with partial checksums": ("flow_send.h", "!may_be_young(ctx, p) ||", ""),
    "XDP: UDP without a checksum gets one": ("rewrite.h", "p->protocol == UDP && !check", "false"),
    "XDP: a UDP checksum that becomes zero": (
        "rewrite.h",
        "p->protocol == UDP && !changed ? 0xffff : changed",
        "changed",
    ),
    "XDP: counted as tc counts": ("ctx_xdp.h", "count(XDP_FLOW_HIT);", "count(FLOW_HIT);"),
    "trace: everything reported": ("trace.h", "!is_wanted(t, &event)", "!is_wanted(t, &event) && !p"),
    "trace: the other family's addresses": ("trace.h", "if (t->family != (ipv6 ? 6 : 4))", "if (false)"),
    "trace: losses not counted": ("trace.h", "__sync_fetch_and_add(&t->lost, 1);", ";"),
    "trace: continues without a reader": ("trace.h", "t->process = 0;", ";"),
    "UDP expired where no NodePorts are served": ("tc.bpf.c", " && f->kind != UNSERVED_NODE_PORT", ""),
    "every bridged packet lifted": ("bridge.h", "!is_translated_reply(skb, p) ||", ""),
    "closed TCP entry continues": (
        "conntrack.h",
        "note_left(p, false);\n\treturn !ended;",
        "note_left(p, false);\n\treturn 1;",
    ),
    "affinity without a list check": (
        "backend.h",
        "return position_in_list(e, p->ipv6, r->last->backend, r->last->position);",
        "return r->last->position + 1;",
    ),
    "lblc never overloaded": (
        "connections.h",
        "l.active <= OVERLOADED_ACTIVE ? position : position | OVERLOADED",
        "position",
    ),
    "lblc without a list check": (
        "connections.h",
        "position = position_in_list(e, p->ipv6, last->backend, last->position);",
        "position = last->position + 1;",
    ),
    "masquerade tag": ("ctx_skb.h", "masquerade ? PRIORITY_MASQUERADE : PRIORITY_BACKEND", "PRIORITY_BACKEND"),
    "XDP: a choice is always believed": ("tc.bpf.c", "|| !position_in_list(e, p->ipv6, choice.backend, 0)", ""),
    "XDP: any device takes frames": (
        "ctx_xdp.h",
        "return fits(ctx, out->takes) ? XDP_REDIRECT : XDP_PASS;",
        "return XDP_REDIRECT;",
    ),
    "XDP: sent back by a veth": ("ctx_xdp.h", "device == ctx->ingress_ifindex && fits(ctx, out->returns)", "false"),
    "XDP: streams": ("ctx_xdp.h", "if (p->length <= p->headers + BULK_BYTES)", "if (true)"),
    "XDP: reasons counted twice": ("serve.h", "count_left(slow);", "count(slow);"),
}
MUTANTS |= FLOW_MUTANTS


_XDP = ("test_xdp.py", "test_xdp_flows.py", "test_xdp_search.py")
_FLOWS = tuple(
    f"test_{name}.py"
    for name in ("permits", "kernel_flows", "recent_flows", "sweep", "young_ends", "young_flows", "young_ports")
)


def modules(name: str) -> tuple[str, ...]:
    """Most groups of mutants have their own test modules."""
    if name.startswith("XDP: "):
        return _XDP
    if name.startswith("exchanges: "):
        return ("test_exchanges.py", *_FLOWS)
    if name.startswith("renewal: "):
        return ("test_renewal.py", "test_exchanges.py")
    if name.startswith("untracked: "):
        return ("test_untracked_flows.py",)
    if name.startswith("promotion: "):
        return ("test_promotion.py",)
    if name.startswith("permits: "):
        return ("test_permits.py",)
    if name.startswith("node sockets: "):
        return ("test_node_sockets.py",)
    if name.startswith("recent: "):
        return ("test_recent_flows.py",)
    return _FLOWS if name.startswith("flows: ") else ("",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.packet.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants (default: all)")
    wanted = parser.parse_args().names
    if unknown := sorted(set(wanted) - set(MUTANTS)):
        parser.error(f"no such mutant: {', '.join(unknown)}; the names are in {', '.join(_SOURCES)}")
    alive = []
    for name in wanted or MUTANTS:
        file, old, new = MUTANTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(ROOT / "bpf", f"{scratch}/bpf")
            source = Path(scratch, "bpf", file)
            text = source.read_text()
            if old not in text:
                raise SystemExit(f"mutant {name!r}: {old!r} is not in {file} any more")
            source.write_text(text.replace(old, new))
            # The others, for tests that load them all.
            for other in (ROOT / "pyebpf_proxy" / "bpf").glob("*.o"):
                shutil.copy(other, scratch)
            built = f"{scratch}/tc.bpf.o"
            for which in ("tc", "tc_without_lookup", "xdp"):
                source, made = f"{scratch}/bpf/{which}.bpf.c", f"{scratch}/{which}.bpf.o"
                subprocess.run(["clang", *FLAGS, "-c", source, "-o", made], check=True)
            tests = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                *(str(ROOT / "tests" / "packet" / each) for each in modules(name)),
            ]
            tests += ["--ignore-glob=*test_maps*", "-W", "ignore"]
            done = subprocess.run(tests, env={**os.environ, "PEP_TC_OBJECT": built}, capture_output=True, text=True)
        noticed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        print(f"{'dead ' if done.returncode else 'ALIVE'}  {name:40} {noticed[0] if noticed else ''}", flush=True)
        if not done.returncode:
            alive.append(name)
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
