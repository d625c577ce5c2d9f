# SPDX-License-Identifier: Apache-2.0
"""The command line: the rules of the parser, and runs that end at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyebpf_proxy import __version__
from pyebpf_proxy.cli import main
from pyebpf_proxy.config.flags import FLAGS, UsageError, parse


def test_both_ways_to_give_a_value_and_underscores() -> None:
    flags = parse(["--config=a=b", "--manifests", "m", "--hostname_override", "h", "--log-format=json"])
    assert (flags.config, flags.manifests, flags.hostname_override, flags.log_format) == ("a=b", "m", "h", "json")
    assert flags.given == {"config", "manifests", "hostname-override", "log-format"}
    assert flags.directory == "/run/pyebpf-proxy"


def test_a_boolean_takes_its_value_only_with_an_equals_sign() -> None:
    assert parse(["--cleanup"]).cleanup is True
    assert parse(["--cleanup=false"]).cleanup is False
    with pytest.raises(UsageError, match=r'does not take any arguments, got \["false"\]'):
        parse(["--cleanup", "false"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "unknown flag: --nope"),
        (["-x"], "unknown shorthand flag: 'x' in -x"),
        (["foo"], '"pyebpf-proxy" does not take any arguments, got ["foo"]'),
        (["--config"], "flag needs an argument: --config"),
        (["--lane=fast"], 'invalid argument "fast" for "--lane" flag: must be one of auto, netfilter'),
        (["--directory="], 'invalid argument "" for "--directory" flag: must not be empty'),
        (["--cleanup=x"], 'invalid argument "x" for "--cleanup" flag: strconv.ParseBool: parsing "x": invalid syntax'),
    ],
)
def test_a_bad_command_line_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"Error: {message}\n"


def test_the_version_names_the_kubernetes_release_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"Kubernetes v1.36.3\npyebpf-proxy {__version__}\n"


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    for flag in FLAGS:
        assert f"--{flag.name}" in text


def test_the_version_waits_for_no_library() -> None:
    """--version is asked by scripts: what takes long to import must not be imported for it."""
    program = (
        "import sys; from pyebpf_proxy.cli import main; main(['--version']);"
        "heavy = {'pydantic', 'asyncio', 'yaml', 'pyroute2', 'cffi', 'msgspec', 'logging'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode: ipvs", "mode ipvs: there is no IPVS here"),
        ("detectLocalMode: NodeCIDR", "detectLocalMode NodeCIDR is not there yet"),
        ("mode: nftables\nmode: ''", 'key \\"mode\\" already set in map'),
    ],
)
def test_what_is_accepted_but_not_as_meant_is_a_warning(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{text}\n")
    assert main(["--config", str(path), "--log-format", "json"]) == 1  # there are no manifests
    warning, error = capsys.readouterr().err.splitlines()
    assert expected in warning
    assert '"level": "warning"' in warning
    assert "--manifests" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "/nonexistent/c.yaml"], "/nonexistent/c.yaml: cannot open the configuration file: No such file"),
        ([], "give a folder of Kubernetes manifests with --manifests"),
        (["--manifests", "/nonexistent"], "the manifests folder /nonexistent does not exist"),
        (["--manifests", "/etc/passwd"], "the manifests folder /etc/passwd is not a folder"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run" / "here"
    assert main([*arguments, "--directory", str(directory)]) == 1
    line = capsys.readouterr().err
    assert expected in line
    assert re.fullmatch(r"\S+Z error [^\n]*\n", line)
    assert list(tmp_path.iterdir()) == []
