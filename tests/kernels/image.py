# SPDX-License-Identifier: Apache-2.0
"""The file system of a guest: Debian, the kernel's modules, and this checkout with its environment."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import tests
from tests import ROOT
from tests.kernels import foreign
from tests.kernels.architecture import AMD64, Architecture
from tests.kernels.cpio import Archive
from tests.kernels.debian import Apt, codename, mirrors
from tests.kernels.problem import KernelsError
from tests.netns import foreign_programs

REPOSITORY = ROOT
CACHE = tests.CACHE / "kernels"
SITE = REPOSITORY / f".venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
#: In addition to Debian's essential packages.
PACKAGES = (
    *("apparmor", "bpftool", "conntrack", "curl", "ethtool", "iperf3", "iproute2", "ipset", "iptables"),
    *("iputils-ping", "jq", "kmod", "libbpf1", "libseccomp2", "nftables", "procps", "python3", "python3-nftables"),
    *("tcpdump", "util-linux"),
)
_LEFT_OUT = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "usr/share/i18n"),
    *("usr/share/perl*", "var/cache", "var/lib/apt", "var/lib/dpkg/info"),
)
# Modules for networks of devices and namespaces, and for containers; others (disks, graphics) are left out.
_MODULES = (
    *("kernel/net", "kernel/drivers/net", "kernel/lib", "kernel/crypto", "kernel/arch", "kernel/drivers/char"),
    "kernel/fs/overlayfs",
)
_NO_MODULES = ("*/drivers/net/ethernet/*", "*/drivers/net/wireless/*", "*/net/mac80211/*", "*/net/bluetooth/*")
# Large parts of the virtual environment that no suite in a guest uses.
_NO_PYTHON = (
    *("numpy*", "matplotlib*", "mpl_toolkits", "fontTools*", "fonttools*", "PIL", "pillow*", "kiwisolver*"),
    *("contourpy*", "mypy*", "*__mypyc*", "ruff*", "pip", "pip-*", "setuptools*", "ast_serialize*", "*-stubs"),
)
_PROJECT = ("bpf", "deploy", "docs", "examples", "pyebpf_proxy", "tests", "tools", "build/tests")


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel in the cache."""

    series: str
    release: str
    image: Path
    modules: Path  # a cpio


@cache
def debian(own_suite_only: bool, architecture: Architecture = AMD64) -> Apt:
    """Debian's archive, of this machine's suite or of all; its index is downloaded at the first use."""
    folder = CACHE / f"apt-{'own' if own_suite_only else 'all'}{suffix(architecture)}"
    return Apt(folder, own_suite_only, architecture)


def suffix(architecture: Architecture) -> str:
    """At the end of names in the cache."""
    return "" if architecture is AMD64 else f"-{architecture.name}"


