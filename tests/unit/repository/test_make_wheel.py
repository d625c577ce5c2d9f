# SPDX-License-Identifier: Apache-2.0
"""``make wheel``: the commands of the pages name the wheel as dist/*.whl, so there must be one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import ROOT

#: In place of pip, which needs the built objects: it makes the file.
_PIP = """#!/bin/sh
for word; do folder=$word; [ "$before" = --wheel-dir ] && break; before=$word; done
mkdir -p "$folder" && touch "$folder/pyebpf_proxy-9.9.9-py3-none-any.whl"
"""


def test_the_wheel_of_an_earlier_version_is_replaced(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    earlier = "0.0.1"
    kept = {f"pyebpf-proxy-{earlier}.tgz", f"pyebpf-proxy_{earlier}_amd64.deb"}
    for name in (*kept, f"pyebpf_proxy-{earlier}-py3-none-any.whl"):
        (dist / name).touch()
    pip = tmp_path / "pip"
    pip.write_text(_PIP)
    pip.chmod(0o755)
    # The environment is there.
    made = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "--old-file=setup", "wheel", f"PYTHON={pip}"]
    ran = subprocess.run(made, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "dist/pyebpf_proxy-9.9.9-py3-none-any.whl\n"), ran.stderr
    assert {each.name for each in dist.iterdir()} == kept | {"pyebpf_proxy-9.9.9-py3-none-any.whl"}
