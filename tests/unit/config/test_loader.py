# SPDX-License-Identifier: Apache-2.0
"""A configuration file: decoding, defaults, validation, and the resulting settings (spec/configuration §§1–5)."""

from __future__ import annotations

import ipaddress
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import Effective, effective
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.services.model import IPFamily

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


class Loaded(NamedTuple):
    """The outcome of a file."""

    config: KubeProxyConfiguration
    warnings: list[str]


def load(path: Path | None) -> Loaded:
    """Load as at a start with this file, or without one."""
    warnings: list[str] = []
    arguments = [] if path is None else ["--config", str(path)]
    return Loaded(complete(flags.parse(arguments), lambda text, file: warnings.append(text)), warnings)


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


def test_the_file_of_kubeadm_causes_no_warning(read) -> None:
    loaded = read(KUBEADM)
    assert loaded.warnings == []
    assert loaded.config.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
    assert settings(loaded.config).pod_cidrs == {
        IPFamily.IPV4: ipaddress.ip_network("10.244.0.0/16"),
        IPFamily.IPV6: ipaddress.ip_network("fd00:10:244::/56"),
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


def test_all_errors_are_reported_together(read) -> None:
    with pytest.raises(ConfigError) as caught:
        read("mode: x\niptables: {masqueradeBit: 99}\noomScoreAdj: 5000\n")
    for path in ("Mode.ProxyMode", "MasqueradeBit", "OOMScoreAdj"):
        assert path in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clusterCIDR", "10.0.0.0/{}", "must be a valid CIDR block"),
        ("healthzBindAddress", "1.2.3.4:{}", "must be a valid port"),
    ],
)
def test_numbers_of_thousands_of_digits_are_invalid(read, field: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(f"{field}: {value.format('9' * 5000)}")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"oomScoreAdj": {}', "cannot unmarshal number {} into Go struct field KubeProxyConfiguration.oomScoreAdj"),
        ('"logging": {{"flushFrequency": {}}}', 'invalid duration "{}"'),
    ],
)
@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_numbers_of_thousands_of_digits_in_json_are_out_of_range(read, field: str, message: str, number: str) -> None:
    header = '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", '
    with pytest.raises(ConfigError, match=message.format(number)):
        read(field.format(number) + "}", header)


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
    assert complete(flags.parse(["--hostname-override", " Flag "]), lambda text, file: None).hostname_override == "flag"
    with pytest.raises(ConfigError, match="empty hostname-override"):
        complete(flags.parse(["--hostname-override", "  "]), lambda text, file: None)
    with pytest.raises(ConfigError, match="hostnameOverride: empty hostname is invalid"):
        settings(config.model_copy(update={"hostname_override": "  "}))


def test_invalid_files(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("missing", "nul", "big", "binary", "fifo", "values", "deep", "aliases")}
    files["nul"].write_bytes(b"a: \0b\n")
    with files["big"].open("wb") as file:
        file.truncate(10 * 1024 * 1024)
    files["binary"].write_bytes(b"a: \xff\n")
    os.mkfifo(files["fifo"])
    files["values"].write_text("a: [" + "1," * 400_000 + "]\n")
    files["deep"].write_text("a: " + "[" * 500_000 + "\n")
    lines = [f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 50) + "]\n" for n in range(1, 200)]
    files["aliases"].write_text("a0: &a0 [x, x]\n" + "".join(lines))
    for path, expected in (
        (files["missing"], "no such file or directory"),
        (tmp_path, "is a directory"),
        (files["nul"], "control characters are not allowed"),
        (files["big"], "larger than 1 MiB"),
        (files["binary"], "invalid leading UTF-8 octet"),
        (files["fifo"], "not a regular file"),
        (files["values"], "too many values"),
        (files["deep"], "exceeded max depth of 1000"),
        (files["aliases"], "document contains excessive aliasing"),
    ):
        start = time.process_time()
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert expected in str(caught.value), path
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200
        assert time.process_time() - start < 20, path


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        assert load_without_rights(tmp_path) == "failed complete: open {}: permission denied"
        return
    path = tmp_path / "closed"
    path.touch(0)
    with pytest.raises(ConfigError, match="permission denied"):
        load(path)


def load_without_rights(folder: Path) -> str:
    """The error for a reader who is not root, in its own process."""
    path = folder / "closed"
    path.touch(0)
    for parent in (folder, *folder.parents):
        if parent != Path("/tmp") and Path("/tmp") in parent.parents:
            parent.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            load(path)
        except ConfigError as error:
            os.write(writer, str(error).replace(str(path), "{}").encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as output:
        return output.read()
