# SPDX-License-Identifier: Apache-2.0
"""The lab of the full load: a node with an agent, Services with two endpoints, and clients in three places."""

from __future__ import annotations

from pyebpf_proxy.lab.addresses import VIP_CIDR, Dual, cluster_ip, vip
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests.changes.load import RATE, FullLoad, Source, Way
from tests.changes.traffic import Server, plain_rate
from tests.support.lab_tools import NAT_OF_OTHERS, reasons, wait_until
from tests.support.world import TOOLBOX, World

PORT, TARGET_PORT, NODE_PORT = 80, 8080, 30031
#: Numbers of the Services: one with all endpoints for every client, one with only local endpoints for external clients.
EVERYWHERE, LOCAL = 31, 32
NEAR, FAR = f"near:{TARGET_PORT}", f"far:{TARGET_PORT}"
BOTH = frozenset({NEAR, FAR})


class LoadWorld(World):
    """Two endpoints, one on the agent's node. ``load`` is this machine's full load."""

    def build(self) -> None:
        """Create pods with servers and the two Services, and measure the load without Services."""
        lab = self.lab
        for name, where in (("near", self.node), ("far", lab.nodes[1])):
            pod = lab.add_pod(name, where, serve=False)
            self.at_end.callback(Server(pod.namespace, name, TARGET_PORT).kill)
        lab.add_pod(TOOLBOX, self.node, serve=False)
        endpoints = [(lab.pods[name].address, lab.pods[name].node.name) for name in ("near", "far")]
        for name, number, node_port, policy in (
            ("everywhere", EVERYWHERE, NODE_PORT, "Cluster"),
            ("local", LOCAL, NODE_PORT + 1, "Local"),
        ):
            ports = [Port(protocol.lower(), PORT, TARGET_PORT, protocol, node_port) for protocol in ("TCP", "UDP")]
            checked = {"healthCheckNodePort": NODE_PORT + 2} if policy == "Local" else {}
            made = service(name, ports, cluster_ip(number), vip=vip(number), externalTrafficPolicy=policy, **checked)
            lab.write(f"{name}.yaml", [made, *slices(name, ports, endpoints)])
        lab.write("nodes.yaml", [node(each.name, each.address, each.pod_cidr) for each in lab.nodes])
        self.node.namespace.run("nft", "-f", "-", stdin=NAT_OF_OTHERS)
        self._drop_returned_packets()
        self.sources = {name: Source(self.namespace(name), self._ways(name)) for name in ("external", "pod", "node")}
        direct = f"{lab.pods['far'].address.v4},{TARGET_PORT}"
        self.plain = plain_rate(lab.folder, {name: each.namespace for name, each in self.sources.items()}, direct)

    def _drop_returned_packets(self) -> None:
        """Without a proxy the node would send packets for a VIP back to the router, and the router to the node."""
        rules = "".join(
            f"iifname lan0 {word} daddr {cidr} drop\n" for word, cidr in zip(("ip", "ip6"), VIP_CIDR, strict=True)
        )
        chain = "chain c { type filter hook forward priority 0; policy accept;\n" + rules + "}"
        self.lab.core.run("nft", "-f", "-", stdin=f"table inet once {{\n{chain}\n}}\n")

    def _ways(self, source: str) -> list[Way]:
        def ways(address: Dual, port: int, names: frozenset[str]) -> list[Way]:
            return [Way(each, port, names) for each in address]

        if source != "external":
            return ways(cluster_ip(EVERYWHERE), PORT, BOTH)
        return [
            *ways(vip(EVERYWHERE), PORT, BOTH),
            *ways(self.node.address, NODE_PORT, BOTH),
            *ways(vip(LOCAL), PORT, frozenset({NEAR})),
        ]

    def load(self, rate: float = RATE) -> FullLoad:
        """A context: inside it the load runs, and new flows take the fast path."""
        return FullLoad(self.lab.folder, self.sources, self.plain, rate)

    def count(self, name: str) -> int:
        return reasons(self.node)[name]

    def start(self) -> None:
        """Start the agent, and wait until it serves."""
        self.node.agent.start()
        self.node.agent.wait_synced()

    def gets_fast(self, load: FullLoad) -> None:
        """The load continues, and most of its connections are young flows."""
        before = self.count("new_flow_fast")
        load.wait_progress(2.0)
        wait_until(lambda: self.count("new_flow_fast") > before + load.wanted / 2, "new flows take the fast path")
