# SPDX-License-Identifier: Apache-2.0
"""The lab of machines, as far as it can be tested without machines: bad input, the table, the end of its own
libvirtd.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.vagrant.__main__ import _NEEDED, choose_driver
from tests.vagrant.course import ENOUGH, asked, changed, edit, loaded, next_tree, summary
from tests.vagrant.nodes import judge_console
from tests.vagrant.problem import VagrantError

VAGRANT = ROOT / "vagrant"


def programs(folder: Path, *names: str, **others: str) -> str:
    """A PATH with only these programs; ``others``: a name for another program."""
    folder.mkdir(exist_ok=True)
    for name, real in [*((name, name) for name in names), *others.items()]:
        found = shutil.which(real)
        assert found is not None, real
        (folder / name).symlink_to(found)
    return str(folder)


def refused(*command: str | Path, **environment: str) -> str:
    """The only line of a command that ends by itself with a status that is not 0."""
    ran = subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode not in (0, -signal.SIGKILL)
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    return line


@pytest.mark.parametrize("missing", _NEEDED)
def test_a_missing_program_is_named_with_its_package(tmp_path: Path, missing: str) -> None:
    there = dict.fromkeys((name for name in _NEEDED if name != missing), "true")
    path = programs(tmp_path / "bin", **there)
    line = refused(sys.executable, "-m", "tests.vagrant", PATH=path, PYEBPF_PROXY_CACHE=str(tmp_path))
    assert line == f"lab-test: {missing} is missing: apt-get install {_NEEDED[missing]}"


def test_drivers_are_kvm_and_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_DRIVER", "xen")
    with pytest.raises(VagrantError, match="LAB_DRIVER=xen: kvm or qemu"):
        choose_driver(None, tmp_path)
    monkeypatch.setenv("LAB_DRIVER", "qemu")
    assert choose_driver(None, tmp_path) == ("qemu", "LAB_DRIVER=qemu")


def test_kvm_is_tested_by_booting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no kernel prints nothing under KVM: the requested driver cannot be used."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86 is not installed")
    kernel = tmp_path / "vmlinuz"
    kernel.write_bytes(b"no kernel" * 1000)
    monkeypatch.delenv("ACCEL", raising=False)
    monkeypatch.setenv("LAB_DRIVER", "kvm")
    with pytest.raises(
        VagrantError, match=r"^LAB_DRIVER=kvm: (there is no /dev/kvm|/dev/kvm may not|a kernel does not)"
    ):
        choose_driver(kernel, tmp_path)
    monkeypatch.delenv("LAB_DRIVER")
    driver, why = choose_driver(kernel, tmp_path)
    assert driver == "qemu"
    assert "/dev/kvm" in why


def test_the_box_needs_debootstrap(tmp_path: Path) -> None:
    if not Path("/usr/bin/dpkg").exists():
        pytest.skip("not Debian: no box is built here")
    needed = ("bash", "dirname", "cat", "sha256sum", "cut", "apt-get")
    path = programs(tmp_path / "bin", *needed, python3=sys.executable)
    line = refused(VAGRANT / "build-box", PATH=path, PYEBPF_PROXY_CACHE=str(tmp_path))
    assert line == "build-box: debootstrap is missing: apt-get install debootstrap"


@pytest.mark.parametrize("script", ["libvirt.sh", "prepare.sh", "provision.sh"])
def test_scripts_print_their_usage(script: str) -> None:
    line = refused(VAGRANT / script, "nonsense")
    assert line.startswith(f"{script}: usage: ")


def test_nothing_can_be_run_without_a_libvirtd(tmp_path: Path) -> None:
    line = refused(VAGRANT / "libvirt.sh", "run", "true", LAB_STATE=str(tmp_path))
    assert line == "libvirt.sh: none runs: vagrant/libvirt.sh start"


def test_a_series_of_kernels_is_a_number(tmp_path: Path) -> None:
    line = refused(sys.executable, "-m", "tests.vagrant.kernel", "6.12.3-rc1", "initrd", str(tmp_path / "target"))
    assert line == "kernel: LAB_KERNEL=6.12.3-rc1: a series as 6.12, or newest"


def test_vagrant_accepts_the_file(tmp_path: Path) -> None:
    if shutil.which("vagrant") is None:
        pytest.skip("vagrant is not installed: tools/setup.sh packages vagrant/debian-packages.txt")
    environment = os.environ | {
        "VAGRANT_HOME": str(tmp_path / "home"),
        "VAGRANT_DOTFILE_PATH": str(tmp_path / "machines"),
        "VAGRANT_CHECKPOINT_DISABLE": "1",
    }
    for words in ({"LAB_DRIVER": "qemu"}, {"LAB_DRIVER": "kvm", "LAB_KERNEL": "6.12"}, {"LAB_BOX": "debian/other"}):
        ran = subprocess.run(
            ["vagrant", "validate"], cwd=VAGRANT, env=environment | words, capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, ""), words
    bad = subprocess.run(
        ["vagrant", "validate"],
        cwd=VAGRANT,
        env=environment | {"LAB_DRIVER": "xen"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode != 0
    assert "LAB_DRIVER=xen: kvm or qemu" in bad.stderr


def processes_of(state: Path) -> list[str]:
    """The processes with this folder as their state."""
    found = []
    wanted = f"LAB_STATE={state}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:  # ended meanwhile
            pass
    return found


@pytest.mark.needs_root
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_private_libvirtd_ends_with_its_script(tmp_path: Path, how: signal.Signals) -> None:
    """No process, no mount, no device is left, however it ends."""
    if shutil.which("libvirtd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("libvirtd is not installed: tools/setup.sh packages vagrant/debian-packages.txt")
    state = tmp_path / "state"
    inside = "virsh -q -c qemu:///system uri && ip link add lab-test-dev type veth && echo ready && exec sleep infinity"
    script = subprocess.Popen(
        [VAGRANT / "libvirt.sh", "with", "sh", "-c", inside],
        env=os.environ | {"LAB_STATE": str(state), "LAB_DRIVER": "qemu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert script.stdout is not None
        assert [script.stdout.readline().strip() for _ in range(2)] == ["qemu:///system", "ready"]
        assert len(processes_of(state)) >= 4
        assert not Path("/sys/class/net/lab-test-dev").exists()
        script.send_signal(how)
        script.wait(60)
        end = time.monotonic() + 60
        while (left := processes_of(state)) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []
        assert str(state) not in Path("/proc/mounts").read_text()
    finally:
        script.kill()
        script.wait()


def test_the_console_of_a_machine_that_does_not_boot_is_shown() -> None:
    assert judge_console("node1", "") == "node1: the box does not boot: no word on its console"
    panic = "[ 1.0] Kernel panic - not syncing: VFS\n[ 1.0] Rebooting"
    assert judge_console("node1", panic) == "node1: the box does not boot: [ 1.0] Kernel panic - not syncing: VFS"
    assert judge_console("node2", "No bootable device.\n") == "node2: the box does not boot: No bootable device."
    assert judge_console("node1", "Debian GNU/Linux 12 node1 ttyS0\n\nnode1 login: ") == ""


def test_a_row_is_wrong_if_a_connection_is_lost_or_no_request_was_made() -> None:
    def row(requests: int, lost: int, error: str = "") -> str:
        return loaded("restart", ["node1", "toolbox", "ClusterIP", "IPv4", "tcp", requests, lost, 0.3, error]).problem

    assert row(2 * ENOUGH, 0) == ""
    assert row(1000, 1, "reset by peer") == "1 lost, the first: reset by peer"
    assert row(2 * ENOUGH - 1, 0) == f"only {2 * ENOUGH - 1} requests: no result"


def test_an_agent_that_was_not_replaced_is_reported() -> None:
    def row(process: str, version: str) -> str:
        before = {"process": "100", "version": "1", "layouts": []}
        after = {"process": process, "version": version, "layouts": ["pyebpf-proxy/v1"]}
        return changed("upgrade", "node1", before, after, "1+next", 3.0).problem

    assert row("200", "1+next") == ""
    assert row("100", "1+next") == "process 100 as before"
    assert row("0", "1+next") == "process 0 as before"
    assert row("200", "1") == "version 1, not 1+next"


def test_the_table_counts_the_wrong_rows() -> None:
    good = asked("at first", ["node1", "toolbox", "web ClusterIP", "IPv4", "tcp", "web-1", "10.244.1.11", ""])
    bad = good._replace(problem="web-2 never answered")
    assert good.text().endswith(" ok")
    assert bad.text().endswith("WRONG: web-2 never answered")
    assert summary([good, bad, good], 12.4).startswith("3 rows, 1 not as they must be; 12 s")


def test_the_next_version_differs_in_its_name_and_its_layout(tmp_path: Path) -> None:
    next_tree(tmp_path)
    printed = subprocess.run(
        [sys.executable, "-P", "-m", "pyebpf_proxy", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split()[-1].endswith("+next")
    layout = "from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION; print(LAYOUT_VERSION)"
    versions = [
        subprocess.run(
            [sys.executable, "-P", "-c", layout],
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for tree in (ROOT, tmp_path)
    ]
    assert versions[0] != versions[1]
    with pytest.raises(VagrantError, match="0 lines"):
        edit(tmp_path / "pyproject.toml", "^no such line$", "")
