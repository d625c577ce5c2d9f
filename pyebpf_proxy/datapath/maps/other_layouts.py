# SPDX-License-Identifier: Apache-2.0
"""Maps of another layout, from an agent of another version: takes over what connections need, then removes the maps.

That is session affinity, the translations and endpoints of UDP sockets, and the kernel's flows of the fast path, whose
source ports no young flow may take. Everything else is written anew from the objects. Service ports and endpoints have
other ids in the new maps, so those in what clients and sockets remember are translated, and flows get none
(maps/former_flows.py). Maps whose keys or values have another size cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from pyebpf_proxy.datapath.connections.conntrack_counts import Route
from pyebpf_proxy.datapath.connections.drain import drain
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.former_flows import take_over_flows
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.maps.resize import merge
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.node import cgroups
from pyebpf_proxy.datapath.node.xdp import release
from pyebpf_proxy.services.model import IPFamily, ServicePort, ServicePortName

#: What the ids in the maps below mean.
_IDS = ("service_names", "backends4", "backends6")
#: Which endpoint a client, or an unconnected UDP socket of the node, uses. Values of both are a struct affinity.
_CLIENTS, _SOCKET_FLOWS = "affinities", "socket_flows"
#: The destination of a socket as its application sees it. They have no ids.
_SOCKETS = ("socket_revnat4", "socket_revnat6")


class OtherLayouts:
    """All other layouts next to ``pins``. Raises BpfError if the kernel refuses something that should always work."""

    def __init__(self, pins: Path, loaded: Loaded, writer: Writer) -> None:
        others = pins.parent.glob("v*") if pins.parent.is_dir() else ()
        self.folders = sorted(path for path in others if path != pins and re.fullmatch(r"v\d+", path.name))
        self._maps = loaded.maps
        self._btf = loaded.tc.btf
        self._layouts = Layouts(loaded.tc.btf)
        self._writer = writer

    def drain(self) -> None:
        """Promote flows that only the programs of other layouts know, before those programs are replaced."""
        for folder in self.folders:
            drain(folder)
            if "flows" in self._maps:
                pins = folder / "maps"
                take_over_flows(pins / "flows", pins / "fast_path", self._maps["flows"], self._btf)

    def take_over(self) -> int:
        """Take over session affinity and sockets; how many clients. Can be repeated: the newest connection counts."""
        for folder in self.folders:
            self._take_over_sockets(folder / "maps")
        return sum(self._take_over(folder / "maps") for folder in self.folders)

    def release_xdp(self) -> None:
        """Detach the XDP programs of the other layouts: a device can have one. OSError."""
        for folder in self.folders:
            release(folder / "xdp")

    def retire(self) -> None:
        """The new programs are attached: take over what was written meanwhile, and remove the other layouts."""
        self.take_over()
        for folder in self.folders:
            cgroups.detach(folder / "links")
            for inner in [path for path in folder.iterdir() if path.is_dir()]:
                for pin in inner.iterdir():
                    pin.unlink(missing_ok=True)
                inner.rmdir()
            folder.rmdir()

    def _take_over_sockets(self, pins: Path) -> None:
        for name in _SOCKETS:
            if name not in self._maps or not (pins / name).exists():
                continue
            with closing(Map.open_pinned(pins / name)) as old:
                new = self._maps[name]
                if (old.key_size, old.value_size) == (new.key_size, new.value_size):
                    merge(list(old.items()), new, with_time=False)

    def _take_over(self, pins: Path) -> int:
        """Takes over which endpoints are used; how many clients have session affinity."""
        with ExitStack() as stack:
            old: dict[str, Map] = {}
            for name in (*_IDS, _CLIENTS, _SOCKET_FLOWS):
                if name in self._maps and (pins / name).exists():
                    opened = Map.open_pinned(pins / name)
                    stack.callback(opened.close)
                    present = self._maps[name]
                    if (opened.key_size, opened.value_size) == (present.key_size, present.value_size):
                        old[name] = opened
            if not all(name in old for name in _IDS):
                return 0
            ids = _Ids(old, self._layouts, self._writer)
            clients = list(self._clients(old[_CLIENTS], ids)) if _CLIENTS in old else []
            merge(clients, self._maps[_CLIENTS], with_time=True)
            if _SOCKET_FLOWS in old:
                merge(list(self._socket_flows(old[_SOCKET_FLOWS], ids)), self._maps[_SOCKET_FLOWS], with_time=True)
            return len(clients)

    def _clients(self, old: Map, ids: _Ids) -> Iterator[tuple[bytes, bytes]]:
        for key, value in old.items():
            last_used, backend, _ = self._layouts.affinity.unpack(value)
            plan, number = ids.plan(key[:4]), ids.backend(key[:4], backend)
            if plan is not None and plan.affinity_seconds and number:
                yield ids.service(plan) + key[4:], self._layouts.affinity.pack(last_used, number, 0)

    def _socket_flows(self, old: Map, ids: _Ids) -> Iterator[tuple[bytes, bytes]]:
        for key, value in old.items():
            cookie, service, kind = key[:8], key[8:12], key[12:]
            # `position`: when the flow began, and whether it was answered. That stays true.
            last_used, backend, position = self._layouts.affinity.unpack(value)
            if not any(service):
                # No flow, but a mark: the proxy set the masquerade bit of the socket.
                yield key, value
                continue
            plan, number = ids.plan(service), ids.backend(service, backend)
            # Without a backend, tc chooses the endpoint for this socket, which conntrack keeps.
            if plan is not None and (number or not backend):
                yield cookie + ids.service(plan) + kind, self._layouts.affinity.pack(last_used, number, position)


class _Ids:
    """Translates ids of the maps ``old`` into those of the writer."""

    def __init__(self, old: dict[str, Map], layouts: Layouts, writer: Writer) -> None:
        self._layouts = layouts
        self._writer = writer
        self._names: dict[bytes, ServicePortName] = {}
        for key, value in old["service_names"].items():
            with suppress(ValueError):  # not a name
                self._names[key] = layouts.unpack_name(value)
        self._endpoints: dict[int, tuple[bytes, int]] = {
            layouts.u32.unpack(key)[0]: layouts.backend[family].unpack(value)[:2]
            for family in IPFamily
            for key, value in old[f"backends{family.value}"].items()
        }
        #: Many clients and sockets use the same endpoint, and each search reads all endpoints of its service port.
        self._found: dict[tuple[bytes, int], int] = {}

    def plan(self, service: bytes) -> ServicePort | None:
        """The service port that has this id in the old maps; None if it does not exist any more."""
        name = self._names.get(service)
        try:
            return self._writer[name] if name is not None else None
        except KeyError:
            return None

    def service(self, plan: ServicePort) -> bytes:
        """The current id of a service port."""
        return self._layouts.u32.pack(self._writer.service_id(plan.name))

    def backend(self, service: bytes, old: int) -> int:
        """The current id of a service port's endpoint; 0: it is not one."""
        number = self._found.get((service, old))
        if number is None:
            number = self._found[service, old] = self._search(service, old)
        return number

    def _search(self, service: bytes, old: int) -> int:
        plan = self.plan(service)
        if plan is None or not plan.frontends or old not in self._endpoints:
            return 0
        address, port = self._endpoints[old]
        frontend = plan.frontends[0]
        route = Route(plan.name.protocol, frontend.address, frontend.port, address, port)
        return next((number for _, number in self._writer.backends_of([route])), 0)
