# SPDX-License-Identifier: Apache-2.0
"""--datapath-config: every field with valid and invalid values, every error with its path, bounds on bad input."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.cli import main
from pyebpf_proxy.config import datapath_config, flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.datapath_model import API_VERSION, KIND, DatapathConfiguration, Maps, without_effect
from pyebpf_proxy.config.effective import Effective, effective
from pyebpf_proxy.config.loader import ConfigError
from tests import ROOT

HEADER = f"apiVersion: {API_VERSION}\nkind: {KIND}\n"


def read(text: str) -> DatapathConfiguration:
    return datapath_config.decode_text((HEADER + text).encode())


def errors(text: str, header: str = HEADER) -> str:
    with pytest.raises(ValueError) as caught:
        datapath_config.decode_text((header + text).encode())
    output = str(caught.value)
    assert "\n" not in output
    return output


def settings(own: DatapathConfiguration, *arguments: str) -> Effective:
    config = complete(flags.parse([]), lambda text, file: None)
    return effective(config, flags.parse(arguments), own)


def test_without_fields_the_defaults_hold() -> None:
    assert read("") == DatapathConfiguration()
    found = settings(read(""))
    assert (str(found.directory), found.manifests) == ("/run/pyebpf-proxy", None)
    assert (found.socket_lb, found.fast_path) == ("node", "auto")
    assert found.map_sizes["backends4"] == 131072


GOOD: list[tuple[str, str, Any]] = [
    ("directory: /run/other", "directory", "/run/other"),
    ("manifests: /etc/services", "manifests", "/etc/services"),
    ("socketLB: node", "socket_lb", "node"),
    ("socketLB: all", "socket_lb", "all"),
    ('socketLB: "off"', "socket_lb", "off"),
    ("socketLB: off", "socket_lb", "off"),  # a boolean in YAML
    ("externalIPs: checked", "external_ips", "checked"),
    ("externalIPs: strict", "external_ips", "strict"),
    ("externalIPs: unchecked", "external_ips", "unchecked"),
    ("fastPath: false", "fast_path", False),
    ("fastPath: true", "fast_path", True),
    ("fastPath: auto", "fast_path", "auto"),
    ("fastPath: null", "fast_path", "auto"),
    ("fastPathExcludedDevices: [eth0, pod1]", "fast_path_excluded_devices", ["eth0", "pod1"]),
    ("fastPathEntries: 1024", "fast_path_entries", 1024),
    ("fastPathEntries:", "fast_path_entries", None),
    ("xdpDevices: []", "xdp_devices", []),
    ("xdpDevices: [eth0, eth1.7]", "xdp_devices", ["eth0", "eth1.7"]),
    ("xdpDevices: auto", "xdp_devices", ["*"]),
    ("xdpMode: generic", "xdp_mode", "generic"),
    ("maps: {services: 256}", "maps", Maps(services=256)),
    ("maps: {tables: 300, socketPeers4: 2048}", "maps", Maps(service_configs=300, socket_revnat4=2048)),
    ("maps: {serviceNames: 4194304, socketRevnat6: 1024}", "maps", Maps(service_names=4194304, socket_revnat6=1024)),
    ("maps: {}", "maps", Maps()),
    ("maps:", "maps", Maps()),
]


@pytest.mark.parametrize(("text", "field", "value"), GOOD, ids=[case[0] for case in GOOD])
def test_a_good_field(text: str, field: str, value: object) -> None:
    assert getattr(read(text), field) == value


def test_excluded_pods() -> None:
    found = settings(read("socketLB: all\nsocketLBExclude: [10.244.9.0/24, 'fd00:9::/64']"))
    assert found.socket_lb == "all"
    assert [str(network) for network in found.socket_lb_exclude] == ["10.244.9.0/24", "fd00:9::/64"]


def test_fields_without_effect_are_read_and_reported() -> None:
    own = read("lane: netfilter\npodNetwork: [10.0.0.0/8, 'fd00::/48']\n")
    assert without_effect(own) == ["lane", "podNetwork"]
    assert without_effect(read("fastPath: auto")) == []
    assert settings(own) == settings(read(""))


BAD: list[tuple[str, str]] = [
    ("lane: fast", 'lane: must be auto or netfilter, not "fast"'),
    ("lane: 7", "lane: must be auto or netfilter, not 7"),
    ("lane: [auto]", "lane: must be auto or netfilter, not a list"),
    ("directory: run", 'directory: must be an absolute path, not "run"'),
    ('directory: ""', 'directory: must be an absolute path, not ""'),
    ('directory: "/a\\0b"', 'directory: must be an absolute path, not "/a\\x00b"'),
    ("directory: {}", "directory: must be a string, not a mapping"),
    ("manifests: 3", "manifests: must be a string, not 3"),
    ("manifests: ./here", 'manifests: must be an absolute path, not "./here"'),
    ("socketLB: on", "socketLB: must be node, all or off, not true"),
    ("socketLB: pods", 'socketLB: must be node, all or off, not "pods"'),
    ("socketLBExclude: [7]", "socketLBExclude[0]: must be a string, not 7"),
    ("socketLBExclude: [mesh]", 'socketLBExclude[0]: must be a CIDR such as 10.0.0.0/8 or fd00::/48, not "mesh"'),
    ("socketLBExclude: 10.0.0.0/8", 'socketLBExclude: must be a list, not "10.0.0.0/8"'),
    (
        'fastPathExcludedDevices: ["a b"]',
        'fastPathExcludedDevices[0]: must be the name of a network device, not "a b"',
    ),
    ("fastPathEntries: 7", "fastPathEntries: must be from 1024 to 4194304, not 7"),
    ('fastPath: "false"', 'fastPath: must be auto, true or false, not "false"'),
    ("fastPath: 0", "fastPath: must be auto, true or false, not 0"),
    ("xdpDevices: [eth0, 7]", "xdpDevices[1]: must be a string, not 7"),
    ("xdpDevices: [a/b]", 'xdpDevices[0]: must be the name of a network device, not "a/b"'),
    ("xdpDevices: [null]", "xdpDevices[0]: must be a string, not null"),
    ("xdpDevices: eth0", 'xdpDevices: must be a list, not "eth0"'),
    ("podNetwork: [10.0.0.0/8, pods]", 'podNetwork[1]: must be a CIDR such as 10.0.0.0/8 or fd00::/48, not "pods"'),
    ("podNetwork: [10.0.0.0/33]", 'podNetwork[0]: must be a CIDR such as 10.0.0.0/8 or fd00::/48, not "10.0.0.0/33"'),
    ("podNetwork: [10.1.0.0/8]", 'podNetwork[0]: "10.1.0.0/8" has host bits set; did you mean 10.0.0.0/8?'),
    ("podNetwork: [7]", "podNetwork[0]: must be a string, not 7"),
    ("podNetwork: [{}]", "podNetwork[0]: must be a string, not a mapping"),
    ("podNetwork: 10.0.0.0/8", 'podNetwork: must be a list, not "10.0.0.0/8"'),
    ("maps: 3", "maps: must be a mapping of fields, not 3"),
    ("maps: [backends4]", "maps: must be a mapping of fields, not a list"),
    ("maps: {backends4: many}", 'maps.backends4: must be an integer, not "many"'),
    ('maps: {backends4: "512"}', 'maps.backends4: must be an integer, not "512"'),
    ("maps: {backends4: 512.5}", "maps.backends4: must be an integer, not 512.5"),
    ("maps: {backends4: true}", "maps.backends4: must be an integer, not true"),
    ("maps: {backends4: -1}", "maps.backends4: must be from 256 to 4194304, not -1"),
    ("maps: {devices: 65537}", "maps.devices: must be from 64 to 65536, not 65537"),
    ("maps: {slots: 99999999999}", "maps.slots: must be from 256 to 4194304, not 99999999999"),
    ("maps: {backend4: 512}", "maps.backend4: unknown field, did you mean backends4?"),
    ("maps: {service_names: 512}", "maps.service_names: unknown field, did you mean serviceNames?"),
    ("maps: {reasons: 512}", "maps.reasons: unknown field"),
    ("externalIPs: yes", "externalIPs: must be checked, strict or unchecked, not true"),
    ("lanes: auto", "lanes: unknown field, did you mean lane?"),
    ("Lane: auto", "Lane: unknown field, did you mean lane?"),
    ("socketlb: node", "socketlb: unknown field, did you mean socketLB?"),
    ("mode: iptables", "mode: unknown field"),
    ("mode:", "mode: unknown field"),
    (f"{'x' * 500}: 1", f"{'x' * 60}…: unknown field"),
    ("lane: auto\nlane: auto", 'line 4: key "lane" already set in map'),
    ("maps:\n  slots: 512\n  slots: 512", 'line 5: key "slots" already set in map'),
]


@pytest.mark.parametrize(("text", "output"), BAD, ids=[case[0][:40] for case in BAD])
def test_a_bad_field_is_named_by_its_path(text: str, output: str) -> None:
    assert errors(text) == output


@pytest.mark.parametrize("name", [info.alias for info in Maps.model_fields.values()])
def test_every_map_has_its_bounds(name: str) -> None:
    field = next(name_ for name_, info in Maps.model_fields.items() if info.alias == name)
    extra: Any = Maps.model_fields[field].json_schema_extra
    least, most, *_ = extra["size"]
    for size in (least, most):
        assert getattr(read(f"maps: {{{name}: {size}}}").maps, field) == size
    for size in (least - 1, most + 1):
        assert errors(f"maps: {{{name}: {size}}}") == f"maps.{name}: must be from {least} to {most}, not {size}"


def test_all_errors_are_reported_at_once() -> None:
    output = errors("lane: fast\nfoo: 1\nmaps: {backends4: 1, bar: 2}\nxdpDevices: [a, 1]\nfastPath: 1\n")
    assert output.startswith("[")
    assert output.endswith("]")
    paths = ("lane: ", "foo: ", "maps.backends4: ", "maps.bar: ", "xdpDevices[1]: ", "fastPath: ")
    assert [path for path in paths if path not in output] == []
    assert output.count(": must be") == 4


def test_many_errors_are_counted() -> None:
    output = errors("\n".join(f"field{number}: 1" for number in range(150)))
    assert output.count("unknown field") == 100
    assert output.endswith(", and 50 more]")


@pytest.mark.parametrize(
    ("header", "output"),
    [
        ("", f"[apiVersion: is missing, must be {API_VERSION}, kind: is missing, must be {KIND}]"),
        (f"kind: {KIND}\n", f"apiVersion: is missing, must be {API_VERSION}"),
        (
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n",
            f'[apiVersion: must be {API_VERSION}, not "kubeproxy.config.k8s.io/v1alpha1",'
            f' kind: must be {KIND}, not "KubeProxyConfiguration"]',
        ),
        ("[1, 2]", "the file holds no fields"),
        ("text", "the file holds no fields"),
        ("lane: [", "yaml: line 1: did not find expected node content"),
        ("{", "couldn't get version/kind; json parse error: line 1: expecting property name enclosed in double quotes"),
    ],
)
def test_another_document(header: str, output: str) -> None:
    assert errors("", header) == output


def test_json_is_read_with_its_duplicates() -> None:
    text = f'{{"apiVersion": "{API_VERSION}", "kind": "{KIND}", "lane": "netfilter", "maps": {{"slots": 512}}}}'
    assert datapath_config.decode_text(text.encode()).maps.slots == 512
    assert errors("", text.replace("512", "9" * 5000)) == f"maps.slots: must be from 256 to 4194304, not 1{'0' * 30}"
    double = text.replace('"slots": 512', '"slots": 512, "slots": 512').replace('"lane"', '"lane": "auto", "lane"')
    assert errors("", double) == "[lane: duplicate field, maps.slots: duplicate field]"


def test_flags_override_the_file() -> None:
    own = read("directory: /run/file\nmanifests: /etc/file\n")
    found = settings(own)
    assert (str(found.directory), str(found.manifests)) == ("/run/file", "/etc/file")
    found = settings(own, "--directory=/run/flag", "--manifests=/etc/flag")
    assert (str(found.directory), str(found.manifests)) == ("/run/flag", "/etc/flag")


def test_cleanup_uses_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(HEADER + "directory: /run/of-the-file\n")
    cleaned: list[Path] = []
    monkeypatch.setattr("pyebpf_proxy.agent.cleanup.run", lambda directory, *more: cleaned.append(directory))
    assert main(["--cleanup", "--datapath-config", str(path)]) == 0
    assert main(["--cleanup", "--datapath-config", str(path), "--directory=/run/of-the-flag"]) == 0
    assert cleaned == [Path("/run/of-the-file"), Path("/run/of-the-flag")]


# ---- bad files ------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[Path, str]]:
    deep = folder / "deep"
    deep.write_text(HEADER + "lane: " + "[" * 5000)
    large = folder / "large"
    large.write_bytes(b"#" * 10_000_000)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    bomb = folder / "bomb"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    bomb.write_text(HEADER + "\n".join(lines))
    nul = folder / "nul"
    nul.write_bytes(HEADER.encode() + b"lane: \0")
    return {
        "deep nesting": (deep, "yaml: exceeded max depth of 1000"),
        "10 MB": (large, f"read {large}: larger than 1 MiB, the size of a ConfigMap"),
        "a FIFO": (fifo, f"read {fifo}: not a regular file"),
        "a folder": (folder, f"read {folder}: is a directory"),
        "nothing": (folder / "none", f"open {folder / 'none'}: no such file or directory"),
        "anchors": (bomb, "yaml: document contains excessive aliasing"),
        "NUL": (nul, "yaml: control characters are not allowed"),
    }


def test_bad_files_are_one_line_each(tmp_path: Path) -> None:
    for what, (path, output) in files(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            datapath_config.read(path)
        assert str(caught.value) == f"datapath configuration: {output}", what
        assert caught.value.file == str(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyebpf_proxy", *arguments], capture_output=True, text=True, check=False, timeout=30
    )


@pytest.mark.parametrize("also", [[], ["--cleanup"], ["--write-config-to"]], ids=str)
def test_the_command_line_names_the_file(tmp_path: Path, also: list[str]) -> None:
    """An error is reported by every command, and nothing is done."""
    path, written = tmp_path / "own.yaml", tmp_path / "written"
    path.write_text(HEADER + "lane: fast\n")
    also = [*also, str(written)] if also == ["--write-config-to"] else also
    result = run("--datapath-config", str(path), *also)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert 'datapath configuration: lane: must be auto or netfilter, not "fast"' in result.stderr
    assert f"file={path}" in result.stderr
    assert not written.exists()


def test_only_kube_proxys_configuration_is_written(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(HEADER + "lane: netfilter\nmaps: {slots: 512}\n")
    for name, arguments in (("with", ["--datapath-config", str(path)]), ("without", [])):
        assert run("--write-config-to", str(tmp_path / name), *arguments).returncode == 0
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()


def test_a_file_of_an_older_release_gets_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(HEADER + "lane: auto\npodNetwork: [10.0.0.0/8]\n")
    result = run("--datapath-config", str(path), "--lane=auto", "--write-config-to", str(tmp_path / "written"))
    assert result.returncode == 0
    warned = [line for line in result.stderr.splitlines() if "without effect" in line]
    assert "Flag --lane is of an older release" in warned[0]
    assert "lane and podNetwork of an older release" in warned[1]
    assert len(warned) == 2


# ---- properties -----------------------------------------------------------------------------------------------

#: Without IPv4 networks in IPv6 notation, which are rejected.
networks = (
    st.ip_addresses()
    .flatmap(lambda ip: st.integers(0, ip.max_prefixlen).map(lambda n: ipaddress.ip_network((ip, n), strict=False)))
    .filter(lambda network: getattr(network.network_address, "ipv4_mapped", None) is None)
    .map(str)
)
paths = st.text(string.ascii_letters + string.digits + "/-_. é", max_size=30).map(lambda text: "/" + text)
sizes = st.fixed_dictionaries(
    {}, optional={str(info.alias): st.integers(1024, 65536) for info in Maps.model_fields.values()}
)
documents = st.fixed_dictionaries(
    {"apiVersion": st.just(API_VERSION), "kind": st.just(KIND)},
    optional={
        "lane": st.sampled_from(("auto", "netfilter")),
        "directory": paths,
        "manifests": paths,
        "socketLB": st.sampled_from(("node", "all", "off")),
        "socketLBExclude": st.lists(networks, max_size=4),
        "fastPath": st.sampled_from(("auto", True, False)),
        "fastPathExcludedDevices": st.lists(st.sampled_from(("eth0", "pod1")), max_size=2),
        "fastPathEntries": st.integers(1024, 65536),
        "xdpDevices": st.lists(st.sampled_from(("eth0", "*")), max_size=2),
        "xdpMode": st.sampled_from(("native", "generic")),
        "podNetwork": st.lists(networks, max_size=4),
        "maps": sizes,
    },
)


@given(documents)
def test_what_is_written_is_read_again(document: dict[str, Any]) -> None:
    for text in (yaml.safe_dump(document), json.dumps(document)):
        config = datapath_config.decode_text(text.encode())
        whole = config.model_dump(mode="json", by_alias=True)
        assert {name: value for name, value in whole.items() if name in document and name != "maps"} == {
            name: value for name, value in document.items() if name != "maps"
        }
        assert whole["maps"].items() >= document.get("maps", {}).items()
        assert datapath_config.decode_text(yaml.safe_dump(whole).encode()) == config


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "lane",
        "directory",
        "socketLB",
        "socketLBExclude",
        "fastPath",
        "xdpDevices",
        "podNetwork",
        "maps",
        "maps.slots",
        "x",
    ]
)


@given(names, values)
def test_any_value_is_accepted_or_named(name: str, value: object) -> None:
    field, _, inner = name.partition(".")
    document = {"apiVersion": API_VERSION, "kind": KIND, field: {inner: value} if inner else value}
    try:
        datapath_config.decode_text(json.dumps(document).encode())
    except ValueError as error:
        output = str(error)
        assert "\n" not in output
        assert re.match(rf"\[?{re.escape(name)}[.:\[]", output), output


def test_the_example_is_valid() -> None:
    config = datapath_config.read(ROOT / "examples" / "datapath-config.yaml")
    assert config.maps.model_dump() == Maps().model_dump()
    document = yaml.safe_load((ROOT / "examples" / "datapath-config.yaml").read_text())
    known = {str(info.alias) for info in DatapathConfiguration.model_fields.values()}
    assert set(document) | {"manifests", "lane", "podNetwork"} == known, "every field with an effect is shown"
