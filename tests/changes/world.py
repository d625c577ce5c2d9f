# SPDX-License-Identifier: Apache-2.0
"""The lab of changes under load: an agent, real servers, connections from three places, and a course of changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from pyebpf_proxy.lab.addresses import SERVICE_CIDR, VIP_CIDR, Dual, cluster_ip, vip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Object, Port, endpoint, endpoint_slice, node, service
from tests.changes.checker import (
    GRACE,
    REMEMBERED,
    Entries,
    Record,
    Stall,
    Timeline,
    Violation,
    check,
    check_misled,
    check_transfers,
)
from tests.changes.courses import BASE, NODE, PODS, STEADY, TARGETS, Step
from tests.changes.model import Endpoint, State, allowed
from tests.changes.traffic import LongConnections, NewConnections, Server, address_of, plain_rate
from tests.support.world import TOOLBOX, World

#: New connections a second, on a machine that manages three times as many without a Service.
RATE = 2000
SHARE = 0.35
#: If the kernel has one limit of ICMP errors for all, the rate at which none is missing.
ICMP_RATE = 800
LONG = 200
LONG_PERIOD = 200  # milliseconds
#: Connections of each source in one state: enough to find a server that is never chosen.
ENOUGH = 80
#: On a slow machine fewer suffice after so many seconds: three for each target.
FEW = 30
SHORT = 0.25
PORTS = (8080, 8081)
SOURCES = ("external", "pod", "node")


class Outcome(NamedTuple):
    """The outcome of a course."""

    violations: list[Violation]
    connections: int
    seconds: float
    #: Seconds from writing a manifest until the agent reported that it was programmed, for each change.
    changes: list[float]
    stalls: list[Stall]
    long: int
    #: Connections that met the entry of an older one with the same ports, and reached its endpoint.
    misled: int

    def __str__(self) -> str:
        worst = max((stall.ended - stall.begun for stall in self.stalls), default=0.0)
        changes = sorted(self.changes)
        return (
            f"{self.connections} connections, {self.connections / self.seconds:.0f} a second, {self.long} long ones,"
            f" {len(changes)} changes in {changes[len(changes) // 2] * 1000:.0f} ms (the slowest"
            f" {changes[-1] * 1000:.0f} ms), the machine stood still for {worst * 1000:.0f} ms at most"
            + (f", {self.misled} misled by old entries" if self.misled else "")
        )


class ChangesWorld(World):
    """One lab for many courses. ``lab`` is an empty one with two nodes.

    ``fast``: the fast path is on, whatever rules other programs have.
    """

    def __init__(self, lab: Lab, fast: bool = False) -> None:
        super().__init__(lab)
        self._fast = fast
        self._servers: dict[str, Server] = {}
        self._rate = RATE
        self.plain = 0.0
        #: They continue from one course to the next, as long as no server ends.
        self.long: list[LongConnections] = []
        #: Connections that conntrack may remember.
        self.last: list[Record] = []

    # ---- making it ----------------------------------------------------------

    def build(self) -> None:
        """Create the pods with their servers and the objects, start the agent, and measure this machine without it."""
        lab = self.lab
        for pod, name in PODS.items():
            lab.add_pod(pod, lab.node(name), serve=False)
            self._serve(pod)
        lab.add_pod(TOOLBOX, self.node, serve=False)
        self._refuse_unused_addresses()
        self._allow_icmp()
        lab.write("steady.yaml", _objects("steady", STEADY, lab))
        self._write(BASE)
        self.node.agent.start(own={"fastPath": True} if self._fast else None)
        self.node.agent.wait_synced()
        sources = {source: self.namespace(source) for source in SOURCES}
        self.plain = plain_rate(lab.folder, sources, f"{lab.pods['web-2'].address.v4},{PORTS[0]}")

    def close(self) -> None:
        """End the processes, which change from course to course. The lab ends the rest."""
        super().close()
        for process in (*self.long, *self._servers.values()):
            process.kill()

    def _serve(self, pod: str) -> None:
        self._servers[pod] = Server(self.lab.pods[pod].namespace, pod, *PORTS)

    def _refuse_unused_addresses(self) -> None:
        """The router rejects at once what the node forwards because it belongs to no service."""
        core = self.lab.core
        core.ip(*(f"route add {cidr} via {self.node.address.of(4 + 2 * i)}" for i, cidr in enumerate(SERVICE_CIDR)))
        rules = "".join(
            f"iifname lan0 {family} daddr {{ {cidr}, {vips} }} tcp dport 1-65535 reject with tcp reset\n"
            for family, cidr, vips in zip(("ip", "ip6"), SERVICE_CIDR, VIP_CIDR, strict=True)
        )
        chain = "chain forward { type filter hook forward priority 0; policy accept;\n" + rules + "}"
        core.run("nft", "-f", "-", stdin=f"table inet unused {{\n{chain}\n}}\n")

    def _allow_icmp(self) -> None:
        """The kernel sends 1000 ICMP errors a second in total: more connections are refused here."""
        limits = {"net.ipv4.icmp_msgs_per_sec": 1_000_000, "net.ipv4.icmp_msgs_burst": 100_000}
        try:
            self.node.namespace.sysctl(limits)
        except FileNotFoundError:
            # Older kernels have one limit for the machine, which the suite must not change.
            self._rate = ICMP_RATE

    def _write(self, state: State) -> float:
        """Write one file with everything that may change, so that it changes at once. Returns when, in
        ``time.time``.
        """
        nodes = [
            node(each.name, each.address, each.pod_cidr, state.zone if each.name == NODE else "")
            for each in self.lab.nodes
        ]
        return self.lab.write("shop.yaml", [*nodes, *_objects("shop", state, self.lab)])

    # ---- a course -----------------------------------------------------------

    def run(self, steps: Sequence[Step]) -> Outcome:
        """Run a whole course under load: from the usual state and back to it."""
        self._apply(BASE)
        return _Run(self, min(self._rate, SHARE * self.plain)).whole(steps)

    def _apply(self, state: State) -> tuple[float, float]:
        """Change to a state. Returns when it was requested and when the agent had done it (monotonic); (0, 0): no
        change.
        """
        written = self._write(state)
        if not written:
            return 0.0, 0.0
        self.node.agent.wait_synced(written)
        done = max(self.node.agent.synced().values())
        shift = _shift()
        return written + shift, done + shift


def _shift() -> float:
    """Seconds from ``time.time`` to ``time.monotonic``: the quickest of several readings, since each may be
    interrupted.
    """
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, before - wall))
    return min(readings)[1]


def _objects(name: str, state: State, lab: Lab) -> list[Object]:
    a = state.addresses
    ports = [Port("http", a.port, state.target_port, "TCP", a.node_port)]
    affinity = {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}} if state.affinity else {}
    made = service(
        name,
        ports,
        cluster_ip(a.cluster_ip),
        vip=vip(a.vip),
        externalIPs=list(vip(a.external_ip)),
        internalTrafficPolicy="Local" if state.internal_local else "Cluster",
        externalTrafficPolicy="Local" if state.external_local else "Cluster",
        sessionAffinity="ClientIP" if state.affinity else "None",
        **affinity,
    )
    slices = [
        endpoint_slice(
            name, family, ports, [_endpoint(each, lab.pods[each.pod].address, family) for each in state.endpoints]
        )
        for family in (4, 6)
    ]
    return [made, *slices] if state.exists else slices


def _endpoint(each: Endpoint, address: Dual, family: int) -> Object:
    conditions = {"ready": each.ready, "serving": each.serving, "terminating": each.terminating}
    made = endpoint(address.of(family), each.node, **conditions)
    return made | ({"hints": {"forZones": [{"name": each.zone}]}} if each.zone else {})


class _Run:
    def __init__(self, world: ChangesWorld, rate: float) -> None:
        self.world = world
        self.timeline = Timeline()
        self.changes: list[float] = []
        self.ends: list[tuple[str, float]] = []
        if not world.long:
            # They are created while nothing changes.
            world.long += [self._begin_long(source) for source in SOURCES]
            for each in world.long:
                each.wait_rounds(1)
        self.long = world.long
        self._note("the usual", 0.0, 0.0, BASE)
        self.begun = time.monotonic()
        self.loads = [self._load(source, rate / len(SOURCES)) for source in SOURCES]

    def _load(self, source: str, rate: float) -> NewConnections:
        asked = [address_of(target) for target in TARGETS if target.source == source]
        folder = self.world.lab.folder
        return NewConnections(self.world.namespace(source), folder / f"new-{source}", asked, rate)

    def _begin_long(self, source: str) -> LongConnections:
        served = [t for t in TARGETS if t.source == source and allowed(BASE, t, NODE).names and t.service == "shop"]
        count = LONG // len(SOURCES) + (LONG % len(SOURCES) if source == SOURCES[0] else 0)
        folder = self.world.lab.folder
        asked = [address_of(target) for target in served]
        return LongConnections(self.world.namespace(source), folder / f"long-{source}", asked, count, LONG_PERIOD)

    def _note(self, name: str, asked: float, programmed: float, state: State) -> None:
        by_service = {"shop": state, "steady": STEADY}
        rules = [allowed(by_service[target.service], target, NODE) for target in TARGETS]
        sticky = [target.service == "shop" and state.affinity for target in TARGETS]
        self.timeline.change(name, asked, programmed, rules, sticky)

    def whole(self, steps: Sequence[Step]) -> Outcome:
        self._more()
        for step in [*steps, Step("the usual again", BASE)]:
            self._step(step)
        for each in self.long:
            each.wait_rounds(1)
        seconds = time.monotonic() - self.begun
        for load in self.loads:
            load.stop()
        records, stalls = self._records(self.loads)
        newest = max((record.ended for record in records), default=0.0)
        remembered = [*self.world.last, *records]
        entries = Entries(remembered)
        violations = check(self.timeline, TARGETS, records, stalls, entries) + self._check_long()
        violations += check_misled(entries, len(records))
        self.world.last = [record for record in remembered if record.ended > newest - REMEMBERED]
        return Outcome(violations, len(records), seconds, self.changes, stalls, LONG, entries.excused)

    def _check_long(self) -> list[Violation]:
        """The outcome of the long connections. If all of them continue, there is nothing to report."""
        if all(each.status()[0] == each.count for each in self.long):
            return []
        for each in self.long:
            each.stop()
        records, _ = self._records(self.long)
        self.world.long.clear()
        if len(records) != LONG:
            raise RuntimeError(f"{len(records)} of {LONG} long connections are on record")
        return check_transfers(TARGETS, records, self.ends)

    def _step(self, step: Step) -> None:
        asked, programmed = self.world._apply(step.state)
        if asked:
            self.changes.append(programmed - asked)
            self._note(step.name, asked, programmed, step.state)
            self._more()
        if step.ends:
            # No client is sent to it any more: it ends, and only its own connections end with it.
            time.sleep(max(0.0, programmed + GRACE - time.monotonic()))
            self.ends.append((step.ends, time.monotonic()))
            self.world._servers[step.ends].kill()
            self._more()
            self.world._serve(step.ends)

    def _more(self) -> None:
        """Wait for enough connections in this state only."""
        time.sleep(max(0.0, self.timeline.phases[-1].certain - time.monotonic()))
        start = [load.made for load in self.loads]
        begun = time.monotonic()
        while True:
            more = [load.made - was for load, was in zip(self.loads, start, strict=True)]
            if min(more) >= ENOUGH or (min(more) >= FEW and time.monotonic() - begun > SHORT):
                return
            time.sleep(0.01)

    def _records(
        self, clients: Sequence[NewConnections] | Sequence[LongConnections]
    ) -> tuple[list[Record], list[Stall]]:
        """Of all sources together; ``target`` is an index of TARGETS."""
        records: list[Record] = []
        stalls: list[Stall] = []
        long = clients is self.long
        for source, client in zip(SOURCES, clients, strict=True):
            mine = [
                index
                for index, t in enumerate(TARGETS)
                if t.source == source and (not long or (t.service == "shop" and allowed(BASE, t, NODE).names))
            ]
            found, stood = client.records()
            records += [record._replace(target=mine[record.target]) for record in found]
            stalls += stood
        return records, stalls
