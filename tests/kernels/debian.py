# SPDX-License-Identifier: Apache-2.0
"""Kernels and QEMU from Debian's archive, through a separate apt root: the machine's own apt is not changed.

The mirrors are those of the machine's own apt; this file only has names of suites. The archive's index shows which
package has a series of kernels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache, cmp_to_key
from pathlib import Path

from tests.kernels.architecture import AMD64, Architecture
from tests.kernels.problem import KernelsError

# Suites to search for a series, in this order, after the machine's own suite. Old ones have the refused kernels.
SUITES = ("bookworm", "trixie", "bullseye", "sid")
_SETTINGS = """
APT::Architecture "{architecture}";
Dir::Etc::SourceList "{root}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "{root}";
Dir::State::Lists "{root}/lists";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
"""


def codename() -> str:
    """The suite of this machine; KernelsError if it is not Debian."""
    try:
        text = Path("/etc/os-release").read_text()
    except FileNotFoundError:
        text = ""
    found = re.search(r"^VERSION_CODENAME=(\w+)$", text, re.MULTILINE)
    if found is None or "ID=debian" not in text.splitlines() or shutil.which("apt-get") is None:
        raise KernelsError("this machine is not Debian: no mirror to take kernels from (tests/kernels/README.md)")
    return found.group(1)


@cache
def mirrors() -> tuple[str, str]:
    """The mirror and the one of the security suites, with their options, from the machine's own apt."""
    ask = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(CODENAME)", "Identifier: Packages"]
    found: dict[str, str] = {}
    for line in subprocess.run(ask, check=True, capture_output=True, text=True).stdout.splitlines():
        address, *names = line.split()
        for name in names:  # the codename is known only after the machine's own update
            found.setdefault(name, address)
    own = codename()
    if own not in found:
        raise KernelsError(f"this machine's apt has no mirror for {own}: configure one, or fill {_hint()} elsewhere")
    return found[own], found.get(f"{own}-security", "")


def _hint() -> str:
    return "PYEBPF_PROXY_CACHE/kernels"


class Apt:
    """apt with its own folder."""

    def __init__(self, root: Path, own_suite_only: bool, architecture: Architecture = AMD64) -> None:
        self._root = root
        self._flavour = f"cloud-{architecture.name}"
        mirror, security = mirrors()
        own = codename()
        suites = [own] if own_suite_only else [own, *(suite for suite in SUITES if suite != own)]
        keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
        options = f"[arch={architecture.name}{f' signed-by={keys}' if keys.exists() else ''}]"
        lines = []
        for suite in suites:
            lines.append(f"deb {options} {mirror} {suite} main")
            if suite != "sid":
                if suite != "bullseye":
                    lines.append(f"deb {options} {mirror} {suite}-backports main")
                if security:
                    lines.append(f"deb {options} {security} {suite}-security main")
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "status").touch()
        (root / "sources.list").write_text("\n".join(lines) + "\n")
        (root / "apt.conf").write_text(_SETTINGS.format(root=root, architecture=architecture.name))
        self.run("apt-get", "-q", "update")

    def run(self, *command: str, folder: Path | None = None) -> str:
        """The output of one of apt's programs; KernelsError with its last lines if it fails."""
        environment = os.environ | {"APT_CONFIG": str(self._root / "apt.conf"), "LC_ALL": "C"}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise KernelsError(f"{' '.join(command[:3])}: {last}")
        return done.stdout

    def newest(self, series: str) -> tuple[str, str] | None:
        """Package and version of the newest kernel of a series, or of all released ones ("newest")."""
        names = self.run("apt-cache", "pkgnames", "linux-image-").split()
        wanted = r"\d+\.\d+" if series == "newest" else re.escape(series)
        # "linux-image-6.12-cloud-amd64" is a metapackage: its name has no complete version, and it contains no image.
        fitting = [name for name in names if re.fullmatch(rf"linux-image-{wanted}\.\d[^ ]*-{self._flavour}", name)]
        if not fitting:
            return None
        lines = self.run("apt-cache", "madison", *fitting).splitlines()
        found = [(name.strip(), version.strip()) for name, version, _ in (line.split("|") for line in lines)]
        return max((entry for entry in found if "~rc" not in entry[1]), key=cmp_to_key(_compare), default=None)

    def kernel(self, package: str, version: str, target: Path) -> None:
        """Unpack an image with its modules; newer kernels have them in separate packages."""
        shown = self.run("apt-cache", "show", f"{package}={version}")
        parts = re.findall(rf"(linux-(?:base|binary|modules)-\S+-{self._flavour}) \(= \S+\)", shown)
        self.unpack([f"{name}={version}" for name in [package, *parts]], target)

    def unpack(self, packages: list[str], target: Path) -> None:
        """Download these packages, and unpack their files below ``target``. Nothing is installed or configured."""
        target.mkdir(parents=True, exist_ok=True)
        folder = self._root / "fetched"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.run("apt-get", "-q", "download", *packages, folder=folder)
        _extract(folder, target)

    def unpack_with_dependencies(self, package: str, suite: str, target: Path) -> None:
        """The same with all dependencies of a package, preferably from one suite."""
        self.run("apt-get", "-q", "clean")
        self.run("apt-get", "-q", "-y", "--download-only", "-t", suite, "install", package)
        _extract(self._root / "cache" / "archives", target)
        self.run("apt-get", "-q", "clean")


def _extract(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)
    if not any(folder.glob("*.deb")):
        raise KernelsError("apt fetched nothing")
    shutil.rmtree(folder / "partial", ignore_errors=True)


def _compare(one: tuple[str, str], other: tuple[str, str]) -> int:
    """dpkg's order of versions."""
    if one[1] == other[1]:
        return 0
    older = ["dpkg", "--compare-versions", one[1], "lt", other[1]]
    return -1 if subprocess.run(older, check=False).returncode == 0 else 1
