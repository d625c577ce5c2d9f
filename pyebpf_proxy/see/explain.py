# SPDX-License-Identifier: Apache-2.0
"""``explain``: what would happen to a packet, and why. It applies the rules, and compares with the real program."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from pyebpf_proxy.common.digits import port_number
from pyebpf_proxy.datapath.node.plan import IFA_F_SECONDARY, SCOPE_UNIVERSE
from pyebpf_proxy.see import dryrun, facts, local, model, no_endpoints, pods, programs, routes, state
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT, QuestionError, SeeError, near
from pyebpf_proxy.see.decide import Decision, Packet, World, decide
from pyebpf_proxy.see.diff import KINDS
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.partial_maps import reached
from pyebpf_proxy.see.paths import Paths
from pyebpf_proxy.see.programs import Device, Programs, device_name
from pyebpf_proxy.see.services import name_text, service_view
from pyebpf_proxy.see.state import Backend
from pyebpf_proxy.see.text import ago, terminal
from pyebpf_proxy.services.addresses import format_address, format_address_port, parse_address
from pyebpf_proxy.services.model import FrontendKind, Protocol

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted

#: The route is looked up for at most this many endpoints.
_MOST_ROUTES = 16
_PORT = 49152
_ATTEMPTS = 3
_NO_ROUTE = "no route"


class Node:
    """The node's state that decides about packets, read once."""

    def __init__(self, maps: Pinned, attached: Programs, agent_state: local.State | None = None) -> None:
        """``agent_state``: the agent's state (see/local.py); None if the agent does not answer."""
        if attached.settings is None:
            raise SeeError(
                attached.hidden
                or "no program is attached to any device, so packets are not changed: see pyebpf-proxy status"
            )
        self.maps = maps
        self.attached = attached
        self.settings = attached.settings
        self.agent_state = agent_state or local.NOTHING
        self.own: dict[bytes, bool] = {}
        for family in "46":
            value, key = maps.packer("node_address", "node_ports"), maps.packer(f"address{family}", "address")
            rows = maps.rows(f"node_addresses{family}", key, value)
            self.own |= {address: bool(served) for (address,), (served,) in rows}
        rows = maps.rows("devices", Struct("=I"), maps.packer("node_device", "bridge", "pod_source"))
        self.bridges: dict[int, int] = {}
        pods = set()
        for (device,), (bridge, pod_source) in rows:
            self.bridges[device] = bridge
            if pod_source:
                pods.add(device)
        self.world = World(self.settings, self.own, frozenset(pods), bool(attached.links))

    def entrance(self, source: bytes, name: str | None) -> int:
        """The ingress device of a packet from this source: the device of the route to it; 0 if it is this node."""
        if name is not None:
            known = {device.name: device for device in self.attached.devices}
            if name not in known:
                raise QuestionError(f"no program is attached to a device {name}, or should be{near(name, known)}")
            return known[name].ifindex
        if source in self.own or _is_loopback(source):
            return 0
        route = routes.lookup_route(source)
        if route is None:
            raise QuestionError(f"no route to {format_address(source)}: name the ingress device with --device")
        if route.local:
            return 0
        ports = [device for device, bridge in self.bridges.items() if bridge == route.device]
        return min(ports) if ports else route.device

    def unbound(self, packet: Packet) -> Packet:
        """A packet from loopback to another address, as an unbound socket of this node sends it: from an own address.

        likely_source() of bpf/translate.h; session affinity and source ranges see this address.
        """
        if not _by_socket(packet, self) or not _is_loopback(packet.source) or _is_loopback(packet.destination):
            return packet
        own = self.settings[f"node_address{4 if len(packet.source) == 4 else 6}"]
        return packet._replace(source=packet.destination if packet.destination in self.own else own)

    def program_on(self, device: int) -> Device | None:
        """The device, if a program is attached to it."""
        found = (each for each in self.attached.devices if each.ifindex == device and each.program is not None)
        return next(found, None)

    def ip_device(self, device: int) -> int:
        """The device that the IP layer sees: for a bridge port, the bridge."""
        return self.bridges.get(device) or device

    def masquerade(self, route: routes.Route, destination: bytes) -> bytes:
        """The address with which netfilter masquerades: the device's address that is nearest to the next hop.

        If the device has none, as those of Calico's pods, addresses of other devices count, in their order. This
        approximates inet_select_addr() and ipv6_dev_get_saddr() of the kernel.
        """
        hop = int.from_bytes(destination if len(destination) == 16 else route.gateway or destination, "big")
        bits = 8 * len(destination)
        known = [
            each
            for each in self.attached.node.addresses.values()
            if each.scope == SCOPE_UNIVERSE
            and each.address.max_prefixlen == bits
            and not (bits == 32 and each.flags & IFA_F_SECONDARY)
        ]
        there = [each for each in known if each.device == route.device]
        elsewhere = sorted(known, key=lambda each: each.device)
        if bits == 32:
            near = [
                each
                for each in there
                if hop >> bits - each.prefix_length == int(each.peer) >> bits - each.prefix_length
            ]
            best = next(iter([*near, *there, *elsewhere]), None)
        else:
            best = min(there or elsewhere, key=lambda each: (int(each.address) ^ hop).bit_length(), default=None)
        own: bytes = self.settings[f"node_address{4 if bits == 32 else 6}"]
        return best.address.packed if best is not None else own


