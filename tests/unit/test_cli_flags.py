# SPDX-License-Identifier: Apache-2.0
"""The command line: the rules of the parser, and runs that end at once."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyebpf_proxy import __version__
from pyebpf_proxy.cli import main
from pyebpf_proxy.config.flags import FLAGS, UsageError, parse
from tests import ROOT

# The program runs without the environment and site-packages (-I -S), so the package's path is given here.
PATH = f"import sys; sys.path.insert(0, {str(ROOT)!r});"


def test_both_forms_of_a_value_and_underscores() -> None:
    flags = parse(["--config=a=b", "--manifests", "m", "--hostname_override", "h", "--logging-format=json"])
    assert (flags.config, flags.manifests, flags.hostname_override) == ("a=b", "m", "h")
    assert flags.given == {"config", "manifests", "hostname-override", "logging-format"}
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


def imported_by(program: str) -> set[str]:
    """The modules that a program of one line imports."""
    program = f"import sys; before = set(sys.modules); {program}; print(*sorted(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", PATH + program], capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


def test_the_version_imports_no_library() -> None:
    """Scripts call --version: it must not import what takes long."""
    loaded = imported_by("from pyebpf_proxy.cli import main; main(['--version'])")
    own = {name for name in loaded if name.startswith("pyebpf_proxy")}
    assert own == {
        "pyebpf_proxy",
        "pyebpf_proxy.cli",
        "pyebpf_proxy.common",
        "pyebpf_proxy.common.digits",
        "pyebpf_proxy.config",
        "pyebpf_proxy.config.durations",
        "pyebpf_proxy.config.flag_table",
        "pyebpf_proxy.config.flag_values",
        "pyebpf_proxy.config.flags",
        "pyebpf_proxy.config.gotext",
    }
    # These modules import few of Python's own; typing and re are the largest.
    assert len(loaded - own) <= 60, loaded - own
    assert not loaded & {"pydantic", "asyncio", "yaml", "pyroute2", "cffi", "msgspec", "logging", "json", "ipaddress"}


def test_a_probe_imports_less_than_the_version() -> None:
    """The kubelet starts one every few seconds, on every node."""
    loaded = imported_by("from pyebpf_proxy import cli, probe; probe._RETRY_SECONDS = 0; cli.main(['probe', 'live'])")
    assert {name for name in loaded if name.startswith("pyebpf_proxy")} == {
        "pyebpf_proxy",
        "pyebpf_proxy.cli",
        "pyebpf_proxy.probe",
    }


def test_the_version_and_a_full_document_take_little_time(tmp_path: Path) -> None:
    """CPU time, which other work on the machine does not change; the limit is higher on a slow machine."""
    file = tmp_path / "config.yaml"
    assert main(["--write-config-to", str(file)]) == 0
    for limit, arguments in (
        (0.15, ["--version"]),
        (0.3, ["--config", str(file), "--write-config-to", str(tmp_path / "out.yaml")]),
    ):
        # Programs that share a core's caches and pipelines slow it at times: one good try is enough.
        tries = []
        while not tries or tries[-1] > limit:
            assert len(tries) < 20, (arguments, limit, tries)
            slow = slowness()
            tries.append(processor_time([sys.executable, "-m", "pyebpf_proxy", *arguments]) / slow)


def processor_time(command: list[str]) -> float:
    """Seconds of CPU time of the command."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def slowness() -> float:
    """How many times slower than a usual machine this one is, at least 1.0: by a loop that takes 0.1 s there."""
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        sum(number * number for number in range(1_600_000))
        best = min(best, time.process_time() - start)
    return max(1.0, best / 0.1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode: ipvs", "mode ipvs: IPVS itself is not used"),
        ("mode: nftables\nmode: ''", 'key \\"mode\\" already set in map'),
    ],
)
def test_accepted_values_with_another_meaning_are_a_warning(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{text}\n")
    assert main(["--config", str(path), "--logging-format", "json"]) == 1  # there are no manifests
    warning, error = capsys.readouterr().err.splitlines()
    assert expected in warning
    assert '"level": "warning"' in warning
    assert "--manifests" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "{dir}/c.yaml"], "open {dir}/c.yaml: no such file or directory"),
        ([], "unable to load in-cluster configuration, KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT must be"),
        (["--manifests", "{dir}/none"], "the manifests folder {dir}/none does not exist"),
        (["--manifests", "/etc/passwd"], "the manifests folder /etc/passwd is not a folder"),
    ],
)
def test_missing_files_are_reported_in_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without a folder of the test's own, an agent might start on this machine.
    given = [each.format(dir=tmp_path) for each in arguments]
    assert main([*given, "--directory", str(tmp_path / "run" / "here")]) == 1
    line = capsys.readouterr().err
    assert expected.format(dir=tmp_path) in line
    assert re.fullmatch(r"\S+Z error [^\n]*\n", line)
    assert list(tmp_path.iterdir()) == []
