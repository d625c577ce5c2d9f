# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy lab inspect``: the maps of a node, read by bpftool (docs/maps.md).

It knows no layouts: bpftool formats the entries by the type information of each map.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Node

_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
#: Maps whose entries the kernel does not list, by type.
_NOT_LISTED = {"queue", "sk_storage"}
#: Elements of an array that are printed.
_SHOWN = 32


class Step(NamedTuple):
    """One command and the entry that it printed."""

    command: str
    entry: dict[str, Any]


def follow(node: Node, pins: Path, address: str, port: int, protocol: str = "TCP") -> Iterator[Step]:
    """Follow the address of a service to its backends, one ``bpftool map lookup`` after the other."""
    packed = ip_address(address).packed
    family = 4 if len(packed) == 4 else 6
    key = [*packed, *_bytes(port, 2), _PROTOCOLS[protocol], 0]
    step = _lookup(node, pins / f"frontends{family}", key)
    yield step
    yield (step := _lookup(node, pins / "services", _bytes(step.entry["value"]["service"], 4)))
    yield (step := _lookup(node, pins / "service_configs", _bytes(step.entry["value"]["config"], 4)))
    config = step.entry["value"]
    for slot in range(config["first_slot"], config["first_slot"] + config["cluster_count"] + config["local_count"]):
        yield (step := _lookup(node, pins / "slots", _bytes(slot, 4)))
        yield _lookup(node, pins / f"backends{family}", _bytes(step.entry["value"]["backend"], 4))


def _bytes(number: int, size: int) -> list[int]:
    """A number as arguments of bpftool: its bytes in the machine's order."""
    return list(number.to_bytes(size, sys.byteorder))


def _lookup(node: Node, pin: Path, key: list[int]) -> Step:
    words = ["map", "lookup", "pinned", str(pin), "key", *map(str, key)]
    found = json.loads(node.namespace.run("bpftool", "-j", *words))
    return Step(f"bpftool map lookup pinned {pin.name} key {' '.join(map(str, key))}", found["formatted"])


def examples(node: Node, pins: Path) -> Iterator[tuple[str, dict[str, Any] | None, int]]:
    """Every map that can be listed: its name, a non-empty entry or None, and the number of non-empty entries."""
    for pin in sorted(pins.iterdir()):
        if json.loads(node.namespace.run("bpftool", "-j", "map", "show", "pinned", str(pin)))["type"] in _NOT_LISTED:
            continue
        shown = json.loads(node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(pin)))
        entries = [entry["formatted"] for entry in shown if "formatted" in entry]
        filled = [entry for entry in entries if _is_filled(entry)]
        yield pin.name, filled[0] if filled else None, len(filled)


def _is_filled(entry: dict[str, Any]) -> bool:
    """Whether an entry is not empty. Arrays have an entry for every index; one with only zeros counts as empty."""
    if "values" in entry:
        return any(_is_filled({"value": each["value"]}) for each in entry["values"])
    return ("key" in entry and isinstance(entry["key"], dict)) or _is_set(entry["value"])


def _is_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    if isinstance(value, list):
        return any(map(_is_set, value))
    return bool(value)


def shortened(value: Any) -> Any:
    """An entry without the ends of long arrays: a filter has 65 536 elements, an address 16."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        rest = len(value) - _SHOWN
        return [*map(shortened, value[:_SHOWN]), *([f"… {rest} more"] if rest > 0 else ())]
    return value


def tour(lab: Lab) -> None:
    """Print all maps, after some requests that fill them."""
    node = lab.nodes[0]
    pins = node.agent.pin("frontends4").parent
    for address, port, protocol in (
        ("203.0.113.10", 80, "tcp"),
        ("203.0.113.30", 80, "tcp"),
        ("203.0.113.10", 53, "udp"),
    ):
        lab.client.call(ask, address, port, protocol)
    node.namespace.call(ask, "10.96.0.10", 53, "udp")
    print(f"# cd {pins}        on {node.name}\n")
    print("From the ClusterIP 10.96.0.10:80 to its backends:\n")
    for step in follow(node, pins, "10.96.0.10", 80):
        print(f"# {step.command}\n  {json.dumps(step.entry)}")
    print("\nEvery map, and one of its entries (bpftool map dump pinned NAME):\n")
    for name, entry, count in examples(node, pins):
        print(f"{name} ({count})\n  {json.dumps(shortened(entry)) if entry is not None else 'empty'}")