def _is_loopback(address: bytes) -> bool:
    return ip_address(address).is_loopback


def explain(maps: Pinned, packet: Packet, node: Node, known: state.State, wanted: Wanted | None) -> model.Explanation:
    """The whole answer."""
    decision = decide(packet, node.world, known)
    _require_program(packet, node, decision)
    view = model.Explanation(
        source=format_address_port(packet.source, packet.source_port),
        destination=format_address_port(packet.destination, packet.destination_port),
        protocol=packet.protocol.name,
        device=device_name(packet.device) if packet.device else "",
        service=name_text(decision.service.name) if decision.service is not None else "",
        frontend=decision.kind,
        verdict=decision.verdict,
        reason=decision.reason,
        steps=decision.steps,
        endpoints=[],
        left_out=[],
        program=model.ProgramView(ran=False),
        disagreements=[],
    )
    bound = None
    if decision.service is not None:
        view.left_out = list(_left_out(decision, known, wanted))
        if wanted is not None and decision.verdict == "served":
            for_cluster, for_local = wanted.notes(decision.service.name)
            if note := for_local if decision.local else for_cluster:
                decision.say(note)
        bound = _affinity(maps, packet, decision)
        if any(each.address == packet.source for each in decision.eligible):
            decision.say("the source is an endpoint itself: masqueraded if it is selected (hairpin)")
        if decision.verdict == "served":
            if _by_socket(packet, node):
                other = "; masqueraded if it is bound to another address" if decision.masquerade else ""
                decision.say(f"the socket connects to the endpoint from the route's source address{other}")
            elif _by_pod_socket(maps, packet, node, decision):
                decision.say(
                    "socketLB: all: except for one connection a minute, sockets of this pod connect to an endpoint"
                    " directly (path socket); the path below is for packets that reach the program"
                )
            routed = decision.eligible[:_MOST_ROUTES]
            sockets = bool(node.attached.links)
            paths = Paths(maps, node.attached, sockets, packet, node.agent_state)
            view.endpoints = [
                _choice(packet, each, decision, node, paths, each in routed) for each in decision.eligible
            ]
            if packet.device and decision.masquerade and not all(each.masquerade for each in view.endpoints):
                decision.say("an endpoint in the network of this node itself sees the client's address")
        if not decision.service.any_endpoints:
            name = decision.service.name
            for why in no_endpoints.reasons(maps.directory, wanted, [name]).values():
                decision.say(f"{name_text(name)}: {why}")
    elif wanted is not None:
        _add_not_served(maps, packet, node, wanted, decision)
    view.program = _program(maps, packet, node, bound)
    view.xdp = _xdp(maps, packet, node, bound)
    if view.program.ran and not _is_known(packet, view):
        view.disagreements = list(disagreements(view, decision, view.program))
        if view.xdp is not None and view.xdp.verdict != "left":
            view.disagreements += [f"XDP: {each}" for each in disagreements(view, decision, view.xdp)]
    _add_unknown_address(packet, node, decision, view)
    _add_unreachable(view)
    _add_full_conntrack(view)
    return view


def _require_program(packet: Packet, node: Node, decision: Decision) -> None:
    """Without a program on the ingress device nothing is decided: the packet goes on as it is."""
    if not packet.device or decision.verdict == "left" or node.program_on(packet.device) is not None:
        return
    decision.verdict, decision.reason = "left", ""
    decision.say(f"no program is attached to {device_name(packet.device)}: the packet is not changed")
    if node.settings["nft_mode"] and decision.kind == KINDS[FrontendKind.CLUSTER_IP]:
        decision.verdict = "dropped"
        decision.say("mode nftables: nftables drops packets to a cluster IP that no program has handled")


