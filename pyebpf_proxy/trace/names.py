# SPDX-License-Identifier: Apache-2.0
"""Lookups of names for events: services, devices, masquerade addresses, pods."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Self

from pyebpf_proxy.datapath.connections import ctnetlink
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.see import local
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.partial_maps import DestinationLookup
from pyebpf_proxy.see.pods import Pods
from pyebpf_proxy.see.programs import device_name
from pyebpf_proxy.see.services import name_text
from pyebpf_proxy.see.state import read_names
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import ServicePortName
from pyebpf_proxy.trace.events import Event, Names

#: Seconds between two reads of the names.
_PATIENCE = 1.0


class Lookup:
    """Looks up names in maps and conntrack, and asks the agent for pods. An unknown service id causes a new read."""

    def __init__(self, maps: Pinned, directory: Path) -> None:
        self._maps = maps
        self._pods = Pods(lambda addresses: local.pods(directory, addresses))
        self._names: dict[int, ServicePortName] = {}
        self._read_at = -_PATIENCE
        self._devices: dict[int, str] = {}
        self._destinations = DestinationLookup(maps)
        self._conntrack = RequestSocket(NETLINK_NETFILTER)
        self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._conntrack.__exit__(kind, error, at)

    def read(self) -> Mapping[ServicePortName, int]:
        """The current ids of service ports."""
        self._names, _ = read_names(self._maps)
        self._read_at = time.monotonic()
        return {name: number for number, name in self._names.items()}

    @property
    def names(self) -> Names:
        """The lookups for :func:`events.view`."""
        return Names(self._service, self._device, self._pods.name, self._masqueraded_as)

    def look(self, events: Iterable[Event]) -> None:
        """Look up the pods of these events before they are shown."""
        self._pods.look({place[0] for event in events for place in (event.source, event.endpoint) if place is not None})

    def _service(self, event: Event) -> str:
        # The programs may decide about a new service before its name has been read.
        number = event.service or self._destinations.service(*event.destination, event.protocol)
        if number and number not in self._names and time.monotonic() - self._read_at > _PATIENCE:
            self.read()
        name = self._names.get(number)
        return name_text(name) if name is not None else ""

    def _device(self, ifindex: int) -> str:
        if ifindex not in self._devices:
            self._devices[ifindex] = device_name(ifindex)
        return self._devices[ifindex]

    def _masqueraded_as(self, event: Event) -> str:
        """The masquerade address, from the flow table or conntrack, which has an entry once the packet was sent."""
        if event.reason == "new_flow_fast":
            return self._young_masqueraded_as(event)
        try:
            entry = ctnetlink.lookup(self._conntrack, event.protocol, event.source, event.destination)
        except OSError:
            return ""
        if entry is None or entry.reply is None or entry.reply.destination == event.source[0]:
            return ""
        return format_address_port(*entry.reply.ends[1])

    def _young_masqueraded_as(self, event: Event) -> str:
        value = self._maps.map("flows").lookup(
            self._flow_key.pack(
                event.source[0].ljust(16, b"\0"),
                event.destination[0].ljust(16, b"\0"),
                event.source[1],
                event.destination[1],
                int(event.protocol),
                len(event.source[0]) == 16,
            )
        )
        if value is None:
            return ""
        (rewrite,) = self._maps.packer("flow", "rewrite").unpack(value)
        source, port = self._maps.packer("flow_rewrite", "source", "source_port").unpack(rewrite)
        return format_address_port(source[: len(event.source[0])], port)

    @cached_property
    def _flow_key(self) -> Struct:
        return self._maps.packer(
            "flow_key", "source", "destination", "source_port", "destination_port", "protocol", "ipv6"
        )
