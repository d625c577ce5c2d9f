# SPDX-License-Identifier: Apache-2.0
"""Random objects for the flows: a seed gives a configuration and a series of object sets. Each set differs from the
last one in a few objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyebpf_proxy.lab.addresses import CLIENT_CIDR, NODE_CIDR, POD_CIDR, node_address, pod_gateway
from tests.flows.objects import PODS, End, Port, Svc
from tests.flows.scenarios import INTERNAL, LOCAL, SOURCES, STICKY, Scenario

_SERVICES = 5
_NETWORKS = [
    *CLIENT_CIDR,
    *POD_CIDR,
    *NODE_CIDR,
    "0.0.0.0/0",
    "::/0",
    "10.244.1.12/32",
    "198.51.100.0/30",
    "fd00:77::/64",
]
#: The node itself sometimes, and one pod twice as often as others.
_ENDS = [*PODS, "local-1", "host"]
_OTHER_TARGET = {8080: 8081, 8081: 8080, 5353: 5354, 5354: 5353, 3868: 3869, 3869: 3868}
_ADDRESSES = ["primary", *NODE_CIDR, *POD_CIDR, "127.0.0.0/8", "0.0.0.0/0", "::/0"]


def scenarios(seed: int, mode: str, steps: int) -> Iterator[Scenario]:
    """``steps`` object sets under one random configuration; each differs from the one before in a few objects."""
    maker = _Maker(random.Random(f"{seed} {mode}"))
    config = maker.config(mode)
    services = [maker.service(10 + number) for number in range(_SERVICES)]
    for step in range(steps):
        yield Scenario(f"seed {seed}, step {step}", list(services), config, SOURCES, (mode,))
        for _ in range(maker.random.randint(1, 3)):
            at = maker.random.randrange(_SERVICES)
            services[at] = maker.changed(services[at])


class _Maker:
    def __init__(self, source: random.Random) -> None:
        self.random = source

    def config(self, mode: str) -> dict[str, Any]:
        choose = self.random.choice
        detectors: list[dict[str, Any]] = [
            {"clusterCIDR": ",".join(POD_CIDR)},
            {"clusterCIDR": POD_CIDR[1]},
            {},
            {"clusterCIDR": POD_CIDR[0]},
            {"clusterCIDR": "0.0.0.0/1,::/0"},
            {"detectLocalMode": "NodeCIDR"},
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}},
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod2"}},
        ]
        config = dict(choose(detectors))
        if self.random.random() < 0.5:
            addresses = self.random.sample(_ADDRESSES, self.random.randint(1, 3))
            config["nodePortAddresses"] = ["primary"] if "primary" in addresses else addresses
        section: dict[str, Any] = {}
        if self.random.random() < 0.3:
            section["masqueradeAll"] = True
        if self.random.random() < 0.3:
            section["masqueradeBit"] = self.random.randint(0, 31)
        if mode == "iptables" and self.random.random() < 0.3:
            section["localhostNodePorts"] = False
        return config | ({mode: section} if section else {})

    def service(self, number: int) -> Svc:
        choose, likely = self.random.choice, self._likely
        ports = [Port(80, "TCP", choose((8080, 8081)), "web", self._node_port(30000 + number))]
        if likely(0.6):
            ports.append(Port(53, "UDP", choose((5353, 5354)), "dns", self._node_port(31000 + number)))
        if likely(0.3):
            ports.append(Port(53, "TCP", 8081, "dns-tcp", self._node_port(32000 + number)))
        if likely(0.2):
            ports.append(Port(36412, "SCTP", choose((3868, 3869)), "s1ap", self._node_port(32500 + number)))
        made = Svc(
            f"svc-{number}",
            number,
            self._slices(),
            ports,
            choose(((4, 6), (4, 6), (4,), (6,))),
            external=likely(0.6),
            load_balancer=likely(0.6),
            spec=self._spec(),
            ip_mode=choose(("", "", "VIP", "Proxy")),
            second_vip=choose((None, None, None, "", "VIP", "Proxy")),
            slice_families=choose(((4, 6), (4, 6), (4, 6), (4, 6), (4,), (6,))),
        )
        if likely(0.1):
            made.slice_ports = [port for port in ports if likely(0.5)]
        if likely(0.1):
            made.ports_of_slice = {1: [replace(port, target=_OTHER_TARGET[port.target]) for port in ports]}
        if likely(0.04):
            made.labels = {"service.kubernetes.io/service-proxy-name": choose(("other", ""))}
        if likely(0.04):
            made.slice_labels = {"service.kubernetes.io/headless": ""}
        if likely(0.1):
            made.annotations = {"service.kubernetes.io/topology-mode": choose(("Auto", "Disabled"))}
        made = _valid(made)
        if made.load_balancer and likely(0.15):
            made.vips = choose((node_address(1), pod_gateway(1)))
        elif made.external and likely(0.1):
            made.external_ips = node_address(1)
        if made.vips or made.external_ips:
            made.ports = [replace(port, number=1000 * number + index) for index, port in enumerate(made.ports)]
        return made

    def changed(self, service: Svc) -> Svc:
        """The same service with another property; its addresses and ports stay, unless it is replaced completely."""
        what = self.random.choice(("ends", "ends", "ends", "spec", "all"))
        if what == "ends":
            return replace(service, ends=self._slices())
        if what == "spec":
            return _valid(replace(service, spec=self._spec()))
        return self.service(service.number)

    def _likely(self, share: float) -> bool:
        return self.random.random() < share

    def _node_port(self, number: int) -> int:
        return number if self._likely(0.8) else 0

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {}
        for part, likely in ((LOCAL, 0.4), (INTERNAL, 0.3), (STICKY, 0.15)):
            if self.random.random() < likely:
                spec |= part
        if self._likely(0.4):
            spec["loadBalancerSourceRanges"] = self.random.sample(_NETWORKS, self.random.randint(1, 4))
        if self._likely(0.2):
            spec["trafficDistribution"] = self.random.choice(("PreferClose", "PreferSameZone", "PreferSameNode"))
        if self._likely(0.1):
            spec["publishNotReadyAddresses"] = True
        return spec

    def _slices(self) -> list[list[End]]:
        hinted = self.random.choice(("", "", "zones", "nodes", "both", "some"))
        return _defined(
            [
                [self._end(pod, hinted) for pod in self.random.sample(_ENDS, self.random.randint(0, 3))]
                for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)))
            ]
        )

    def _end(self, pod: str, hinted: str) -> End:
        states: list[dict[str, Any]] = [
            {},
            {},
            {},
            {},
            {"ready": None},
            {"ready": False},
            {"ready": False, "serving": False},
            {"ready": False, "serving": True, "terminating": True},
            {"ready": False, "serving": True, "terminating": True},
            {"ready": False, "serving": False, "terminating": True},
            {"ready": True, "serving": True, "terminating": False},
        ]
        end = End(pod, **self.random.choice(states), placed=not self._likely(0.05))
        hint = hinted if hinted != "some" else self.random.choice(("", "zones"))
        if hint in ("zones", "both"):
            end.zones = self.random.choice((("zone-a",), ("zone-b",), ("zone-a", "zone-b"), ("zone-c",)))
        if hint in ("nodes", "both"):
            end.nodes = self.random.choice((("node1",), ("node2",), ("node1", "node2")))
        return end


def _defined(slices: list[list[End]]) -> list[list[End]]:
    """If several slices have an endpoint in different states, kube-proxy takes one by the order of a Go map; only a
    terminating one never has priority. So copies in several slices are equal except for that.
    """
    copies: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for at, ends in enumerate(slices):
        for place, end in enumerate(ends):
            copies.setdefault((end.pod, bool(end.terminating)), []).append((at, place))
    for (first, where), *others in copies.values():
        if any(at != first for at, _ in others):
            for at, place in others:
                slices[at][place] = slices[first][where]
    return slices


def _valid(service: Svc) -> Svc:
    """Without fields that the API server accepts only for other kinds of services, and without what cannot be
    compared.
    """
    left_out = set() if service.load_balancer else {"loadBalancerSourceRanges"}
    if not (service.load_balancer or service.external or any(port.node_port for port in service.ports)):
        left_out.add("externalTrafficPolicy")
    made = replace(service, spec={name: value for name, value in service.spec.items() if name not in left_out})
    if "sessionAffinity" in made.spec:
        # Then the endpoint is not compared, but its port is.
        made.ports_of_slice = {}
    return made
