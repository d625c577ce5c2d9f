# SPDX-License-Identifier: Apache-2.0
"""The maps read with bpftool only: from a VIP to its backends, and the page that shows it (docs/maps.md)."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.lab.addresses import vip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.inspect import examples, follow, shortened
from tests import ROOT
from tests.support.lab_services import Kind, write_nodes, write_services

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PAGE = (ROOT / "docs" / "maps.md").read_text()
HEADERS = "".join(path.read_text() for path in sorted((ROOT / "bpf").glob("*maps.h")))
# Scratch space that is not pinned, rings of events, maps that the kernel cannot list (a queue, and socket storage), and
# one entry of many bytes.
NOT_SHOWN = {"flow_drafts", "dry_results", "decisions", "promotions", "connected_revnat", "socket_translations"}
NOT_SHOWN |= {"udp_filter", "tracked_clients", "straight_flows"}
WEB = Kind("web", 10, externalTrafficPolicy="Local")


def declared() -> dict[str, dict[str, str]]:
    """Types of key and value by map, from the headers."""
    pattern = r"struct \{\n((?:\t__(?:uint|type)\(.*\n)+)\} (\w+) SEC"
    return {
        name: dict(re.findall(r"__type\((key|value), (.*?)\)", body)) for body, name in re.findall(pattern, HEADERS)
    }


def shown() -> dict[str, dict[str, Any]]:
    """The examples of the page, by map."""
    block = PAGE.partition("## An entry of each")[2].partition("```\n")[2].partition("```")[0]
    return {name: json.loads(text) for name, text in re.findall(r"^(\w+)\n  (\{.*\})$", block, re.MULTILINE)}


@pytest.fixture(scope="module")
def types(bpf_objects: Path) -> list[Btf]:
    found = []
    for path in sorted(bpf_objects.glob("*.bpf.o")):
        with Object.open(path) as opened:
            found.append(opened.btf)
    return found


def test_every_map_has_its_row_and_its_example() -> None:
    names = set(declared())
    assert len(names) > 30
    assert names - set(shown()) == NOT_SHOWN
    assert set(shown()) <= names
    rows = "\n".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    assert {name for name in names if f"`{name}`" not in rows} == set()


@pytest.mark.parametrize("name", sorted(set(declared()) - NOT_SHOWN))
def test_an_example_has_the_fields_of_its_type(name: str, types: list[Btf]) -> None:
    entry = shown()[name]
    values = [each["value"] for each in entry["values"]] if "values" in entry else [entry["value"]]
    for part, things in (("key", [entry["key"]]), ("value", values)):
        wanted = declared()[name][part]
        for thing in things:
            if not wanted.startswith("struct "):
                assert isinstance(thing, int)
                continue
            layout = next(btf.struct(wanted[7:]) for btf in types if wanted[7:] in btf._structs)
            assert list(thing) == list(layout.fields)
            for field, value in thing.items():
                if isinstance(value, list) and not isinstance(value[0], dict):
                    assert len(value) in (layout.fields[field].size, layout.fields[field].size // 4)


def test_words_of_the_examples_are_those_of_the_headers() -> None:
    text = "".join(path.read_text() for path in sorted((ROOT / "bpf").glob("*.h")))
    words = set(re.findall(r'"([A-Z][A-Z_0-9]+)"', PAGE.partition("## An entry of each")[2]))
    assert len(words) > 5
    assert {word for word in words if not re.search(rf"^\t{word}\b", text, re.MULTILINE)} == set()


def test_from_a_vip_to_its_backends() -> None:
    with Lab(nodes=2) as lab:
        node = lab.nodes[0]
        WEB.endpoints = (lab.add_pod("web-1", node), lab.add_pod("web-2", lab.nodes[1]))
        write_nodes(lab)
        write_services(lab, WEB)
        lab.nodes[0].agent.start()
        lab.nodes[0].agent.wait_synced()
        pins = node.agent.pin("frontends4").parent
        for address, cluster in ((vip(10).v4, "10.244.{}.10"), (vip(10).v6, "fd00:10:244:{}::10")):
            steps = list(follow(node, pins, address, 80))
            assert steps[0].entry["value"]["kind"] == "LOAD_BALANCER"
            backends = [step.entry["value"] for step in steps if _is_backend(step.command)]
            found = [(_text(each["address"]), each["local"]) for each in backends]
            here, there = cluster.format(1), cluster.format(2)
            # The cluster list, then the local one.
            assert found == [(here, 1), (there, 0), (here, 1)]
            assert [each["port"] for each in backends] == [8080] * 3
        examples_shown = {name: entry for name, entry, _ in examples(node, pins)}
        assert {name for name in examples_shown if name not in shown()} <= NOT_SHOWN
        for name in examples_shown.keys() & shown().keys():
            entry = examples_shown[name]
            if entry is not None and "value" in entry and isinstance(entry["value"], dict):
                assert list(entry["value"]) == list(shown()[name]["value"]), name


def test_a_long_array_is_shortened() -> None:
    """Some maps are one array of many bytes. Addresses and the words of structures are shown in full."""
    address = list(range(16))
    entry = {"key": 0, "value": {"complete": 1, "noted": [7] * 65536, "way": [{"address": address}]}}
    shown = {"complete": 1, "noted": [*[7] * 32, "… 65504 more"], "way": [{"address": address}]}
    assert shortened(entry) == {"key": 0, "value": shown}


def _is_backend(command: str) -> bool:
    return "backends" in command


def _text(address: list[int]) -> str:
    return str(ip_address(bytes(address)))


def test_the_commands_of_the_page_are_those_that_are_run() -> None:
    commands = re.findall(r"^# (bpftool map lookup pinned \w+ key [\d ]+\d)", PAGE, re.MULTILINE)
    maps = [command.split()[4] for command in commands]
    assert maps == ["frontends4", "services", "service_configs", "slots", "backends4", "slots", "backends4"]
    assert commands[0].endswith("key 10 96 0 10 80 0 6 0")
