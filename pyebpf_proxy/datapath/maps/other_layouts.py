# SPDX-License-Identifier: Apache-2.0
"""Maps of another layout, from an agent of another version: takes over what connections need, then removes the maps.

That is session affinity, the translations of UDP sockets, and the kernel's flows of the fast path, whose source ports
no young flow may take. Everything else is written anew from the objects. Service ports and endpoints have other ids in
the new maps, so the affinity of each client is translated, and flows get none (maps/former_flows.py). Maps whose keys
or values have another size cannot be used.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from pyebpf_proxy.datapath.connections.drain import drain
from pyebpf_proxy.datapath.connections.flows import Route
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.former_flows import take_over_flows
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.maps.resize import merge
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.node import cgroups
from pyebpf_proxy.datapath.node.xdp import release
from pyebpf_proxy.services.model import IPFamily, ServicePortName

_READ = ("affinities", "service_names", "backends4", "backends6")
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
        if not all((pins / name).exists() for name in _READ):
            return 0
        with ExitStack() as stack:
            old = {name: Map.open_pinned(pins / name) for name in _READ}
            for opened in old.values():
                stack.callback(opened.close)
            present = {name: self._maps[name] for name in _READ}
            if any((old[n].key_size, old[n].value_size) != (present[n].key_size, present[n].value_size) for n in _READ):
                return 0
            rows = self._translated(old)
            merge(rows, present["affinities"], with_time=True)
            return len(rows)

    def _translated(self, old: dict[str, Map]) -> list[tuple[bytes, bytes]]:
        layouts = self._layouts
        names: dict[bytes, ServicePortName] = {}
        for key, value in old["service_names"].items():
            with suppress(ValueError):  # not a name
                names[key] = layouts.unpack_name(value)
        endpoints = {
            layouts.u32.unpack(key)[0]: layouts.backend[family].unpack(value)[:2]
            for family in IPFamily
            for key, value in old[f"backends{family.value}"].items()
        }
        rows = []
        for key, value in old["affinities"].items():
            last_used, backend, _ = layouts.affinity.unpack(value)
            name = names.get(key[:4])
            if name is not None and backend in endpoints:
                number = self._number(name, *endpoints[backend])
                if number:
                    service = layouts.u32.pack(self._writer.service_id(name))
                    rows.append((service + key[4:], layouts.affinity.pack(last_used, number, 0)))
        return rows

    def _number(self, name: ServicePortName, address: bytes, port: int) -> int:
        """The current id of a service port's endpoint; 0: it is not one."""
        try:
            plan = self._writer[name]
        except KeyError:
            return 0
        if not plan.affinity_seconds or not plan.frontends:
            return 0
        frontend = plan.frontends[0]
        route = Route(name.protocol, frontend.address, frontend.port, address, port)
        return next((number for _, number in self._writer.backends_of([route])), 0)
