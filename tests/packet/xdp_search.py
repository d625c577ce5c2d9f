# SPDX-License-Identifier: Apache-2.0
"""Random packets in two worlds with the same tables: through XDP and then tc, and through tc alone.

Frame, verdict, tag, and what the packet changes in the maps must be the same. With a scheduler, or with one endpoint,
both worlds choose the same one. These differences are intended:

* XDP counts what it sends, and what it leaves of known flows, by its own names.
* XDP leaves bulk streams to tc, and notes that in the flow.
* If XDP opens a flow and tc sends its first packet, the flow counts this packet and has its sequence number.
* XDP may use up a source port for a flow that it then leaves to tc.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from typing import Any

from pyebpf_proxy.datapath.connections.create import Entry
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.services.model import Protocol
from tests.packet.fast_node import (
    CLAIMED,
    EXCHANGE_BUCKETS,
    EXCHANGE_WAYS,
    SECOND,
    complete_filter,
    note_tracked,
    one_cpu,
    sweep,
)
from tests.packet.fuzz import FOREVER, REDIRECT, Round, Runner
from tests.packet.fuzz_packets import make
from tests.packet.fuzz_reference import TCP, Ends, parse
from tests.packet.program_node import SHOT, XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX, ProgramNode, enter_namespace
from tests.support.conntrack import create_now

STEPS_A_ROUND = 250
BASE = {"xdp": 1, "load": 1, "snat_port_min": 20000, "snat_port_max": 20199}
#: The settings of the programs, for pairs of worlds with these names.
SETTINGS: dict[str, dict[str, int]] = {
    "one endpoint": {},
    "rr, mode nftables": {"scheduler": 1, "nft_mode": 1},
    "sh, few young flows": {"scheduler": 2, "flow_quota": 6, "localhost_node_ports": 1},
    "rr, no lookup": {"scheduler": 1, "conntrack_lookup": 0, "masquerade_all": 1},
}
EQUAL = ("slots", "rr_cursor", "affinity_counts", "young_counts", "refusals", "xdp_choices")
TIMES = ("started", "last_seen", "confirmed_until")
VERDICTS = {XDP_DROP: SHOT, XDP_TX: REDIRECT, XDP_REDIRECT: REDIRECT}
_BUCKET, _TAGS, _HEAD = 128, 32, 16  # bytes of struct exchange_bucket, of its tags, of struct exchange_head


class DifferenceError(AssertionError):
    """A packet had another outcome with XDP than without."""


class World:
    """One of the two, with its own network namespace, programs and maps."""

    def __init__(self, node: ProgramNode, cookie: int) -> None:
        self.node, self._cookie = node, cookie
        self._namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def begin(self, seed: int, settings: dict[str, int]) -> None:
        self.enter()
        self.node.forget_flows()
        # Programs with the same settings would share their maps (program_node.py).
        self.round = Round(self.node, "xdp", seed, Counter(), {**BASE, **settings, "netns_cookie": self._cookie})
        self.maps, self.btf = self.node.object.maps, self.node.object.btf
        assert self.node.xdp is not None
        self.tc, self.xdp = Runner(self.node.object.programs["tc_ethernet"]), Runner(self.node.xdp, xdp=True)
        self.heads, self.names = self.maps["exchange_heads"].mmap(), reasons(self.btf.enum)
        self.sweep()
        complete_filter(self.node)

    def enter(self) -> None:
        enter_namespace(self._namespace)

    def close(self) -> None:
        os.close(self._namespace)

    def sweep(self) -> None:
        self.enter()
        sweep(self.node)

    def items(self, name: str) -> dict[bytes, bytes]:
        return dict(self.maps[name].items()) if name in self.maps else {}

    def counted(self) -> dict[str, int]:
        """The counters by their names, with one name for what XDP or tc has sent."""
        values = [sum(struct.unpack(f"={len(value) // 8}Q", value)) for value in self.items("counters").values()]
        found = {name: values[number] for name, number in self.names.items()}
        found["flow_hit"] += found.pop("xdp_flow_hit")
        return {name: number for name, number in found.items() if not name.startswith("xdp_left_")}


class Worlds:
    """Both. In the first one, XDP comes before tc."""

    def __init__(self, first: ProgramNode) -> None:
        self.both = World(first, 1), World(ProgramNode(first.family), 2)
        self.family = first.family
        self.counts: Counter[tuple[int, int]] = Counter()

    def close(self) -> None:
        for world in self.both:
            world.close()
        self.both[1].node.close()

    def begin(self, name: str, seed: int) -> None:
        for world in self.both:
            world.begin(seed, SETTINGS[name])
        self.tc_only, self.rng, self.generation = self.both[1], random.Random(seed), 1
        self.pools, self.devices = self.tc_only.round.pools, list(self.tc_only.node.devices.values())
        # Mostly packets of clients that have a permit.
        pairs = enumerate(self.tc_only.round.permits, 40000)
        self.pools.known[:] = [
            Ends(client, to, port, end, protocol) for port, (client, (to, end), _, _, protocol, _) in pairs
        ]
        self.btf = btf = self.tc_only.btf
        self.flow, self.rewrite, self.key = btf.struct("flow"), btf.struct("flow_rewrite"), btf.struct("flow_key")
        if name == "one endpoint":
            layout = btf.struct("service_config")
            for key, value in self.tc_only.items("service_configs").items():
                config = dict(layout.unpack(value))
                config |= {each: min(config[each], 1) for each in ("cluster_count", "local_count")}
                for world in self.both:
                    world.maps["service_configs"].update(key, layout.pack(**config))
        self._vary_permits()

    def _vary_permits(self) -> None:
        """Some clients are outside, and some permits are out of date or of a pod."""
        rng, (permit, pair, link) = self.rng, (self.btf.struct(name) for name in ("permit", "permit_key", "link"))
        self.entrances: dict[bytes, int] = {}
        for key, value in sorted(self.tc_only.items("permits").items()):
            ends, fields = dict(pair.unpack(key)), dict(permit.unpack(value))
            ends["device"] = device = self.entrances.setdefault(bytes(ends["client"]), rng.choice(self.devices))
            back = {**link.unpack(fields["back"]), "device": device, "redirect": rng.choice((1, 1, 1, 1, 2, 0))}
            fields |= {"back": link.pack(**back), "until": rng.choice((FOREVER,) * 9 + (1,))}
            for world in self.both:
                world.maps["permits"].delete(key)
                world.maps["permits"].update(pair.pack(**ends), permit.pack(**fields))

    # ---- what happens between packets --------------------------------------------------------------

    def _change(self) -> None:
        what = self.rng.randrange(11)
        if what == 10:
            self._track(self.rng.choice(self.pools.known))
        elif what < 4:
            self._pause(int(self.rng.choice((0.17, 0.43, 1.7, 8.3, 41)) * SECOND))
        elif what < 7:
            self._promote()
        elif what == 7:
            for name in self.tc_only.node.devices:
                frames = self.rng.choice(({}, {}, {"takes": 0}, {"returns": 0}, {"starts_flow": 0}))
                self.both[0].node.xdp_device(name, **frames)
        else:
            self.generation += 1
            closed = f"closed{self.family}", self.btf.enum("slow_path_reason")["STACK_RULES"]
            odd = ("draining", 1), closed, ("permit_generation", 2), ("alive", -1.0)
            state = dict([self.rng.choice(odd)] if self.rng.random() < 0.3 else [])
            for world in self.both:
                world.node.write_fast_path_state(generation=self.generation, **state)  # type: ignore[arg-type]
                world.sweep()

    def _pause(self, span: int) -> None:
        """Set the times of all flows back, after the sweep has made all requests."""
        for world in self.both:
            world.sweep()
            world.sweep()
            for key, value in world.items("flows").items():
                flow = dict(self.flow.unpack(value))
                times = {name: flow[name] for name in TIMES if flow[name] not in (0, CLAIMED, FOREVER)}
                flow |= {name: max(when - span, 1) for name, when in times.items()}
                world.maps["flows"].update(key, self.flow.pack(**flow))
            words, unused = world.heads.cast("I"), bytes(_BUCKET)
            for at in range(0, len(world.heads), _BUCKET):
                if world.heads[at : at + _BUCKET] != unused:
                    for head in range((at + _TAGS) // 4, (at + _TAGS + EXCHANGE_WAYS * _HEAD) // 4, _HEAD // 4):
                        for time in (head + 1, head + 2):
                            words[time] = words[time] - (span >> 20) & 0xFFFFFFFF

    def _track(self, ends: Ends) -> None:
        """From now on conntrack has a flow, and the filter of clients has its client."""
        protocol, endpoint = Protocol(ends.protocol), (self.tc_only.node.packed("remote"), 8080)
        self.pools.live.append(ends)
        entry = Entry(protocol, (ends.source, ends.source_port), (ends.destination, ends.destination_port), endpoint)
        for world in self.both:
            world.enter()
            create_now([entry])
            note_tracked(world.node, world.round.key(ends))

    def _promote(self) -> None:
        """Make a flow the kernel's, if it is not yet, and confirm it or not."""
        rng = self.rng
        key = rng.choice(sorted(self.tc_only.items("flows")) or [bytes(self.key.size)])
        changed = {"confirmed_until": rng.choice((FOREVER, FOREVER, 1)), "packets": rng.choice((1, 9))}
        if rng.random() < 0.3:
            changed |= {"acknowledged": rng.choice((0, 1000, 5000)), "sent_until": 1000}
        other = self._opposite(key)
        for world in self.both:
            world.enter()
            for each in (key, other):  # one of them is the client's
                world.node.object.programs["promote_flow"].test_run(bytes(14) + each)
            for each in (key, other):
                if value := world.maps["flows"].lookup(each):
                    world.maps["flows"].update(each, self.flow.pack(**{**self.flow.unpack(value), **changed}))

    def _opposite(self, key: bytes) -> bytes:
        """The key of the other direction of a flow in the table."""
        value = self.tc_only.maps["flows"].lookup(key) or bytes(self.flow.size)
        a, mine = self.rewrite.unpack(self.flow.unpack(value)["rewrite"]), dict(self.key.unpack(key))
        mine |= {"source": a["destination"], "destination": a["source"]}
        mine |= {"source_port": a["destination_port"], "destination_port": a["source_port"]}
        packed: bytes = self.key.pack(**mine)
        return packed

    # ---- packets -----------------------------------------------------------------------------------

    def step(self) -> None:
        """A packet, or a change in both worlds. DifferenceError."""
        if self.rng.random() < 0.1:
            self._change()
            self._compare()
            return
        frame, device = make(self.rng, self.pools), self.rng.choice(self.devices)
        p = parse(frame, 14, int.from_bytes(frame[12:14], "big"))
        if p is not None and self.rng.random() < 0.9:
            device = self.entrances.get(p.ends.source.ljust(16, b"\0"), device)
            if value := self.tc_only.maps["flows"].lookup(key := self.tc_only.round.key(p.ends)):
                flow = dict(self.flow.unpack(value))
                device = self.rewrite.unpack(flow["rewrite"])["device_in"]
                if p.ends.protocol == TCP and not p.odd and self.rng.random() < 0.8:
                    frame = frame[: p.at + 4] + self._numbers(key, flow) + frame[p.at + 12 :]
        self._packet(frame, device, p.ends if p else None)

    def _numbers(self, key: bytes, flow: dict[str, Any]) -> bytes:
        """Sequence and acknowledgment numbers that the other side may expect."""
        rng, value = self.rng, self.tc_only.maps["flows"].lookup(self._opposite(key))
        other = self.flow.unpack(value) if value else flow
        expected, acknowledged = other["acknowledged"], flow["acknowledged"]
        off = rng.choice((1, 1000, -1, 1 << 20, 5 << 20, -5 << 20, 70 << 20, rng.getrandbits(32)))
        sequence = rng.choice((expected, expected, expected & ~0xFFFF | flow["sent_until"], expected + off))
        number = rng.choice((acknowledged, acknowledged & ~0xFFFF | other["sent_until"], acknowledged + off))
        return struct.pack("!II", sequence & 0xFFFFFFFF, number & 0xFFFFFFFF)

    def _packet(self, frame: bytes, device: int, ends: Ends | None) -> None:
        first, second = self.both
        before = first.counted()["new_flow_fast"]
        try:
            first.enter()
            verdict, data, *_ = first.xdp.run(frame, device)
            with_xdp = VERDICTS.get(verdict, verdict), data, 0, 0
            if verdict == XDP_PASS:
                if data != frame:
                    raise DifferenceError("XDP changed the packet and left it to tc")
                if first.counted()["new_flow_fast"] == before:  # XDP may have used up a source port
                    second.maps["recent_next"].update(bytes(4), first.maps["recent_next"].lookup(bytes(4)) or b"")
                with_xdp = first.tc.run(frame, device)
            second.enter()
            tc_only = second.tc.run(frame, device)
        except BlockingIOError:
            return
        self.counts[verdict, tc_only[0]] += 1
        if with_xdp != tc_only:
            raise DifferenceError(f"XDP {verdict}: {with_xdp}, tc alone: {tc_only}")
        self._compare()
        sent = parse(tc_only[1], 14, int.from_bytes(tc_only[1][12:14], "big")) if tc_only[0] == REDIRECT else None
        if ends is not None and sent is not None:
            self.pools.live += [ends, sent.ends.turned()]
            del self.pools.live[:-80]

    # ---- comparing ---------------------------------------------------------------------------------

    def _compare(self) -> None:
        first, second = self.both
        self._compare_flows(first.items("flows"), second.items("flows"))
        if bytes(first.heads) != bytes(second.heads):
            self._compare_exchanges()
        _same("counters", first.counted(), second.counted())
        for name in EQUAL:
            _same(name, first.items(name), second.items(name))
        # The value begins with a time.
        _same("affinities", *({key: value[8:] for key, value in w.items("affinities").items()} for w in self.both))
        _same("promotions", *(dict.fromkeys(world.node.promotions()) for world in self.both))
        noted = [world.maps["tracked_clients"].lookup(bytes(4)) or b"" for world in self.both]
        _same("clients of conntrack", *({"unused": each.count(0)} for each in noted))

    def _compare_flows(self, first: dict[bytes, bytes], second: dict[bytes, bytes]) -> None:
        _same("flows", *(dict.fromkeys(each) for each in (first, second)))
        for key, value in first.items():
            if value != second[key]:
                flow = dict(self.flow.unpack(value))
                left = flow["first_counted"] == 1
                _same(f"flow {key.hex()}", *(self._plain(each, left) for each in (value, second[key])))
                # From now on, both have the same times and numbers.
                self.tc_only.maps["flows"].update(key, self.flow.pack(**{**flow, "bulk": 0}))

    def _plain(self, value: bytes, left_by_xdp: bool) -> dict[str, Any]:
        """An entry without what may differ."""
        flow = {**self.flow.unpack(value), **dict.fromkeys((*TIMES, "bulk"), 0)}
        flow["rewrite"] = self.rewrite.pack(**{**self.rewrite.unpack(flow["rewrite"]), "fragment_sent": 0})
        if left_by_xdp:
            flow |= {"packets": flow["packets"] - (flow["first_counted"] == 1), "first_counted": 0, "sent_until": 0}
        return flow

    def _compare_exchanges(self) -> None:
        for at in range(0, EXCHANGE_BUCKETS * _BUCKET, _BUCKET):
            buckets = [bytes(world.heads[at : at + _BUCKET]) for world in self.both]
            if buckets[0] != buckets[1]:
                _same("exchanges", *({"tags": each[:_TAGS], "packets": _packets(each)} for each in buckets))
                self.tc_only.heads[at : at + _BUCKET] = buckets[0]


def _packets(bucket: bytes) -> list[tuple[int, int]]:
    """How many queries and replies each exchange has sent, without a first one that XDP left to tc."""
    ends = range(_TAGS + _HEAD, _TAGS + EXCHANGE_WAYS * _HEAD + 1, _HEAD)
    return [(bucket[end - 4] - (bucket[end - 2] == 1), bucket[end - 3]) for end in ends]


def _same(what: str, first: dict[Any, Any], second: dict[Any, Any]) -> None:
    if first != second:
        keys = [key for key in {**first, **second} if first.get(key, "none") != second.get(key, "none")]
        found = [f"{key}: {first.get(key, 'none')}, tc alone: {second.get(key, 'none')}" for key in keys]
        raise DifferenceError(f"{what}: " + "; ".join(found))


def search(worlds: Worlds, name: str, steps: int, seed: int) -> None:
    """So many packets and changes. DifferenceError names the round and the step."""
    with one_cpu():
        for turn in range(-(-steps // STEPS_A_ROUND)):
            worlds.begin(name, seed + turn)
            for step in range(STEPS_A_ROUND):
                try:
                    worlds.step()
                except DifferenceError as error:
                    raise DifferenceError(f"{error}\nworld {name!r}, seed {seed + turn}, step {step}") from None