def root(architecture: Architecture = AMD64) -> Path:
    """Debian with the programs that the suites call, as a cpio; built once per list of packages. Needs root and
    debootstrap.
    """
    suite = codename()
    mark = hashlib.sha256(" ".join([suite, *PACKAGES, *_LEFT_OUT]).encode()).hexdigest()[:12]
    path = CACHE / f"root-{suite}{suffix(architecture)}-{mark}.cpio"
    if path.exists():
        return path
    if shutil.which("debootstrap") is None:
        raise KernelsError("debootstrap is missing: apt-get install debootstrap")
    print(f"making {path.name} by debootstrap", flush=True)
    scratch = CACHE / f"root.{os.getpid()}"
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}", f"--arch={architecture.name}"]
    if architecture.foreign:
        options.append("--foreign")  # only downloads the packages, and unpacks the essential ones
    command = ["debootstrap", *options, suite, str(scratch), mirrors()[0]]
    # Its mounts are in a namespace that always ends with it.
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    try:
        done = subprocess.run([*namespaces, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelsError(f"debootstrap: {(done.stdout.strip() or done.stderr.strip()).splitlines()[-1]}")
        if architecture.foreign:
            foreign.finish(scratch)
        _write(path, lambda archive: archive.tree(scratch, "", lambda name: _matches(name, _LEFT_OUT)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def libraries(architecture: Architecture) -> Path | None:
    """The compiled parts of the Python libraries for a foreign architecture, as a folder; None if it is this machine's.

    Python itself is that of the same suite, so the other parts are those of this checkout's environment.
    """
    if not architecture.foreign:
        return None
    names = foreign.compiled(SITE, lambda name: _matches(name, _NO_PYTHON))
    lock = foreign.locked(names)
    mark = hashlib.sha256(f"{sys.version} {lock}".encode()).hexdigest()[:12]
    folder = CACHE / f"python{suffix(architecture)}-{mark}"
    if not folder.exists():
        print(f"fetching {len(names)} Python libraries for {architecture.name}", flush=True)
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            foreign.install(lock, architecture.machine, scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def kernel(series: str, architecture: Architecture = AMD64) -> Kernel:
    """The newest kernel of a series, from the cache or the archive."""
    folder = CACHE / f"{series}{suffix(architecture)}"
    mark = hashlib.sha256(" ".join([*_MODULES, *_NO_MODULES]).encode()).hexdigest()[:12]
    modules = folder / f"modules-{mark}.cpio"
    if not (folder / "release").exists() or not modules.exists():
        _fetch(series, architecture, folder, modules.name)
    release = (folder / "release").read_text().strip()
    return Kernel(series, release, folder / "vmlinuz", modules)


def _fetch(series: str, architecture: Architecture, folder: Path, modules: str) -> None:
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        found = None
        # The machine's own suite has what CI needs; all suites together are ten times as large.
        for own_suite_only in (False,) if series == "newest" else (True, False):
            found = debian(own_suite_only, architecture).newest(series)
            if found is not None:
                break
        if found is None:
            raise KernelsError(
                f"no Debian suite of the mirror has a kernel {series}"
                f" (linux-image-{series}.*-cloud-{architecture.name})"
            )
        print(f"fetching {found[0]} {found[1]}", flush=True)
        debian(own_suite_only, architecture).kernel(*found, scratch / "files")
        (place,) = (scratch / "files").glob("**/lib/modules/*")
        release = place.name
        # Newer packages have the image next to the modules.
        (image,) = [*(scratch / "files").glob(f"**/boot/vmlinuz-{release}"), *place.glob("vmlinuz")]
        subprocess.run(["depmod", "-b", place.parents[2], release], check=True)
        shutil.move(image, scratch / "vmlinuz")
        _write(scratch / modules, lambda archive: _add_modules(archive, place, release))
        (scratch / "release").write_text(release + "\n")
        shutil.rmtree(scratch / "files")
        shutil.rmtree(folder, ignore_errors=True)  # downloaded with other modules
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _add_modules(archive: Archive, place: Path, release: str) -> None:
    target = f"usr/lib/modules/{release}"
    for path in sorted(place.glob("modules.*")):
        archive.add(path, f"{target}/{path.name}")

    def left_out(part: str, name: str) -> bool:
        return _matches(f"/{part}/{name}", _NO_MODULES)

    for part in _MODULES:
        if (place / part).is_dir():
            archive.tree(place / part, f"{target}/{part}", partial(left_out, part))


def project(path: Path, environment: dict[str, str], suites: Iterable[str], architecture: Architecture = AMD64) -> None:
    """This checkout at its own path, its environment, and init with its parameters. The BPF objects in it are the same
    for each architecture.
    """
    foreign_programs.compiled(foreign_programs.BUILT)  # guests have no compiler
    compiled = libraries(architecture)
    # Compiled here, with pytest's rewritten assertions: an emulated CPU takes half a minute for it.
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *suites]
    writes = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(collect, cwd=REPOSITORY, env=writes, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelsError(f"the tests cannot be collected: {done.stdout.strip().splitlines()[-1]}")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "pyebpf_proxy"], cwd=REPOSITORY, env=writes, check=True)

    def write(archive: Archive) -> None:
        here = str(REPOSITORY)
        for name in _PROJECT:
            if (REPOSITORY / name).is_dir():
                archive.tree(REPOSITORY / name, f"{here}/{name}")
        for entry in sorted(REPOSITORY.iterdir()):
            if entry.is_file():
                archive.add(entry, f"{here}/{entry.name}")
        archive.tree(REPOSITORY / ".venv/bin", f"{here}/.venv/bin", lambda name: name in ("ruff", "mypy"))
        archive.add(REPOSITORY / ".venv/pyvenv.cfg", f"{here}/.venv/pyvenv.cfg")
        target = f"{here}/{SITE.relative_to(REPOSITORY)}"
        left_out = _NO_PYTHON if compiled is None else (*_NO_PYTHON, "*.so")
        archive.tree(SITE, target, lambda name: _matches(name, left_out))
        for library in sorted(compiled.rglob("*.so")) if compiled else ():
            archive.add(library, f"{target}/{library.relative_to(compiled)}")
        parameters = {"PROJECT": here, "PYTHON": f"{here}/.venv/bin/python", **environment}
        parameters["RESULTS_DEVICE"] = f"/dev/{architecture.results}"
        exports = [f"export {name}={shlex.quote(value)}\n" for name, value in parameters.items()]
        archive.data("guest.env", "".join(exports).encode())
        archive.add(REPOSITORY / "tests/kernels/init", "init")

    _write(path, write)


def _write(path: Path, fill: Callable[[Archive], None]) -> None:
    """An archive that is either complete or absent."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            archive = Archive(file)
            fill(archive)
            archive.close()
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def _matches(name: str, patterns: tuple[str, ...] | list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
