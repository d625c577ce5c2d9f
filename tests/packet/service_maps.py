# SPDX-License-Identifier: Apache-2.0
"""Reads the service maps from their bytes, and leaves out the numbers (ids, slots).

It does not use the writer's code, so that it can check the writer. An inconsistency is an assertion error.
"""

from __future__ import annotations

import sys
from ipaddress import ip_address
from typing import Any

from pyebpf_proxy.datapath.loader.programs import Loaded

SIZES = {
    **dict.fromkeys(("frontends4", "frontends6", "backends4", "backends6", "endpoints4", "endpoints6"), 512),
    **dict.fromkeys(
        ("service_names", "services", "service_configs", "source_ranges4", "source_ranges6", "affinities"), 256
    ),
    **dict.fromkeys(("socket_revnat4", "socket_revnat6", "socket_flows", "devices"), 64),
    **dict.fromkeys(("node_addresses4", "node_addresses6"), 64),
    "slots": 1024,
}
_KEYS = {"frontends": "frontend{}_key", "endpoints": "endpoint{}_key", "source_ranges": "source_range{}_key"}
_VALUES = {
    "service_names": "service_name",
    "service_configs": "service_config",
    "frontends": "frontend",
    "backends": "backend{}",
    "endpoints": "endpoint",
}
PROTOCOLS = {6: "TCP", 17: "UDP", 132: "SCTP"}


def rows(loaded: Loaded, name: str) -> dict[Any, dict[str, Any]]:
    """Entries of a map by key: a number or a tuple of the key's fields; values are dicts of fields."""
    family = name[-1] if name[-1] in "46" else ""
    base = name.rstrip("46")
    btf = loaded.tc.btf
    result = {}
    for raw_key, raw_value in loaded.maps[name].items():
        key: Any = int.from_bytes(raw_key, sys.byteorder)
        if base in _KEYS:
            fields = btf.struct(_KEYS[base].format(family)).unpack(raw_key)
            assert not fields.pop("zero", 0)
            key = tuple(fields.values())
        value = {"value": raw_value}
        if base in _VALUES:
            value = btf.struct(_VALUES[base].format(family)).unpack(raw_value)
        result[key] = value
    return result


def word(loaded: Loaded, name: str, index: int) -> int:
    """The number in an entry of services or slots. The other fields must be zero: no flow was counted."""
    raw = loaded.maps[name].lookup(index.to_bytes(4, sys.byteorder))
    assert raw is not None
    assert raw[4:] == bytes(4)
    return int.from_bytes(raw[:4], sys.byteorder)


def text(value: bytes) -> str:
    return value.rstrip(b"\0").decode()


