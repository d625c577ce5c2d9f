# SPDX-License-Identifier: Apache-2.0
"""The lab of the flows: one node with the proxy under test, pods on it and behind another node, and a sink.

::

    client ── core ──┬── node1: the proxy     local-1, local-2: endpoints (and clients, for hairpins)
              │      │                        toolbox: a pod that is never an endpoint
            sink     └── node2: a router      remote-1, remote-2: endpoints

All packets from outside enter at node1, and all packets of node2 leave through node1, so that the one proxy sees both
directions of every flow. Packets that the proxy does not change are routed to the sink, which has every address.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyebpf_proxy.lab.addresses import SERVICE_CIDR, VIP_CIDR
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.servers import Ports, start_servers
from tests.flows import sctp
from tests.flows.ask import CLIENT_PORTS, PATIENCE, Raw, ask_flows
from tests.flows.differences import difference
from tests.flows.flow import DROPPED, UNTOUCHED, Flow, Ground, Seen
from tests.support.world import TOOLBOX, World

LISTEN = Ports(http=(8080, 8081), echo=(), udp=(5353, 5354))
SCTP = (3868, 3869)
#: The first pass: answers without a new outcome in a row, and seconds until a request counts as dropped.
FEW = 6
BRIEF = 0.9
#: A throttled machine pauses for seconds.
LONG = 12.0
#: A busy machine sometimes loses an answer: at most one in so many; with two labs and kube-proxy, one in fewer.
LOST_OF, LOST_OF_TWO = 50, 25
#: Of two worlds on one machine, one may lose more than the other by one in so many.
MORE_OF = 100
#: Further passes for flows that differ. Most differences are chance, but each dropped request must be waited for: so
#: the longest patience comes last.
LOOKS = (PATIENCE, LONG)


@contextlib.contextmanager
def new_world() -> Iterator[FlowWorld]:
    """A world in its own lab; it ends with the block. No proxy runs yet."""
    with Lab() as lab, FlowWorld(lab) as world:
        yield world


class Silence(NamedTuple):
    """How many requests were made, and how many of them were lost though their flow was answered in the end."""

    asked: int
    lost: int

    def __str__(self) -> str:
        return f"{self.asked} requests, {self.lost} of them lost and asked again"

    def too_much(self, one_of: int) -> bool:
        """Whether more than one of so many requests was lost, or none was made."""
        return self.asked == 0 or self.lost > self.asked / one_of

    def is_more_than(self, other: Silence) -> bool:
        """Whether clearly more was lost than in another world on the same machine at the same time."""
        return self.lost / max(1, self.asked) > other.lost / max(1, other.asked) + 1 / MORE_OF


class FlowWorld(World):
    """The lab with everything that the flows need: see ``new_world``."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._given: list[str] = []
        self.silence = Silence(0, 0)
        #: The place in CLIENT_PORTS of each client's next port.
        self._ports: Counter[str] = Counter()

    def build(self) -> None:
        """Create pods, the sink, and routes through node1."""
        first, second = self.lab.nodes
        for name, node in (("local-1", first), ("local-2", first), ("remote-1", second), ("remote-2", second)):
            pod = self.lab.add_pod(name, node, LISTEN)
            self._serve_sctp(pod.namespace, name)
        self.lab.add_pod(TOOLBOX, first, serve=False)
        first.serve(LISTEN)
        self._serve_sctp(first.namespace, f"host-{first.name}")
        self._add_sink()
        for family in (4, 6):
            everything = "::/0" if family == 6 else "0.0.0.0/0"
            second.namespace.ip(f"route replace {everything} via {first.address.of(family)}")
            self.lab.core.ip(
                f"route replace {SERVICE_CIDR[family == 6]} via {first.address.of(family)}",
                f"route replace {second.pod_cidr.of(family)} via {first.address.of(family)}",
            )
        for node in (first, second):
            node.namespace.sysctl(
                {f"net.ipv4.conf.{device}.send_redirects": 0 for device in ("all", "eth0", "default")}
            )

    def _serve_sctp(self, namespace: Namespace, pod: str) -> None:
        self.at_end.callback(sctp.start_server(namespace, {"pod": pod, "node": ""}, SCTP).stop)

    def _add_sink(self) -> None:
        """Behind core; packets that a node forwards go there, whatever their destination."""
        lab = self.lab
        sink = lab._namespace("sink")
        sink.sysctl({"net.ipv6.conf.default.accept_dad": 0, "net.ipv6.conf.all.accept_dad": 0})
        lab.core.ip(
            f"link add sink0 type veth peer name eth0 netns {sink.name}",
            "addr add 10.99.0.1/30 dev sink0",
            "addr add fd00:99::1/64 dev sink0 nodad",
            "link set sink0 up",
        )
        sink.ip(
            "addr add 10.99.0.2/30 dev eth0",
            "addr add fd00:99::2/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.99.0.1",
            "route add ::/0 via fd00:99::1",
            "route add local 0.0.0.0/0 dev lo table 100",
            "route add local ::/0 dev lo table 100",
        )
        lab.core.ip(
            "route add default via 10.99.0.2 table 100",
            "route add ::/0 via fd00:99::2 table 100",
        )
        for option, networks in (("-4", ("10.96.0.0/12", VIP_CIDR[0])), ("-6", ("fd00:10:96::/108", VIP_CIDR[1]))):
            sink.run("ip", option, "rule", "add", "iif", "eth0", "lookup", "100")
            for network in networks:
                lab.core.run("ip", option, "rule", "add", "iif", "lan0", "to", network, "lookup", "100")
        sink.run("nft", "-f", "-", stdin=_EVERY_PORT)
        self.at_end.callback(start_servers(sink, {"pod": UNTOUCHED, "node": ""}, LISTEN).stop)
        self._serve_sctp(sink, UNTOUCHED)

    def pod(self, name: str) -> Pod:
        return self.lab.pods[name]

    def namespace(self, source: str) -> Namespace:
        """The namespace of a client by its name; the recordings call the external one "client"."""
        return super().namespace("external" if source == "client" else source)

    def give(self, addresses: Sequence[str]) -> None:
        """Give the node these addresses on its loopback, instead of the ones before."""
        for verb, those in (("del", self._given), ("add", addresses)):
            if those:
                self.node.namespace.ip(
                    *(f"addr {verb} {address}{'/128' if ':' in address else '/32'} dev lo" for address in those)
                )
        self._given = list(addresses)

    # ---- asking -----------------------------------------------------------------------------------------------

    def ask(self, flows: Sequence[Flow], patience: float = PATIENCE) -> list[Seen]:
        """Send every flow; returns their outcomes, in order. ``patience``: seconds without an answer."""
        return self.start_asking(flows, patience)()

    def start_asking(self, flows: Sequence[Flow], patience: float = PATIENCE) -> Callable[[], list[Seen]]:
        """The same in the background: the result waits for it."""
        by_source: Mapping[str, list[int]] = defaultdict(list)
        for number, flow in enumerate(flows):
            by_source[flow.source].append(number)
        tasks = {
            source: self.namespace(source).start(
                ask_flows, [flows[number] for number in numbers], patience, self._ports[source] % len(CLIENT_PORTS)
            )
            for source, numbers in by_source.items()
        }

        def finish() -> list[Seen]:
            found: list[Seen] = [Seen(())] * len(flows)
            for source, task in tasks.items():
                for number, raws in zip(by_source[source], task.result(600), strict=True):
                    words = {self._in_words(raw, source) for raw in raws}
                    self._ports[source] += raws[0].ports
                    lost = raws[0].lost if all(raw.failed != DROPPED for raw in raws) else 0
                    self.silence = Silence(self.silence.asked + raws[0].asked, self.silence.lost + lost)
                    if flows[number].sticky:
                        words = {_ANY_ENDPOINT.sub(r"an endpoint\1", word) for word in words}
                    found[number] = Seen.of(words)
            return found

        return finish

    def compare(self, flows: Sequence[Flow], ground: Ground, expected: Sequence[Seen], shown: set[str]) -> list[str]:
        """Send the flows; returns the unlisted differences from ``expected``, in words. ``shown`` gets the listed ones.

        The first pass is short. Flows that differ are sent again, alone and for longer: on a busy machine an answer may
        be late, and the second of two endpoints may be missing by chance.
        """
        actual = self.ask(briefly(flows), BRIEF)
        for longer in LOOKS:
            doubtful = doubts(flows, ground, expected, actual)
            if not doubtful:
                break
            again = self.ask([flows[number] for number in doubtful], longer)
            for number, seen in zip(doubtful, again, strict=True):
                actual[number] = with_evidence(actual[number], seen)
        return unlisted(flows, ground, expected, actual, shown)

    def _in_words(self, raw: Raw, source_name: str) -> str:
        if raw.failed:
            # A refusal is the same for a process of the node, whether by a packet or by the call itself.
            own = source_name == self.node.name and raw.failed.startswith("refused")
            return "refused" if own else raw.failed
        if raw.pod == UNTOUCHED:
            return UNTOUCHED
        node = self.node
        # A process of the node may get different addresses from its socket and from NAT: both are the node.
        if raw.peer in (*node.address, *node.gateway):
            source = "node"
        elif raw.peer in self._given:
            source = "the VIP"
        elif raw.peer == raw.own:
            source = "node" if source_name == node.name else "client"
        else:
            source = raw.peer
        return f"{raw.pod}:{raw.port} <- {source}"


