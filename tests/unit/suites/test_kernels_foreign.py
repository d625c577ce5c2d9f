# SPDX-License-Identifier: Apache-2.0
"""Guests of another architecture: their machine, their Debian without the scripts of packages, their libraries."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels import debian, foreign, guest
from tests.kernels.architecture import AMD64, ARM64, named
from tests.kernels.problem import KernelsError

OTHER = ARM64 if platform.machine() == AMD64.machine else AMD64


def test_names_of_architectures() -> None:
    assert (named(""), named("amd64"), named("arm64")) == (AMD64, AMD64, ARM64)
    assert not replace(OTHER, machine=platform.machine()).foreign
    assert OTHER.foreign


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (AMD64, "-cpu max,la57=off,erms=off,fsrm=off -M q35"),
        (ARM64, "-cpu neoverse-n1 -M virt,gic-version=3"),
    ],
)
def test_the_emulated_machine(tmp_path: Path, architecture: guest.Architecture, words: str) -> None:
    machine = guest.Machine(("qemu",), "tcg", "", architecture=architecture)
    shown = " ".join(machine.arguments(tmp_path / "vmlinuz", None, tmp_path / "results", ""))
    assert words in shown
    assert f"console={architecture.console} " in shown


def test_kvm_is_not_tried_for_another_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would print no first line, and the reason would be a wrong one."""
    monkeypatch.delenv("ACCEL", raising=False)
    monkeypatch.setattr(guest, "run", None)
    machine = guest.choose_machine(("qemu",), tmp_path / "vmlinuz", tmp_path, OTHER)
    assert (machine.accelerator, machine.why) == ("tcg", f"this machine is not {OTHER.name}")
    assert machine.architecture is OTHER
    monkeypatch.setenv("ACCEL", "kvm")
    with pytest.raises(KernelsError, match=f"^ACCEL=kvm: this machine is not {OTHER.name}$"):
        guest.choose_machine(("qemu",), tmp_path / "vmlinuz", tmp_path, OTHER)


def test_without_its_qemu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of another architecture is no substitute."""
    monkeypatch.delenv("QEMU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/qemu-system-x86_64").touch()
    with pytest.raises(KernelsError, match=r"there is no QEMU: install qemu-system-arm \(10 or newer\)"):
        guest.find_qemu(tmp_path, ARM64)


@pytest.mark.parametrize("architecture", [AMD64, ARM64])
def test_its_kernels_are_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: guest.Architecture
) -> None:
    """An index of one architecture can name kernels of others, as packages that they replace."""

    def run(self: debian.Apt, *command: str, folder: Path | None = None) -> str:
        if command[1] == "pkgnames":
            series = ("linux-image-6.12.9-cloud", "linux-image-6.12.8-cloud", "linux-image-6.12-cloud")
            return "\n".join(f"{name}-{each.name}" for name in series for each in (AMD64, ARM64))
        asked = command[2:] if command[1] == "madison" else ()
        return "\n".join(f" {name} | {name.split('-')[2]}-1 | mirror" for name in asked)

    monkeypatch.setattr(debian.Apt, "run", run)
    monkeypatch.setattr(debian, "mirrors", lambda: ("http://mirror.test", ""))
    monkeypatch.setattr(debian, "codename", lambda: "bookworm")
    apt = debian.Apt(tmp_path, True, architecture)
    assert apt.newest("6.12") == (f"linux-image-6.12.9-cloud-{architecture.name}", "6.12.9-1")
    assert f"[arch={architecture.name}" in (tmp_path / "sources.list").read_text()
    assert f'APT::Architecture "{architecture.name}";' in (tmp_path / "apt.conf").read_text()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What ``debootstrap --foreign`` leaves: links of a merged /usr, and a package that is not unpacked yet."""
    content = tmp_path / "package"
    for name in (*foreign.COPIES.values(), *(str(Path(name).parent / to) for name, to in foreign.LINKS.items())):
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).write_text(f"content of {name}")
    (content / "bin").mkdir()
    (content / "bin/sh").write_text("a shell")
    (content / "DEBIAN").mkdir()
    control = "Package: all\nVersion: 1\nArchitecture: all\nMaintainer: test <test@nowhere.test>\nDescription: x\n"
    (content / "DEBIAN/control").write_text(control)
    made = tmp_path / "root"
    archives = made / "var/cache/apt/archives"
    archives.mkdir(parents=True)
    (made / "etc").mkdir()
    (made / "usr/bin").mkdir(parents=True)
    (made / "bin").symlink_to("usr/bin")
    (made / "proc").symlink_to("/proc")
    subprocess.run(["dpkg-deb", "--build", content, archives / "all.deb"], check=True, capture_output=True)
    return made


def test_debian_is_complete_without_the_scripts_of_its_packages(root: Path) -> None:
    foreign.finish(root)
    assert (root / "etc/passwd").read_text() == "content of usr/share/base-passwd/passwd.master"
    assert (root / "usr/sbin/ip6tables-save").read_text() == "content of usr/sbin/ip6tables-nft-save"
    assert (root / "usr/bin/awk").read_text() == "content of usr/bin/mawk"
    assert (root / "bin").is_symlink()
    assert (root / "usr/bin/sh").read_text() == "a shell"
    assert not (root / "proc").is_symlink()
    assert list((root / "proc").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncate -s 200 var/cache/apt/archives/all.deb", r"all\.deb cannot be unpacked: "),
        ("rm var/cache/apt/archives/all.deb", "Debian's packages have no usr/share/base-passwd/passwd.master"),
    ],
)
def test_what_debian_lacks_is_one_line(root: Path, damage: str, words: str) -> None:
    subprocess.run(damage, shell=True, cwd=root, check=True)
    with pytest.raises(KernelsError, match=words) as error:
        foreign.finish(root)
    assert "\n" not in str(error.value)


def test_only_distributions_with_compiled_parts_are_fetched(tmp_path: Path) -> None:
    def distribution(name: str, *files: str) -> None:
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:  # Python 3.12 and later list only those that exist
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()

    distribution("pure", "pure/__init__.py")
    distribution("compiled", "compiled/__init__.py", "compiled/part.cpython-311-x86_64-linux-gnu.so")
    distribution("large", "large/part.so")
    assert foreign.compiled(tmp_path, lambda name: name.startswith("large")) == ["compiled"]


def test_a_library_that_is_not_locked_is_one_line() -> None:
    assert foreign.locked(["cffi"]).startswith("cffi==")
    with pytest.raises(KernelsError, match=r"requirements\.lock has no entry with hashes for nonsense$"):
        foreign.locked(["nonsense"])


def test_without_a_package_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(KernelsError, match=r"^pip: ERROR: No matching distribution found for cffi==[^\n]*$"):
        foreign.install(foreign.locked(["cffi"]), ARM64.machine, tmp_path / "libraries")