def _add_not_served(maps: Pinned, packet: Packet, node: Node, wanted: Wanted, decision: Decision) -> None:
    """Name the service ports that specify this address, but are not served there, with the agent's reasons."""
    address, port, protocol = packet.destination, packet.destination_port, packet.protocol
    for name in wanted.specifying(address, port, protocol, node.own.get(address, False)):
        decision.say(f"{name_text(name)} specifies this address and port, but is not served there")
        for why in local.losses(maps.directory, [f"{name.namespace}/{name.name}"]):
            decision.say(why)


def _add_unknown_address(packet: Packet, node: Node, decision: Decision, view: model.Explanation) -> None:
    """What nftables does in mode nftables to a packet that the programs leave (spec/service-semantics §9)."""
    local = packet.destination in node.own or _is_loopback(packet.destination)
    if not node.settings["nft_mode"] or decision.service is not None or (packet.device and local):
        return
    try:
        known = facts.unknown_address(node.maps.directory, packet.destination)
    except OSError as error:
        view.steps.append(f"mode nftables: the agent's nftables table cannot be read: {error.strerror}")
        return
    where = f"mode nftables: {format_address(packet.destination)}"
    if known == "cluster IP":
        view.verdict = "refused"
        view.steps.append(f"{where} is a cluster IP, and nftables refuses ports that its Service does not have")
    elif known:
        view.verdict = "dropped"
        view.steps.append(f"{where} is in a ServiceCIDR, and no Service has it: nftables drops the packet")


def _add_unreachable(view: model.Explanation) -> None:
    """Name the endpoints that the node's routes do not reach. The program selects them all the same."""
    lost = [each.address for each in view.endpoints if each.egress == _NO_ROUTE]
    if view.verdict != "served" or not lost:
        return
    view.steps.append(f"the node has no route to {', '.join(lost)}: such packets do not leave it")
    if len(lost) == len(view.endpoints):
        view.verdict = "dropped"


def _add_full_conntrack(view: model.Explanation) -> None:
    """Check whether conntrack is full: the kernel creates the entry after the programs, which do not see this drop."""
    fill = facts.conntrack_fill()
    if view.verdict != "served" or not view.device or fill is None or not fill.is_full():
        return
    full = f"conntrack is full, {fill.text} entries"
    if any(each.path == "fast" for each in view.endpoints):
        view.steps.append(f"{full}: a new flow through netfilter is dropped, a fast-path flow needs no entry")
        return
    view.verdict = "dropped"
    view.steps.append(f"{full}: the kernel drops new flows, existing flows continue")


def _is_known(packet: Packet, view: model.Explanation) -> bool:
    """Whether the program left the packet because its flow exists. Then no rule applies, and a step is added."""
    if view.program.verdict != "left" or view.verdict == "left":
        return False
    from pyebpf_proxy.see.flows import dump

    wanted = ((packet.source, packet.source_port), (packet.destination, packet.destination_port))
    flow = next(
        (flow for flow in dump() if (flow.client, flow.frontend) == wanted and flow.protocol == packet.protocol), None
    )
    if flow is None:
        return False
    where = format_address_port(*flow.endpoint)
    view.steps.append(f"a flow with these addresses and ports exists ({flow.state}): its packets still go to {where}")
    return True


def _left_out(decision: Decision, known: state.State, wanted: Wanted | None) -> Iterator[model.EndpointView]:
    assert decision.service is not None
    why = {backend.text: text for backend, text in decision.not_eligible}
    for each in service_view(known, decision.service, wanted).endpoints:
        each.left_out = each.left_out or why.get(each.address, "")
        if each.left_out:
            yield each


def _affinity(maps: Pinned, packet: Packet, decision: Decision) -> bytes | None:
    """The client's affinity entry, if there is one."""
    service = decision.service
    if service is None or not service.affinity_seconds or decision.verdict != "served":
        return None
    key = maps.packer("affinity_key", "service", "client").pack(service.id, packet.source.ljust(16, b"\0"))
    value = maps.map("affinities").lookup(key)
    if value is None:
        decision.say(f"session affinity, {service.affinity_seconds} s: this client has no entry yet")
        return None
    last, backend, _ = maps.packer("affinity", "last_used", "backend", "position").unpack(value)
    age = time.clock_gettime(time.CLOCK_MONOTONIC) - last / 1e9
    bound = next((each for each in decision.eligible if each.id == backend), None)
    if age < service.affinity_seconds and bound is not None:
        decision.say(f"session affinity: the client's last connection, {ago(age)}, selected {bound.text}: reused")
        decision.eligible = [bound]
    elif age >= service.affinity_seconds:
        seconds = service.affinity_seconds
        decision.say(f"session affinity, {seconds} s: the client's last connection was {ago(age)}: any endpoint")
    else:
        decision.say("session affinity: the endpoint of the client's last connection is not usable now: any endpoint")
    return key + value