def with_evidence(before: Seen, again: Seen) -> Seen:
    """What two passes of a flow have shown. Only a lost answer can be chance: it counts if the later pass has it.

    An endpoint, a source or a refusal that was seen once counts, whatever the outcome of the next request.
    """
    return Seen.of({outcome for outcome in before.outcomes if outcome != DROPPED} | set(again.outcomes))


def briefly(flows: Sequence[Flow]) -> list[Flow]:
    """The same with fewer requests: enough to find a difference in some flow, not in each."""
    return [flow._replace(count=min(flow.count, FEW)) for flow in flows]


def doubts(flows: Sequence[Flow], ground: Ground, expected: Sequence[Seen], actual: Sequence[Seen]) -> list[int]:
    """The numbers of the flows with an unlisted difference."""
    pairs = enumerate(zip(flows, expected, actual, strict=True))
    return [number for number, (flow, reference, found) in pairs if difference(flow, ground, reference, found) is None]


def unlisted(
    flows: Sequence[Flow], ground: Ground, expected: Sequence[Seen], actual: Sequence[Seen], shown: set[str]
) -> list[str]:
    """Unlisted differences, in words; the names of listed differences are added to ``shown``."""
    wrong = []
    for flow, reference, found in zip(flows, expected, actual, strict=True):
        name = difference(flow, ground, reference, found)
        if name is None:
            wrong.append(f"{flow}\n    kube-proxy: {reference}\n    pyebpf-proxy: {found}")
        elif name:
            shown.add(name)
    return wrong


#: Which endpoint answers, and so whether it is a hairpin, is chance.
_ANY_ENDPOINT = re.compile(r"^(?:local-\d|remote-\d|host-node1)(:\d+) <- .*$")

_EVERY_PORT = """
table inet sink {
  chain every_port {
    type nat hook prerouting priority -100
    iifname eth0 meta l4proto tcp redirect to :8080
    iifname eth0 meta l4proto udp redirect to :5353
    iifname eth0 meta l4proto sctp redirect to :3868
  }
}
"""