def logical(loaded: Loaded, complete: bool = False) -> dict[str, Any]:
    """Service ports by name. ``complete``: no map may have an entry that no active service port needs."""
    configs = rows(loaded, "service_configs")
    names = rows(loaded, "service_names")
    words = loaded.maps["services"].dump()[1]
    active = {number for number in range(SIZES["services"]) if any(words[8 * number : 8 * number + 8])}
    live = {number: word(loaded, "services", number) for number in sorted(active)}
    used_configs, used_backends, used_slots = set(), set(), set()
    all_backends = {family: rows(loaded, f"backends{family}") for family in (4, 6)}
    all_ranges = {family: rows(loaded, f"source_ranges{family}") for family in (4, 6)}
    result: dict[str, Any] = {}
    by_id: dict[int, dict[str, Any]] = {}
    for number, config_id in live.items():
        assert number in names, f"service {number} is active and has no name"
        assert config_id in configs, f"service {number} names configuration {config_id}, which does not exist"
        config, name = configs[config_id], names[number]
        assert config["service"] == number
        used_configs.add(config_id)
        family = name["family"]
        backends = all_backends[family]
        first, cluster, local = config["first_slot"], config["cluster_count"], config["local_count"]
        chosen = []
        for slot in range(first, first + cluster + local):
            assert slot not in used_slots, f"slot {slot} belongs to two service ports"
            used_slots.add(slot)
            backend_id = word(loaded, "slots", slot)
            backend = backends[backend_id]
            assert backend["service"] == number
            assert backend["protocol"] == name["protocol"]
            used_backends.add((family, backend_id))
            place = "local" if backend["local"] else "remote"
            chosen.append(f"{ip_address(backend['address'])}:{backend['port']} {place}")
        full = f"{text(name['namespace_name'])}/{text(name['name'])}:{text(name['port'])}"
        full += f"/{PROTOCOLS[name['protocol']]}/IPv{family}"
        assert full not in result, f"{full} is active twice"
        ranges = [
            f"{ip_address(address)}/{length - 32}" for (length, of, address) in all_ranges[family] if of == config_id
        ]
        flags = [flag for flag in ("any_endpoints", "internal_local", "external_local") if config[flag]]
        flags += [flag for flag in ("source_ranges", "vip_source_allowed") if config[flag]]
        assert bool(ranges) == bool(config["source_ranges"])
        by_id[number] = result[full] = {
            "cluster": chosen[:cluster],
            "local": chosen[cluster:],
            "flags": flags,
            "affinity": config["affinity_seconds"],
            "ranges": sorted(ranges),
            "frontends": {},
            "serving": [],
        }
    used_backends |= _kept_for_sockets(loaded, all_backends, used_backends)
    counts = {}
    for family in "46":
        for backend_id, backend in all_backends[int(family)].items():
            if (int(family), backend_id) in used_backends:
                key = backend["address"], backend["port"], backend["protocol"]
                counts[key] = counts.get(key, 0) + 1
        for (address, port, protocol), value in rows(loaded, f"frontends{family}").items():
            where = f"{ip_address(address)}:{port}/{PROTOCOLS[protocol]}"
            assert value["service"] in by_id, f"{where} leads to service {value['service']}, which is not active"
            by_id[value["service"]]["frontends"][where] = value["kind"]
        for (service, address, port, protocol), value in rows(loaded, f"endpoints{family}").items():
            if service:
                if service in by_id:
                    by_id[service]["serving"].append(f"{ip_address(address)}:{port}")
                else:
                    assert not complete
            else:
                expected = counts.pop((address, port, protocol), 0)
                assert value["backends"] == expected if complete else value["backends"] >= expected
    assert not counts, "active backends without their endpoint entry"
    for entry in result.values():
        entry["serving"].sort()
        entry["frontends"] = dict(sorted(entry["frontends"].items()))
    if complete:
        assert set(configs) == used_configs
        assert set(names) == set(live)
        every = {(f, number) for f in (4, 6) for number in all_backends[f]}
        assert every == used_backends
        for family in "46":
            assert {of for _, of, _ in all_ranges[int(family)]} <= used_configs
    return dict(sorted(result.items()))


def _kept_for_sockets(
    loaded: Loaded, every: dict[int, dict[Any, Any]], listed: set[tuple[int, Any]]
) -> set[tuple[int, Any]]:
    """UDP backends in no list whose endpoints serve: sockets may still use them."""
    kept = set()
    for family, backends in every.items():
        places = {_place(backends[number]) for of, number in listed if of == family}
        serving = rows(loaded, f"endpoints{family}").keys() - places
        kept |= {
            (family, number)
            for number, backend in backends.items()
            if PROTOCOLS[backend["protocol"]] == "UDP" and _place(backend) in serving
        }
    return kept


def _place(backend: dict[str, Any]) -> tuple[Any, ...]:
    return backend["service"], backend["address"], backend["port"], backend["protocol"]


def wipe(loaded: Loaded) -> None:
    for name, size in (("services", SIZES["services"]), ("slots", SIZES["slots"])):
        numbers = b"".join(i.to_bytes(4, sys.byteorder) for i in range(size))
        loaded.maps[name].update_batch(numbers, bytes(8 * size))
    hints = loaded.maps["address_hints"].mmap()
    hints[:] = bytes(len(hints))
    for name in SIZES:
        if name not in ("services", "slots"):
            loaded.maps[name].delete_batch(loaded.maps[name].dump()[0])