def _by_socket(packet: Packet, node: Node) -> bool:
    """Whether a socket program handles the packet: a process of this node sends it, and it is not SCTP."""
    return not packet.device and node.world.sockets and packet.protocol is not Protocol.SCTP


def _by_pod_socket(maps: Pinned, packet: Packet, node: Node, decision: Decision) -> bool:
    """Whether the socket programs translate for this pod, as translate_for_pod() of bpf/translate.h decides."""
    if not node.settings["pod_sockets"] or packet.protocol is Protocol.SCTP or decision.masquerade:
        return False
    if decision.kind == KINDS[FrontendKind.CLUSTER_IP] and packet.destination in node.own:
        return False
    source = (packet.source.ljust(16, b"\0"), packet.device)
    key, value = maps.packer("pod_key", "family"), maps.packer("pod_source", "address", "device", "served")
    learned = maps.rows("pod_sources", key, value)
    return any(
        family == (6 if len(packet.source) == 16 else 4) and (address, device) == source and served
        for (family,), (address, device, served) in learned
    )


def _choice(
    packet: Packet, backend: Backend, decision: Decision, node: Node, paths: Paths, with_route: bool
) -> model.ChoiceView:
    hairpin = backend.address == packet.source
    masquerade = decision.masquerade or hairpin
    view = model.ChoiceView(
        address=backend.text,
        backend=backend.id,
        local=backend.local,
        masquerade=masquerade,
        masquerade_as="",
        egress="",
    )
    if _by_socket(packet, node):
        # The socket connects directly to the endpoint, from the route's source address.
        view.masquerade = False
    if with_route:
        source = packet.source if packet.device else b""
        route = routes.lookup_route(backend.address, source, node.ip_device(packet.device))
        if route is None:
            view.egress = _NO_ROUTE
        else:
            through = f" through {format_address(route.gateway)}" if route.gateway else ""
            view.egress = f"{device_name(route.device)}{through}"
            hop = route.gateway or backend.address
            silent = f"{format_address(hop)} does not answer on {device_name(route.device)} (ip neigh: FAILED)"
            if not route.local and silent not in decision.steps and routes.is_failed(route.device, hop):
                decision.say(silent)
            path = paths.to(backend, masquerade, route.device)
            view.path, view.path_reason, view.path_why = path.path, path.reason, path.why
            # Masquerading is a matter of the postrouting hook, through which a delivered packet does not pass.
            if packet.device and route.local:
                view.masquerade = False
            if view.masquerade:
                view.masquerade_as = format_address(path.snat or node.masquerade(route, backend.address))
    return view


def _program(maps: Pinned, packet: Packet, node: Node, affinity: bytes | None) -> model.ProgramView:
    if not packet.device:
        why = "the kernel has no test run for socket programs"
        if not _by_socket(packet, node):
            why = f"nftables handles {packet.protocol.name} packets of this node"
        return model.ProgramView(ran=False, why=f"{why}; the answer is from the rules alone")
    device = node.program_on(packet.device)
    if device is None or device.program is None:
        name = device_name(packet.device)
        return model.ProgramView(ran=False, why=f"no program is attached to {name}: its packets are not handled")
    # A test run has an Ethernet header for every tc program.
    name = "tc_ethernet" if device.program.name == "tc_l3" else device.program.name
    return _ran(dryrun.run(maps, name, node.settings, packet, device.mac, affinity))


def _xdp(maps: Pinned, packet: Packet, node: Node, affinity: bytes | None) -> model.ProgramView | None:
    device = next((each for each in node.attached.devices if each.ifindex == packet.device), None)
    if device is None or device.xdp not in ("native", "generic"):
        return None
    return _ran(dryrun.run_xdp(maps, node.settings, packet, device.mac, affinity))


def _ran(out: dryrun.Outcome) -> model.ProgramView:
    return model.ProgramView(
        ran=True,
        verdict=out.verdict,
        counted=out.reasons,
        backend=out.backend,
        masquerade=out.masquerade,
    )


