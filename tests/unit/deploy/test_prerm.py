# SPDX-License-Identifier: Apache-2.0
"""The Debian package's scripts: the options of the clean-up, and what runs after an upgrade.

tests/deb runs them on a machine with systemd.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.needs_root

#: The folders that the script names are replaced, in a mount namespace of its own.
_SCRIPT = """
mount --bind "$1/default" /etc/default
mount -t tmpfs tmpfs /run
mount --bind "$1/sbin" /usr/sbin
mkdir /run/pyebpf-proxy-unit
sh "$2" remove
[ ! -e /run/pyebpf-proxy-unit ]
"""
_PROGRAM = """#!/bin/sh
for argument; do echo "$argument"; done >"$(dirname "$0")/arguments"
"""
#: $2, $3: the scripts of an upgrade; $4: the unit's state.
_UPGRADE = """
mount -t tmpfs tmpfs /run
mount --bind "$1" /usr/sbin  # without a policy-rc.d of this machine
mkdir -p /run/systemd/system
echo "$4" >/run/state
sh "$2" upgrade 2
[ "$(cat /run/state)" = inactive ]
sh "$3" configure 1
cat /run/state
"""
#: systemctl of a unit that is not enabled.
_SYSTEMCTL = """#!/bin/sh
for word; do
    case "$word" in
    is-enabled) echo disabled; exit 1 ;;
    is-active) [ "$(cat /run/state)" = active ]; exit ;;
    start) echo active >/run/state ;;
    stop) echo inactive >/run/state ;;
    esac
done
"""


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ((ROOT / "deploy" / "deb" / "pyebpf-proxy.default").read_text(), ["--manifests=/etc/pyebpf-proxy/manifests"]),
        ("OPTIONS=--manifests=/m --v=2\n", ["--manifests=/m", "--v=2"]),
        ("; mine\nOPTIONS='--manifests=/m --v=2'\nKUBE_PROXY_HEALTH=\n", ["--manifests=/m", "--v=2"]),
        ('OPTIONS="--v=1"\n  OPTIONS=--manifests=/m \\\n  --v=2 \n', ["--manifests=/m", "--v=2"]),
        ("#OPTIONS=--v=2\nMY_OPTIONS=--v=3\n", []),
        ('OPTIONS=""\n', []),
        ("OPTIONS=--manifests=/*\n", ["--manifests=/*"]),
        ("", []),
    ],
)
def test_the_clean_up_has_the_options_of_the_unit(text: str, options: list[str], tmp_path: Path) -> None:
    """systemd reads the file as EnvironmentFile. It is no shell script: values with spaces need no quotes."""
    for name in ("default", "sbin"):
        (tmp_path / name).mkdir()
    (tmp_path / "default" / "pyebpf-proxy").write_text(text)
    program = tmp_path / "sbin" / "pyebpf-proxy"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    prerm = ROOT / "deploy" / "deb" / "prerm.sh"
    command = ["unshare", "--mount", "sh", "-euc", _SCRIPT, "sh", tmp_path, prerm]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    arguments = (tmp_path / "sbin" / "arguments").read_text().splitlines()
    first = "--config=/etc/pyebpf-proxy/config.yaml"
    assert arguments == [first, *options, "--cleanup", "--keep-kube-proxy-rules"]


@pytest.mark.parametrize("state", ["active", "inactive"])
def test_after_an_upgrade_a_unit_runs_that_ran_before(state: str, tmp_path: Path) -> None:
    """Also one that is not enabled: `systemctl start` has started it."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(_SYSTEMCTL)
    systemctl.chmod(0o755)
    scripts = [ROOT / "deploy" / "deb" / f"{name}.sh" for name in ("prerm", "postinst")]
    command = ["unshare", "--mount", "sh", "-euc", _UPGRADE, "sh", str(tmp_path), *map(str, scripts), state]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{state}\n", "")
