# SPDX-License-Identifier: Apache-2.0
"""A machine that lacks something: the real command prints one line, ends with status 1 and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyebpf_proxy

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

PACKAGE = Path(pyebpf_proxy.__file__).parent
LIBRARIES = f"/usr/lib/{os.uname().machine}-linux-gnu"


def run(
    tmp_path: Path, hide: str = "", before: str = "", after: str = "", arguments: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the agent after ``hide`` (shell commands), started through ``before``; then ``after``, whose output is
    returned.
    """
    manifests = tmp_path / "manifests"
    manifests.mkdir(exist_ok=True)
    script = f"""
        {hide or ":"}
        timeout 60 {before} "$0" -m pyebpf_proxy --manifests "$1" --directory "$2" {arguments}
        status=$?
        {after or ":"}
        exit $status
    """
    command = ["unshare", "--mount", "--net", "sh", "-c", script]
    return subprocess.run(
        [*command, sys.executable, str(manifests), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(PACKAGE.parent)},
    )


def error(result: subprocess.CompletedProcess[str]) -> str:
    """The error line, which must be the only one and the last line."""
    assert result.returncode == 1, result.stderr
    lines = result.stderr.splitlines()
    assert re.match(r"\S+Z error ", lines[-1]), result.stderr
    assert sum(" error " in line for line in lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert " error Error running ProxyServer error=" in lines[-1]
    return str(json.loads(lines[-1].partition(" error=")[2]))


def file_of(library: str) -> str:
    path = Path(LIBRARIES) / library
    if not path.exists():
        pytest.skip(f"{path} is not where it is on Debian")
    return str(path)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("libbpf.so.1", r"libbpf is missing; install it \(Debian: libbpf1\)"),
        ("libnftables.so.1", r"libnftables .* is missing; install it \(Debian: python3-nftables\)"),
    ],
)
def test_a_library_is_missing(tmp_path: Path, library: str, expected: str) -> None:
    result = run(tmp_path, hide=f"mount --bind /dev/null {file_of(library)}")
    assert re.match(expected, error(result))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", ["", "--init-only", "--cleanup"])
def test_the_binding_of_libnftables_is_missing(tmp_path: Path, arguments: str) -> None:
    """It is a package of the distribution, so an installation in a virtual environment may lack it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['nftables'] = None\n")
    path = f"env PYTHONPATH={tmp_path}:{PACKAGE.parent}"
    result = run(tmp_path, before=path, arguments=arguments)
    assert re.match(r"libnftables or its Python binding is missing; install it \(Debian: python3-nft", error(result))
    assert not (tmp_path / "run").exists()


def test_the_kernel_has_no_btf(tmp_path: Path) -> None:
    """Doctor prints the same text."""
    result = run(tmp_path, hide="mount -t tmpfs none /sys/kernel/btf", after='"$0" -m pyebpf_proxy doctor -o json')
    output = error(result)
    assert re.match(r"the kernel has no BTF \(/sys/kernel/btf/vmlinux does not exist\).*; use a kernel", output)
    findings = json.loads(result.stdout)["findings"]
    assert f"{findings[1]['text']}; {findings[1]['remedy']}" == output
    assert [each["state"] for each in findings if each["what"] == "BTF"] == ["bad"]
    assert not (tmp_path / "run").exists()


def test_the_objects_were_not_built(tmp_path: Path) -> None:
    result = run(tmp_path, hide=f"mount -t tmpfs none {PACKAGE}/bpf")
    assert re.match(r"the BPF object .*tc\.bpf\.o is missing; build it with `make setup`", error(result))
    assert not (tmp_path / "run").exists()


@pytest.mark.needs_bpf
@pytest.mark.parametrize(
    ("name", "was", "output"),
    [
        # The same length: the rest of the object does not change.
        ("tc.bpf.o", b"masquerade_all", "struct settings differs in masquerade_all, masquerade_xyz"),
        ("sock.bpf.o", b"pod_sockets", "struct settings differs in pod_sockets, pod_sockxyz"),
        ("tc.bpf.o", b"frontend4_key", "no struct frontend4_key"),
    ],
)
def test_the_objects_are_built_from_other_sources(
    tmp_path: Path, bpf_objects: Path, name: str, was: bytes, output: str
) -> None:
    raw = (bpf_objects / name).read_bytes()
    assert b"\0" + was + b"\0" in raw
    other = tmp_path / name
    other.write_bytes(raw.replace(b"\0" + was + b"\0", b"\0" + was[:-3] + b"xyz\0"))
    result = run(
        tmp_path,
        hide=f"mount --bind {other} {PACKAGE}/bpf/{name}; mount -t bpf bpf /sys/fs/bpf",
        after="nft list ruleset; find /sys/fs/bpf -name 'pyebpf*'",
    )
    assert re.fullmatch(
        rf".*/{re.escape(name)} was built from other sources \({output}\): run make build", error(result)
    )
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_cleanup_needs_neither_libbpf_nor_the_objects(tmp_path: Path) -> None:
    hide = f"mount --bind /dev/null {file_of('libbpf.so.1')}; mount -t tmpfs none {PACKAGE}/bpf"
    result = run(tmp_path, hide=hide, arguments="--cleanup")
    assert result.returncode == 0, result.stderr
    assert " info clean " in result.stderr
    assert not (tmp_path / "run").exists()


def test_without_rights(tmp_path: Path) -> None:
    # Root without capabilities can still read files, unlike another user.
    result = run(tmp_path, before="setpriv --bounding-set=-all --inh-caps=-all")
    expected = "not allowed: CAP_NET_ADMIN and CAP_PERFMON and CAP_BPF missing; run as root"
    assert re.match(expected, error(result))
    assert not (tmp_path / "run").exists()


def test_cleanup_needs_only_the_network(tmp_path: Path) -> None:
    result = run(tmp_path, before="setpriv --bounding-set=-all,+net_admin --inh-caps=-all", arguments="--cleanup")
    assert result.returncode == 0, result.stderr


@pytest.mark.needs_bpf
def test_a_start_that_fails_halfway_is_undone(tmp_path: Path) -> None:
    """When loading fails, the nft table exists and a bpffs is found or mounted."""
    broken = tmp_path / "no_object"
    broken.write_text("this is no BPF object")
    result = run(
        tmp_path,
        hide=f"mount --bind {broken} {PACKAGE}/bpf/sock.bpf.o; mount -t bpf bpf /sys/fs/bpf",
        after="nft list ruleset; find /sys/fs/bpf -name 'pyebpf*'",
    )
    assert re.match(r"open BPF object .*sock\.bpf\.o: ", error(result))
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()
