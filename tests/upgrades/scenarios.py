# SPDX-License-Identifier: Apache-2.0
"""What a user does at an upgrade or a rollback, and one run of it under load."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.cluster import Lab, PodNetwork
from pyebpf_proxy.lab.manifests import Object, Port, service, slices
from tests.changes.load import FullLoad, Outcome, Source, Way
from tests.changes.load_world import BOTH, EVERYWHERE, FAR, LOCAL, NEAR, NODE_PORT, PORT, TARGET_PORT, LoadWorld
from tests.upgrades.builds import Build
from tests.upgrades.checks import affinity_lost, differences, errors, layouts, left, without_clashes

#: Numbers of Services: one with session affinity, and those that change while no agent runs.
AFFINE, SHIFTED, DELETED, CREATED = 33, 34, 35, 36
#: Seconds without an agent; after the long time the fast path is closed in any case.
SHORT, LONG = 0.5, 6.0
#: How many starts or clean-ups are killed, at least and at most. After several, no flow is young any more.
ONE, SEVERAL = (1, 1), (3, 6)
#: This share of the connections may clash with another one of the same client port. Up to 4 of 12 000 did.
CLASHES = 0.001


class Options(NamedTuple):
    """Fields of the two configuration files, as ``Agent.start`` takes them."""

    config: dict[str, Any] | None = None
    own: dict[str, Any] | None = None


class Scenario(NamedTuple):
    """What happens between the two agents."""

    name: str
    #: The options of the first and of the second agent.
    before: Options = Options()
    after: Options = Options()
    #: The first agent gets SIGKILL. Then the fast path stays open for 5 s, so more flows are young at the take-over.
    killed: bool = False
    #: Seconds without an agent.
    away: float = SHORT
    #: How many starts of the second build get SIGKILL, or with ``cleanup`` of its clean-ups: at least and at most.
    kills: tuple[int, int] = (0, 0)
    #: Those starts are of either build, and then the first one is started again.
    back: bool = False
    #: Services and endpoints change while no agent runs.
    changes: bool = False
    #: The second build only runs ``--cleanup``.
    cleanup: bool = False
    #: The client that loses its session affinity.
    forgotten: str = ""

    def swapped(self) -> Scenario:
        """The same for a rollback, which takes the options back."""
        return self._replace(before=self.after, after=self.before)


_NFTABLES = {"mode": "nftables", "iptables": {"minSyncPeriod": "10ms"}, "nftables": {"masqueradeAll": True}}
_SIZES = {"fastPathEntries": 8192, "maps": {"affinities": 2048, "backends4": 4096, "socketRevnat4": 2048}}
_NO_SOCKET_LB = Options(own={"socketLB": "off"})
_XDP = Options(own={"fastPath": True, "xdpDevices": ["eth0"]})
SCENARIOS = (
    Scenario("restart"),
    Scenario("kill", killed=True),
    Scenario("outage", killed=True, away=LONG),
    Scenario("killed-start", killed=True, away=0.0, kills=ONE),
    Scenario("killed-starts", killed=True, kills=SEVERAL),
    Scenario("given-up", killed=True, kills=SEVERAL, back=True),
    Scenario("nftables", after=Options(_NFTABLES)),
    Scenario("ipvs", after=Options({"mode": "ipvs", "ipvs": {"scheduler": "lc"}})),
    Scenario("fast-path", after=Options(own={"fastPath": False}), killed=True),
    # Session affinity of the node's own processes is in a map or in nftables (docs/datapath-configuration.md).
    Scenario("socket-lb", Options(own={"socketLB": "all"}), _NO_SOCKET_LB, forgotten="node"),
    Scenario("no-socket-lb", _NO_SOCKET_LB, _NO_SOCKET_LB),
    Scenario("xdp", after=_XDP),
    Scenario("sizes", after=Options(own=_SIZES), killed=True),
    Scenario("services", killed=True, away=LONG, changes=True),
    Scenario("cleanup", _XDP, _XDP, cleanup=True),
    Scenario("killed-cleanups", _XDP, _XDP, kills=SEVERAL, cleanup=True),
)


class Result(NamedTuple):
    """One run. ``clashes``: see ``without_clashes``. ``findings``: what must not happen; ``log``: the agents' log."""

    tried: int = 0
    lost: int = 0
    moved: int = 0
    clashes: int = 0
    seconds: float = 0.0
    findings: Sequence[str] = ()
    log: str = ""