def disagreements(view: model.Explanation, decision: Decision, program: model.ProgramView) -> Iterator[str]:
    """Differences between the program's result and the rules."""
    if program.verdict != view.verdict:
        counted = f" ({', '.join(program.counted)})" if program.counted else ""
        yield f"verdict: {view.verdict} by the rules, {program.verdict} by the program{counted}"
        return
    if view.reason and view.reason not in program.counted:
        yield f"reason: {view.reason} by the rules, the program counted {', '.join(program.counted) or 'nothing'}"
    if view.verdict != "served":
        return
    choice = next((each for each in view.endpoints if each.backend == program.backend), None)
    if choice is None or all(each.id != program.backend for each in decision.eligible):
        yield f"the program selected backend {program.backend}, which is not among the endpoints"
        return
    # The program marks packets before the kernel decides whether they are delivered here.
    marked = choice.masquerade or decision.masquerade
    if marked != program.masquerade:
        yes, no = "masqueraded", "not masqueraded"
        rules, ran = (yes, no) if marked else (no, yes)
        yield f"masquerade: {rules} by the rules, {ran} by the program"


# ---- the question -----------------------------------------------------------------------------------------------


def parse_packet(source: str, destination: str, protocol: str) -> tuple[bytes, int, bytes, int, Protocol]:
    """The packet's addresses, ports and protocol. QuestionError if an argument is invalid."""
    number = Protocol.__members__.get(protocol.upper())
    if number is None:
        raise QuestionError(f"{protocol} is not a protocol of Services: use TCP, UDP or SCTP")
    from_, from_port = _place(source, "SRC")
    to, to_port = _place(destination, "DST")
    if to_port is None:
        raise QuestionError(f"DST needs a port, as in {format_address_port(to, 80)}; put IPv6 addresses in brackets")
    if len(from_) != len(to):
        raise QuestionError(f"{source} and {destination} are of different IP families")
    return from_, from_port if from_port is not None else _PORT, to, to_port, number


def _place(text: str, what: str) -> tuple[bytes, int | None]:
    address, port = text, ""
    if text.startswith("["):
        address, bracket, port = text[1:].partition("]")
        if not bracket or port[:1] not in ("", ":"):
            raise QuestionError(f"{what}: {text} is not an IP address in brackets, with a port after a colon")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        address, _, port = text.partition(":")
    packed = parse_address(address)
    if packed is None:
        raise QuestionError(f"{what}: {address} is not an IP address")
    if not port:
        return packed, None
    number = port_number(port)
    if number is None:
        raise QuestionError(f"{what}: {port} is not a port (1–65535)")
    return packed, number


def ask(
    directory: Path,
    source: str,
    destination: str,
    protocol: str,
    device: str | None = None,
    wanted: Callable[[int], tuple[Wanted | None, str]] = lambda service_ports: (None, ""),
) -> model.Explanation:
    """The answer for arguments as text. Raises SeeError.

    ``wanted`` is called with the number of service ports; the result: the desired state, and why it cannot be read.
    """
    places = parse_packet(source, destination, protocol)
    with Pinned(directory) as maps:
        node = Node(maps, programs.read(maps), local.state(directory))
        packet = node.unbound(asked := Packet(*places, node.entrance(places[0], device)))
        objects, missing = wanted(sum(word != 0 for word in maps.words("services")))
        for _ in range(_ATTEMPTS):
            # The Service may change before the program runs. Only a disagreement that stays is one.
            known = state.read(reached(maps, packet.destination, packet.protocol))
            view = explain(maps, packet, node, known, objects)
            if not view.disagreements:
                break
        if packet != asked:
            view.steps.insert(0, f"a socket of this node has the source address {format_address(packet.source)} here")
        view.objects_missing = missing
    pods.fill_pod_names([*view.endpoints, *view.left_out], pods.pod_name_lookup(directory, objects))
    return view


def run(arguments: argparse.Namespace) -> int:
    """``explain SRC DST [PROTO]``. Exit status 1: refused, dropped or not handled; or rules and program disagree."""
    from pyebpf_proxy.see.explain_text import text
    from pyebpf_proxy.see.output import show
    from pyebpf_proxy.see.run_services import maybe_wanted

    view = ask(
        arguments.directory,
        arguments.source,
        arguments.destination,
        arguments.protocol,
        arguments.device,
        lambda service_ports: maybe_wanted(arguments, service_ports),
    )
    show(arguments, view, text(view, terminal()), (each.address for each in view.endpoints))
    unhandled = bool(view.device and view.service) and not view.program.ran
    wrong = view.verdict in ("refused", "dropped") or view.disagreements or unhandled
    return NOT_RIGHT if wrong else RIGHT
