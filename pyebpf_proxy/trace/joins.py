# SPDX-License-Identifier: Apache-2.0
"""Matches kernel events with decisions by addresses and ports. The functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyebpf_proxy.see import model
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import Protocol
from pyebpf_proxy.trace.events import utc
from pyebpf_proxy.trace.kernel import KernelEvent

#: How many decisions are remembered; the oldest are evicted first.
MOST_FLOWS = 32768
_STATES = (
    *("", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT"),
    *("LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
_ESTABLISHED = 1
Ends = tuple[str, str, str]
#: This kernel function frees the queues of a closed socket: no packet is lost.
_NOT_LOST = "sk_stream_kill_queues"


class Joins:
    """The printed decisions. ``own``: inode number of this process's network namespace."""

    def __init__(self, reasons: Mapping[int, str], device: Callable[[int], str], own: int) -> None:
        self._reasons = reasons
        self._device = device
        self._own = own
        self._flows: dict[Ends, model.Decision] = {}

    def remember(self, decision: model.Decision) -> None:
        """Remember a decision by the addresses that the client sees, and by those that the endpoint sees."""
        self._put(decision, decision.source, decision.destination)
        if decision.endpoint:
            self._put(decision, decision.masqueraded_as or decision.source, decision.endpoint)
        while len(self._flows) > MOST_FLOWS:
            del self._flows[next(iter(self._flows))]

    def _put(self, decision: model.Decision, client: str, server: str) -> None:
        key = (decision.protocol, client, server)
        # Remove the key first, so that it becomes the youngest entry.
        self._flows.pop(key, None)
        self._flows[key] = decision

    def line(self, event: KernelEvent, booted: float) -> model.KernelDrop | model.TcpState | None:
        """The line for a kernel event, if a decision on its flow is known."""
        if event.where == _NOT_LOST:
            return None
        try:
            protocol = Protocol(event.protocol).name
        except ValueError:
            return None
        source = format_address_port(bytes.fromhex(event.source), event.source_port)
        destination = format_address_port(bytes.fromhex(event.destination), event.destination_port)
        found = self._find(protocol, source, destination)
        if found is None:
            return None
        client, frontend, service = found.source, found.destination, found.service
        time, netns = utc(booted + event.when / 1e9), event.netns if event.netns != self._own else 0
        if event.state:
            return model.TcpState(
                time=time,
                protocol=protocol,
                source=source,
                destination=destination,
                client=client,
                frontend=frontend,
                service=service,
                before=_STATES[event.reason] if event.reason < len(_STATES) else str(event.reason),
                now="ESTABLISHED" if event.state == _ESTABLISHED else "CLOSE",
                netns=netns,
            )
        return model.KernelDrop(
            time=time,
            protocol=protocol,
            source=source,
            destination=destination,
            client=client,
            frontend=frontend,
            service=service,
            reason=self._reasons.get(event.reason, f"reason {event.reason:#x}"),
            where=event.where,
            device=self._device(event.ifindex) if event.ifindex and not netns else "",
            netns=netns,
        )

    def _find(self, protocol: str, one: str, other: str) -> model.Decision | None:
        for client, server in ((one, other), (other, one)):
            for known in (client, client.rpartition(":")[0] + ":0"):
                found = self._flows.get((protocol, known, server))
                if found is not None:
                    return found
        return None