class UpgradeWorld(LoadWorld):
    """The lab of the full load, with session affinity, a hairpin, and Services that change."""

    def build(self) -> None:
        """Add the Services, and the ways to them."""
        super().build()
        timeout = {"clientIP": {"timeoutSeconds": 600}}
        affine: dict[str, Any] = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": timeout}
        self.write("affine", AFFINE, "near", "far", vip=vip(AFFINE), **affine)
        self.write("shifted", SHIFTED, "near")
        self.write("deleted", DELETED, "near")
        for name in ("pod", "node"):
            self._add_ways(name, (Way(each, PORT, BOTH) for each in cluster_ip(AFFINE)))
        self._add_ways("external", (Way(each, PORT, BOTH) for each in vip(AFFINE)))
        local = NODE_PORT + LOCAL - EVERYWHERE
        self._add_ways("external", (Way(each, local, frozenset({NEAR})) for each in self.node.address))
        near = self.lab.pods["near"].namespace
        self.sources["hairpin"] = Source(near, [Way(each, PORT, BOTH) for each in cluster_ip(EVERYWHERE)])

    def _add_ways(self, name: str, ways: Iterable[Way]) -> None:
        source = self.sources[name]
        self.sources[name] = source._replace(ways=[*source.ways, *ways])

    def write(self, name: str, number: int, *pods: str, **spec: Any) -> None:
        """Write a Service with TCP and UDP and these pods."""
        ports = [Port(each.lower(), PORT, TARGET_PORT, each) for each in ("TCP", "UDP")]
        endpoints = [(self.lab.pods[pod].address, self.lab.pods[pod].node.name) for pod in pods]
        objects: list[Object] = [service(name, ports, cluster_ip(number), **spec), *slices(name, ports, endpoints)]
        self.lab.write(f"{name}.yaml", objects)

    def change(self) -> None:
        """Change Services and endpoints. The load uses none of these, but the ids of all may change."""
        self.write("shifted", SHIFTED, "far")
        (self.lab.manifests / "deleted.yaml").unlink()
        self.write("created", CREATED, "near")

    def unchanged(self) -> list[str]:
        """Which of the changes are not in effect."""
        wanted = (
            *((each, FAR) for each in cluster_ip(SHIFTED)),
            *((each, "") for each in cluster_ip(DELETED)),
            *((each, NEAR) for each in cluster_ip(CREATED)),
        )
        found = []
        for client in ("pod", "node"):
            for address, server in wanted:
                name = self.namespace(client).call(_who_answers, address)
                if name != server:
                    found.append(f"from {client} to {address}: {name or 'no server'}, not {server or 'none'}, answers")
        return found

    def begin(self, build: Build, options: Options) -> None:
        """Start the agent of a build without waiting."""
        self.node.agent.tree = build.tree
        self.node.agent.start(options.config, options.own)

    def serve(self, build: Build, options: Options) -> float:
        """Start the agent of a build, and wait until it serves; returns how long it took."""
        begun = time.monotonic()
        self.begin(build, options)
        self.node.agent.wait_synced()
        return time.monotonic() - begun


def _who_answers(address: str) -> str:
    try:
        with socket.create_connection((address, PORT), timeout=1.0) as sock:
            return sock.recv(64).decode().split("\n", 1)[0].strip("\0 ")
    except OSError:
        return ""


