# SPDX-License-Identifier: Apache-2.0
"""Packers for the keys and values of the service maps, precompiled from the object's BTF."""

from __future__ import annotations

import sys
from struct import Struct

from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.services.model import Frontend, FrontendKind, IPFamily, Protocol, ServicePortName

#: Kubernetes refuses longer names, too; one byte is left for the end of the C string.
NAME_MAX = 63

#: Packed address (all zero for a NodePort), port, protocol.
FrontendAddress = tuple[bytes, int, int]


class Layouts:
    """All layouts of the writer. Attributes by family are dicts by IPFamily."""

    def __init__(self, btf: Btf) -> None:
        def each(pattern: str, *names: str) -> dict[IPFamily, Struct]:
            return {f: btf.struct(pattern.format(f.value)).packer(*names) for f in IPFamily}

        self.u32 = Struct("=I")
        self.frontend_key = each("frontend{}_key", "address", "port", "protocol")
        self.frontend = btf.struct("frontend").packer("service", "kind")
        self.service_config = btf.struct("service_config").packer(
            "service",
            "first_slot",
            "cluster_count",
            "local_count",
            "affinity_seconds",
            "any_endpoints",
            "internal_local",
            "external_local",
            "source_ranges",
            "vip_source_allowed",
        )
        self.service_name = btf.struct("service_name").packer("namespace_name", "name", "port", "family", "protocol")
        self.backend = each("backend{}", "address", "port", "protocol", "service", "local")
        self.endpoint_key = each("endpoint{}_key", "service", "address", "port", "protocol")
        self.endpoint = btf.struct("endpoint").packer("backends")
        self.source_range_key = each("source_range{}_key", "prefix_length", "config", "address")
        self.affinity = btf.struct("affinity").packer("last_used", "backend", "position")
        # services and slots are written as whole words: configuration or backend in the first half, zero in the second.
        for name, field in (("service", "config"), ("slot", "backend")):
            layout = btf.struct(name)
            if layout.size != 8 or layout.fields[field].offset != 0 or layout.fields[field].size != 4:
                raise ValueError(f"struct {name} is not a 64-bit word that begins with {field}")
        self.word_shift = 0 if sys.byteorder == "little" else 32

    def pack_name(self, name: ServicePortName) -> bytes:
        texts = (name.namespace.encode(), name.name.encode(), name.port.encode())
        if any(len(text) > NAME_MAX for text in texts):
            raise ValueError(f"a part of the name is longer than {NAME_MAX} bytes")
        return self.service_name.pack(*texts, name.family, name.protocol)

    def unpack_name(self, raw: bytes) -> ServicePortName:
        """Raises ValueError for an invalid name."""
        namespace, name, port, family, protocol = self.service_name.unpack(raw)
        texts = [part.rstrip(b"\0").decode() for part in (namespace, name, port)]
        return ServicePortName(texts[0], texts[1], texts[2], Protocol(protocol), IPFamily(family))

    def pack_frontend(self, name: ServicePortName, frontend: Frontend) -> bytes:
        """The key of a frontend."""
        return self.frontend_key[name.family].pack(frontend.address, frontend.port, name.protocol)

    def frontend_address(self, key: bytes) -> FrontendAddress:
        """The content of a frontend's key, of either family."""
        for layout in self.frontend_key.values():
            if len(key) == layout.size:
                address, port, protocol = layout.unpack(key)
                return address, port, protocol
        raise ValueError(f"no key of a frontend has {len(key)} bytes")

    def unpack_frontend(self, family: IPFamily, key: bytes, kind: int) -> Frontend:
        address, port, _ = self.frontend_key[family].unpack(key)
        return Frontend(FrontendKind(kind), address, port)
