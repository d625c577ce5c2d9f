# SPDX-License-Identifier: Apache-2.0
"""The programs of a cluster: which are needed, where they are, and how Debian's get into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.layout import PROGRAMS, REPOSITORY, STORE
from tests.e2e.problem import E2EError

#: From Kubernetes' and CoreDNS' modules, by tests/cluster/build.sh.
BUILT = (
    "kube-apiserver",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "kube-controller-manager",
    "kube-scheduler",
    "coredns",
    "agnhost",
    "regression-issue-74839",
)
BUILT_FOR_SPECS = ("ginkgo", "e2e.test")
#: Unpacked, because installing them would start services.
DEBIAN = ("containerd", "runc", "containernetworking-plugins", "busybox-static")
UNPACKED = STORE / "debian"
#: All programs in a node use the same iptables variant, whatever the machine's alternatives are.
IPTABLES = STORE / "iptables"
_INSTALLED = {
    "etcd": "etcd-server",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "iptables-nft": "iptables",
    "gcc": "gcc",
}


def built(name: str) -> Path:
    """A program of the cache; E2EError if it is missing."""
    path = PROGRAMS / name
    if not os.access(path, os.X_OK):
        raise E2EError(f"{path} is missing: tests/cluster/build.sh {name}")
    return path


def search_path() -> str:
    """PATH of everything in the cluster."""
    own = (IPTABLES, PROGRAMS, UNPACKED / "usr/sbin", UNPACKED / "usr/bin")
    return ":".join([*map(str, own), os.environ.get("PATH", "/usr/sbin:/usr/bin"), "/usr/sbin:/sbin"])


def prepare(specs: bool, others: Sequence[str] = ()) -> None:
    """Check that everything exists, and unpack the rest. E2EError for the first missing program."""
    if os.geteuid() != 0:
        raise E2EError("a cluster needs root: it makes namespaces, mounts and cgroups")
    for program, package in _INSTALLED.items():
        if shutil.which(program, path=search_path()) is None:
            raise E2EError(f"{program} is missing: apt-get install {package}")
    for name in (*BUILT, *(BUILT_FOR_SPECS if specs else ()), *others):
        built(name)
    _unpack()
    IPTABLES.mkdir(parents=True, exist_ok=True)
    for tool in ("iptables", "ip6tables"):
        for suffix in ("", "-save", "-restore"):
            link = IPTABLES / f"{tool}{suffix}"
            if not link.is_symlink():
                link.symlink_to(f"/usr/sbin/{tool}-nft{suffix}")


def _unpack() -> None:
    if UNPACKED.exists():
        return
    STORE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="debian.", dir=STORE) as scratch:
        print(f"fetching {', '.join(DEBIAN)}", flush=True)
        # apt's own user may not write here, and apt warns
        done = subprocess.run(
            ["apt-get", "-q", "download", *DEBIAN], cwd=scratch, check=False, capture_output=True, text=True
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise E2EError(f"apt-get download {' '.join(DEBIAN)}: {why} (apt-get update?)")
        root = Path(scratch, "root")
        for package in sorted(Path(scratch).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
        root.rename(UNPACKED)


def source(module: str, pinned_by: Path = REPOSITORY / "tests/cluster/kubernetes") -> Path:
    """The folder of a Go module's sources that were built. ``pinned_by``: the folder of the go.mod that names it."""
    listed = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", module],
        cwd=pinned_by,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode or not listed.stdout.strip():
        raise E2EError(f"the sources of {module} are not in Go's cache: go mod download {module}")
    return Path(listed.stdout.strip())