def run(
    first: Build,
    second: Build,
    scenario: Scenario,
    rng: random.Random,
    rate: float,
    pod_network: PodNetwork = "routed",
) -> Result:
    """Run the scenario in its own lab."""
    begun = time.monotonic()
    with Lab(pod_network=pod_network) as lab, UpgradeWorld(lab) as world:
        event = Event(world, first, second, scenario, rng)
        outcome = event.under_load(rate)
        log = world.node.agent.log()
    findings = event.findings + errors(log)
    if outcome is None:
        return Result(seconds=time.monotonic() - begun, findings=findings, log=log)
    outcome, clashes = without_clashes(outcome)
    if said := outcome.describe(event.until):
        findings.append(f"{outcome.size(event.until)}\n{said}")
    findings += affinity_lost(outcome, (*cluster_ip(AFFINE), *vip(AFFINE)), scenario.forgotten)
    tried = len(outcome.new) + len(outcome.long)
    lost, moved = (len(outcome.problems(event.until).get(what, ())) for what in ("lost", "moved"))
    if clashes > CLASHES * tried:
        findings.append(f"{clashes} connections waited, each with the port of an earlier one of its client")
    return Result(tried, lost, moved, clashes, time.monotonic() - begun, findings, log)


class Event:
    """One run of a scenario. ``findings``: what was found so far. ``until``: when ``--cleanup`` began."""

    def __init__(
        self, world: UpgradeWorld, first: Build, second: Build, scenario: Scenario, rng: random.Random
    ) -> None:
        self.world, self.first, self.second, self.scenario, self.rng = world, first, second, scenario, rng
        self.findings: list[str] = []
        self.until = inf
        self._clean: dict[str, list[str]] = {}

    def under_load(self, rate: float) -> Outcome | None:
        """None: the first agent does not serve."""
        try:
            self._clean = left(self.world.node)
            took = self.world.serve(self.first, self.scenario.before)
            self._check_pins(self.first)
            with self.world.load(rate) as load:
                load.wait_progress(2.0)
                try:
                    self._replace(load, took)
                except Exception as error:
                    self._failed(error)
                return load.end()
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        # The text may contain the whole log.
        self.findings.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _replace(self, load: FullLoad, took: float) -> None:
        """From the end of the first agent until the second one serves. ``took``: the duration of a start."""
        world, scenario, agent = self.world, self.scenario, self.world.node.agent
        if scenario.killed:
            agent.kill()
        elif status := agent.stop():
            self.findings.append(f"the agent of {self.first.name} ended with status {status}")
        if scenario.changes:
            world.change()
        time.sleep(scenario.away)
        if scenario.cleanup:
            self.until = time.monotonic()
        for _ in range(self.rng.randint(*scenario.kills)):
            self._kill_one(took)
        if scenario.cleanup:
            agent.tree = self.second.tree
            agent.cleanup()
            self.findings += differences(self._clean, left(world.node))
            load.wait_progress(0.05)
            return
        last, options = (self.first, scenario.before) if scenario.back else (self.second, scenario.after)
        world.serve(last, options)
        self._check_pins(last)
        load.wait_progress(3.0)
        if scenario.changes:
            self.findings += world.unchanged()

    def _kill_one(self, took: float) -> None:
        """A start, or a clean-up, is killed at a random moment."""
        agent, scenario = self.world.node.agent, self.scenario
        build, options = self.second, scenario.after
        if scenario.back and self.rng.random() < 0.5:
            build, options = self.first, scenario.before
        if scenario.cleanup:
            agent.tree = build.tree
            with subprocess.Popen(agent.cleanup_command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
                time.sleep(self.rng.uniform(0.1, took + 0.5))
                one.kill()
            return
        self.world.begin(build, options)
        time.sleep(self.rng.uniform(0.1, took + 0.5))
        if agent.process is None or agent.process.poll() is not None:
            self.findings.append(f"the agent of {build.name} ended by itself")
        agent.kill()

    def _check_pins(self, build: Build) -> None:
        """Only the layout of the running build is pinned."""
        found = layouts(self.world.node.agent.directory)
        if found != {build.layout}:
            self.findings.append(f"{build.name} has layout {build.layout}, pinned are {sorted(found)}")
