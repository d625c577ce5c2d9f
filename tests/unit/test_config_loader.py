# SPDX-License-Identifier: Apache-2.0
"""A configuration file: decoding, defaults, validation, what the rooms receive (spec/configuration §§1–5)."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest

from pyebpf_proxy.config import flags
from pyebpf_proxy.config.document import load as load_document
from pyebpf_proxy.config.effective import Effective, effective
from pyebpf_proxy.config.loader import ConfigError, Loaded, load
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.services.model import Family

HEADER = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
KUBEADM = """
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16,fd00:10:244::/56
configSyncPeriod: 0s
conntrack:
  {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null,
  tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs:
  {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false,
  syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"""


@pytest.fixture
def read(tmp_path: Path):
    """Load a configuration file with the given content after the usual header."""

    def read(text: str, header: str = HEADER) -> Loaded:
        path = tmp_path / "config.yaml"
        path.write_text(header + text)
        return load(path)

    return read


def settings(config: KubeProxyConfiguration, *arguments: str) -> Effective:
    return effective(config, flags.parse(arguments))


def test_the_file_that_kubeadm_writes_is_taken_without_a_warning(read) -> None:
    loaded = read(KUBEADM)
    assert loaded.warnings == []
    assert loaded.config.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
    assert settings(loaded.config).pod_cidrs == {
        Family.IPV4: ipaddress.ip_network("10.244.0.0/16"),
        Family.IPV6: ipaddress.ip_network("fd00:10:244::/56"),
    }


def test_without_a_file_the_defaults_hold() -> None:
    config = load(None).config
    assert config.mode == "iptables"
    assert config.detect_local_mode == "ClusterCIDR"
    assert config.healthz_bind_address == "0.0.0.0:10256"
    assert config.metrics_bind_address == "127.0.0.1:10249"
    assert (config.iptables.masquerade_bit, config.iptables.localhost_node_ports) == (14, True)
    assert config.iptables.sync_period == 30 * 10**9
    assert config.ipvs.min_sync_period == 0
    assert config.conntrack.tcp_established_timeout == 24 * 3600 * 10**9
    assert config.oom_score_adj == -999


def test_a_zero_in_the_file_becomes_the_default_where_go_cannot_tell_it_from_absent(read) -> None:
    config = read(
        'iptables: {minSyncPeriod: 0s}\nmetricsBindAddress: ""\nclientConnection: {qps: 0, burst: 0}\n'
    ).config
    assert config.iptables.min_sync_period == 10**9
    assert config.metrics_bind_address == "127.0.0.1:10249"
    assert (config.client_connection.qps, config.client_connection.burst) == (5, 10)


def test_null_is_absent(read) -> None:
    loaded = read(
        "clusterCIDR: null\niptables: null\nnodePortAddresses: ~\nlogging: {vmodule: }\nmasqueradeAll: null\n"
    )
    assert loaded.config.cluster_cidr == ""
    assert loaded.config.iptables.masquerade_bit == 14
    assert 'unknown field "masqueradeAll"' in loaded.warnings[0]


def test_an_explicit_zero_of_a_pointer_field_is_honoured(read) -> None:
    config = read(
        "iptables: {masqueradeBit: 0, localhostNodePorts: false}\noomScoreAdj: 0\n"
        "conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s}\n"
    ).config
    assert config.iptables.masquerade_bit == 0
    assert config.iptables.localhost_node_ports is False
    assert config.oom_score_adj == 0
    assert (config.conntrack.max_per_core, config.conntrack.min, config.conntrack.tcp_established_timeout) == (0, 0, 0)
    assert settings(config).masquerade_mark == 1


@pytest.mark.parametrize(
    ("bind", "healthz", "metrics"),
    [
        ("1.2.3.4", "0.0.0.0:10256", "127.0.0.1:10249"),
        ('"::"', "[::]:10256", "[::1]:10249"),
        ("fd00::1", "[::]:10256", "[::1]:10249"),
    ],
)
def test_default_addresses_follow_the_family_of_the_bind_address(read, bind: str, healthz: str, metrics: str) -> None:
    config = read(f"bindAddress: {bind}\n").config
    assert (config.healthz_bind_address, config.metrics_bind_address) == (healthz, metrics)


def test_a_missing_port_is_appended(read) -> None:
    config = read("healthzBindAddress: fd00::5\nmetricsBindAddress: 1.2.3.4\n").config
    assert (config.healthz_bind_address, config.metrics_bind_address) == ("[fd00::5]:10256", "1.2.3.4:10249")


def test_unknown_and_duplicate_fields_are_a_warning_and_the_last_duplicate_wins(read) -> None:
    loaded = read("mode: nftables\nudpIdleTimeout: 250ms\niptables: {foo: 1}\nmode: iptables\n")
    assert loaded.config.mode == "iptables"
    (warning,) = loaded.warnings
    assert "Using lenient decoding as strict decoding failed" in warning
    assert 'line 6: key "mode" already set in map' in warning
    assert 'unknown field "udpIdleTimeout"' in warning
    assert 'unknown field "iptables.foo"' in warning


def test_field_names_are_case_sensitive(read) -> None:
    loaded = read("clusterCidr: 10.0.0.0/8\n")
    assert loaded.config.cluster_cidr == ""
    assert 'unknown field "clusterCidr"' in loaded.warnings[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: y", True),
        ("a: Off", False),
        ("a: oN", "oN"),
        ("a: 010", 8),
        ("a: 0o17", 15),
        ("a: 0x10", 16),
        ("a: 0b11", 3),
        ("a: 08", 8.0),
        ("a: 1_000", 1000),
        ("a: 1:20", "1:20"),
        ("a: 1e1", 10.0),
        ("a: -.5", -0.5),
        ("a: 2026-01-01", "2026-01-01"),
        ("a: ~", None),
        ("a:", None),
        ('a: ""', ""),
        ("a: '1'", "1"),
        ("a: =", "="),
    ],
)
def test_scalars_are_read_as_go_reads_them(text: str, value: object) -> None:
    read = load_document(text).value
    assert read == {"a": value}
    assert type(read["a"]) is type(value)  # type: ignore[index]


def test_anchors_merge_keys_and_the_first_of_several_documents() -> None:
    document = load_document("\ufeffp: &p {a: 1, b: 2}\r\nq:\r\n  <<: *p\r\n  b: 3\r\n---\r\nz: 1\r\n")
    assert document.value == {"p": {"a": 1, "b": 2}, "q": {"a": 1, "b": 3}}
    assert document.duplicates == []


@pytest.mark.parametrize("text", ["5", "5.0", "5e0", "0x5", "0b101"])
def test_whole_numbers_in_any_notation(read, text: str) -> None:
    assert read(f"iptables: {{masqueradeBit: {text}}}\n").config.iptables.masquerade_bit == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clusterCIDR: 5\n", "clusterCIDR: must be a valid string, got 5"),
        ("iptables: {masqueradeBit: '14'}\n", "iptables.masqueradeBit: must be a valid integer, got '14'"),
        ("iptables: {masqueradeBit: 1.5}\n", "iptables.masqueradeBit: must be a valid integer"),
        ("iptables: {masqueradeBit: 2147483648}\n", "iptables.masqueradeBit: must be less than 2147483648"),
        ("iptables: {masqueradeAll: 'yes'}\n", "iptables.masqueradeAll: must be a valid boolean"),
        ("iptables: {syncPeriod: 30}\n", "iptables.syncPeriod: expected a duration"),
        ("iptables: {syncPeriod: null}\n", 'iptables.syncPeriod: time: invalid duration ""'),
        ("iptables: {syncPeriod: 1 day}\n", "iptables.syncPeriod: time: unknown unit"),
        ("iptables: []\n", "iptables: must be a valid dictionary"),
        ("nodePortAddresses: 10.0.0.0/8\n", "nodePortAddresses: must be a valid list"),
        ("nodePortAddresses: [1]\n", "nodePortAddresses[0]: must be a valid string"),
        ("winkernel: {networkName: n}\n", "winkernel.networkName: must be a valid string, got False"),
        ("bindAddress: ::\n", "mapping values are not allowed"),
        ("a: [1\n", "failed to decode: yaml: line"),
        ("a: b\x01\n", "failed to decode: yaml:"),
    ],
)
def test_a_wrong_type_is_one_line_with_file_and_field(read, text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/config.yaml: failed to decode: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Object 'Kind' is missing"),
        ("[]", "Object 'Kind' is missing"),
        ("hello", "Object 'Kind' is missing"),
        ("kind: KubeProxyConfiguration", "'apiVersion' is missing"),
        ("apiVersion: v1\nkind: ConfigMap", 'no kind "ConfigMap"'),
        ("apiVersion: 1\nkind: KubeProxyConfiguration", "couldn't get version/kind: apiVersion"),
    ],
)
def test_version_and_kind_are_required(read, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, header="")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode: userspace", 'Mode.ProxyMode: Invalid value: "userspace": must be iptables, ipvs, nftables or blank'),
        ("iptables: {masqueradeBit: 32}", "KubeProxyIPTablesConfiguration.MasqueradeBit: Invalid value: 32: must be"),
        ("mode: nftables\niptables: {masqueradeBit: -1}", "KubeProxyIPTablesConfiguration.MasqueradeBit"),
        ("mode: nftables\nnftables: {masqueradeBit: 32}", "KubeProxyNFTablesConfiguration.MasqueradeBit"),
        ("bindAddress: '[::1]'", "BindAddress: Invalid value"),
        ("healthzBindAddress: 1.2.3.4:0", 'HealthzBindAddress: Invalid value: "0": must be a valid port'),
        ("metricsBindAddress: foo", 'MetricsBindAddress: Invalid value: "foo": must be IP:port'),
        ("metricsBindAddress: foo:80", 'MetricsBindAddress: Invalid value: "foo": must be a valid IP'),
        ("metricsBindAddress: 1.2.3.4:65536", "must be a valid port"),
        ("clusterCIDR: 10.0.0.0/33", "ClusterCIDRs: Invalid value"),
        ("clusterCIDR: 10.0.0.0/8,11.0.0.0/8", "DualStack CIDR"),
        ("nodePortAddresses: [10.0.0.0]", 'NodePortAddresses[0]: Invalid value: "10.0.0.0": must be a valid CIDR'),
        ("nodePortAddresses: [10.0.0.0/8, primary, x]", "NodePortAddresses[1]: Invalid value"),
        ("iptables: {syncPeriod: -1s, minSyncPeriod: -2s}", "SyncPeriod: Invalid value: -1s: must be greater than 0"),
        ("iptables: {minSyncPeriod: 31s}", "must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod"),
        ("configSyncPeriod: -1s", "ConfigSyncPeriod: Invalid value: -1s"),
        ("detectLocalMode: Foo", 'DetectLocalMode: Unsupported value: "Foo"'),
        ("detectLocalMode: BridgeInterface", 'InterfaceName: Invalid value: "": must not be empty'),
        ("detectLocalMode: InterfaceNamePrefix", "InterfacePrefix: Invalid value"),
        ("oomScoreAdj: 1001", "OOMScoreAdj: Invalid value: 1001"),
        ("conntrack: {min: -1}", "KubeProxyConntrackConfiguration.Min: Invalid value: -1"),
        ("clientConnection: {burst: -1}", "ClientConnection.Burst"),
        ("mode: ipvs\nipvs: {excludeCIDRs: [x]}", "KubeProxyIPVSConfiguration.ExcludeCidrs[0]"),
        ("logging: {format: xml}", "Unsupported log format"),
        ("showHiddenMetricsForVersion: '1.2'", "ShowHiddenMetricsForVersion"),
    ],
)
def test_validation_names_the_field(read, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert expected in str(caught.value)
    assert "config.yaml: failed validate: " in str(caught.value)
    assert "KubeProxyConfiguration." in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "nftables: {masqueradeBit: 99}",  # only looked at in its mode
        "ipvs: {excludeCIDRs: [x]}",
        "nftables: {syncPeriod: -1s}",
        "detectLocalMode: NodeCIDR\nclusterCIDR: nonsense",
        "nodePortAddresses: [010.001.0.0/8, 'fd00::1/64']",
        "clusterCIDR: fd00::/48,10.0.0.0/8",
        "showHiddenMetricsForVersion: '1.35'",
        "portRange: whatever",
    ],
)
def test_what_the_mode_does_not_use_is_not_checked(read, text: str) -> None:
    assert read(text).config


def test_all_errors_are_reported_together(read) -> None:
    with pytest.raises(ConfigError) as caught:
        read("mode: x\niptables: {masqueradeBit: 99}\noomScoreAdj: 5000\n")
    for path in ("Mode.ProxyMode", "MasqueradeBit", "OOMScoreAdj"):
        assert path in str(caught.value)


def test_the_section_of_the_mode_gives_the_settings(read) -> None:
    text = (
        "nftables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 2s}\n"
        "iptables: {masqueradeBit: 4, syncPeriod: 9s}\n"
    )
    nftables = settings(read("mode: nftables\n" + text).config)
    iptables = settings(read(text).config)
    assert (nftables.masquerade_mark, nftables.masquerade_all, nftables.sync_period, nftables.min_sync_period) == (
        1 << 3,
        True,
        7.0,
        2.0,
    )
    assert (iptables.masquerade_mark, iptables.masquerade_all, iptables.sync_period) == (1 << 4, False, 9.0)
    assert nftables.node_port_addresses == ("primary",)
    assert iptables.node_port_addresses == ()
    assert (nftables.localhost_node_ports, iptables.localhost_node_ports) == (False, True)


def test_the_flag_overrides_the_nodes_name_of_the_file(read) -> None:
    config = read("hostnameOverride: ' FILE '\n").config
    assert settings(config).node_name == "file"
    assert settings(config, "--hostname-override", "Flag").node_name == "flag"
    with pytest.raises(ConfigError, match="empty hostname"):
        settings(config, "--hostname-override", "  ")


def test_files_that_are_none(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    nul = tmp_path / "nul"
    nul.write_bytes(b"a: \0b\n")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(10 * 1024 * 1024 + 1)
    binary = tmp_path / "binary"
    binary.write_bytes(b"a: \xff\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, expected in (
        (missing, "No such file"),
        (tmp_path, "is a directory"),
        (nul, "NUL"),
        (big, "larger than 10 MB"),
        (binary, "invalid UTF-8"),
        (fifo, "not a regular file"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert expected in str(caught.value), path
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
