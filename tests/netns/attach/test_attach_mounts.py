# SPDX-License-Identifier: Apache-2.0
"""bpffs and cgroup2 are found or mounted, from inside and outside of a private mount namespace.

Each test runs in a child process with private mounts and its own PID namespace. So process 1 belongs to the test, and
the machine's mounts do not change.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.node import mounts
from tests import ROOT

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]


PRELUDE = """
import ctypes, os, subprocess, sys
from pathlib import Path
from pyebpf_proxy.datapath.node import mounts
libc = ctypes.CDLL(None, use_errno=True)
directory = Path(sys.argv[1]) / "run"

def sh(line):
    subprocess.run(["sh", "-ec", line], check=True)

def bpffs_of(process):
    return [l.split()[4] for l in Path(f"/proc/{process}/mountinfo").read_text().splitlines() if " - bpf " in l]

BEFORE = set(bpffs_of("self"))  # the machine's own, elsewhere

def mounted(process="self"):
    return [path for path in bpffs_of(process) if path not in BEFORE]

def contents():
    "Of the usual bpffs, without the kernel's own files."
    return sorted(set(os.listdir("/sys/fs/bpf")) - {"maps.debug", "progs.debug"})

def leave_init():
    "As ip netns exec does: mounts of one's own, and a fresh /sys."
    assert libc.unshare(0x20000) == 0
    sh("mount --make-rslave /; umount -l /sys; mount -t sysfs none /sys")

def as_process_1(work):
    "Runs work in a child; process 1 of the namespace only waits."
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""


def run_in_private_machine(script: str, tmp_path: Path) -> str:
    """Run a script as process 1 of new PID and mount namespaces; /sys has no bpffs and no cgroup2."""
    path = tmp_path / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    setup = 'mount --make-rprivate /; umount -l /sys; mount -t sysfs none /sys; exec "$@"'
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-ec",
            setup,
            "sh",
            sys.executable,
            path,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_bpffs_is_mounted_once_and_unmounted_at_the_end(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        assert mounted() == []
        place = mounts.ensure_bpffs(directory)
        assert place == (Path("/sys/fs/bpf"), ""), place
        assert mounts.ensure_bpffs(directory) == place
        assert mounted() == ["/sys/fs/bpf"]
        mounts.pin_directory(place.path, directory, 1).mkdir(parents=True)
        mounts.release_bpffs(directory)
        assert mounted() == []
        assert mounts.release_bpffs(directory) == []
        """,
        tmp_path,
    )


def test_a_private_mount_namespace_uses_the_bpffs_of_process_1_and_pins_outlive_it(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        def agent():
            leave_init()
            place = mounts.ensure_bpffs(directory)
            assert place == (Path("/proc/1/root/sys/fs/bpf"), ""), place
            mounts.pin_directory(place.path, directory, 1).mkdir(parents=True)
            assert mounted() == []

        as_process_1(agent)
        assert mounted() == ["/sys/fs/bpf"]
        assert mounts.pin_directory(Path("/sys/fs/bpf"), directory, 1).is_dir()

        def again():
            leave_init()
            assert mounts.ensure_bpffs(directory).path == Path("/proc/1/root/sys/fs/bpf")
            assert mounts.pin_directory(Path("/proc/1/root/sys/fs/bpf"), directory, 1).is_dir()
            mounts.release_bpffs(directory)
            assert mounted(1) == []

        as_process_1(again)
        assert mounted() == []
        """,
        tmp_path,
    )


def test_an_existing_bpffs_stays_mounted(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        sh("mount -t bpf bpf /sys/fs/bpf; mkdir /sys/fs/bpf/others")
        place = mounts.ensure_bpffs(directory)
        mounts.pin_directory(place.path, directory, 1).mkdir(parents=True)
        assert len(mounts.release_bpffs(directory)) == 1
        assert contents() == ["others"]
        sh("rmdir /sys/fs/bpf/others")
        mounts.pin_directory(place.path, directory, 1).mkdir(parents=True)
        mounts.release_bpffs(directory)
        assert contents() == []
        assert mounted() == ["/sys/fs/bpf"]
        """,
        tmp_path,
    )


def test_the_agents_bpffs_stays_while_other_pins_are_in_it(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        other = directory.parent / "other"
        place = mounts.ensure_bpffs(directory).path
        for instance in (directory, other):
            mounts.pin_directory(place, instance, 1).mkdir(parents=True)
        mounts.release_bpffs(directory)
        assert mounts.pin_directory(place, other, 1).is_dir()
        assert not mounts.pin_directory(place, directory, 1).exists()
        mounts.release_bpffs(other)
        assert mounted() == []

        place = mounts.ensure_bpffs(directory).path
        mounts.pin_directory(place, directory, 1).mkdir(parents=True)
        sh("mkdir /sys/fs/bpf/others")
        mounts.release_bpffs(directory)
        assert contents() == ["others"], "nothing of the agent is left in the bpffs of others"
        """,
        tmp_path,
    )


def test_a_bpffs_in_the_run_directory_is_preferred(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        sh(f"mount -t bpf bpf /sys/fs/bpf; mkdir -p {directory}/bpf; mount -t bpf bpf {directory}/bpf")
        assert mounts.ensure_bpffs(directory).path == directory / "bpf"
        """,
        tmp_path,
    )


def test_without_access_to_process_1_the_own_mount_is_used_with_a_warning(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        def agent():
            leave_init()
            real = mounts.in_mount_namespace_of_init
            def refused(work):
                raise PermissionError(1, "Operation not permitted")
            mounts.in_mount_namespace_of_init = refused
            place = mounts.ensure_bpffs(directory)
            assert place.path == directory / "bpf" and mounts.is_bpffs(place.path), place
            assert "Operation not permitted" in place.warning and "services stop" in place.warning, place
            mounts.release_bpffs(directory)
            assert mounted() == []

        as_process_1(agent)
        """,
        tmp_path,
    )


def test_pins_of_other_programs_stay_if_a_link_leads_to_them(tmp_path: Path) -> None:
    """What runs in the agent's container can put the link there; the clean-up on the node sees the whole bpffs."""
    run_in_private_machine(
        """
        place = mounts.ensure_bpffs(directory)
        (place.path / "other" / "pins").mkdir(parents=True)
        instance = place.path / mounts.FOLDER / mounts.instance_name(directory)
        os.symlink("../other", instance)
        mounts.release_bpffs(directory)
        assert (place.path / "other" / "pins").is_dir()
        assert not os.path.lexists(instance)
        instance.parent.mkdir(exist_ok=True)
        os.symlink("../other", instance)
        # As if the link had been put there just after the check.
        Path.is_symlink = lambda path: False
        try:
            mounts.release_bpffs(directory)
        except NotADirectoryError:
            pass
        else:
            raise AssertionError("no error")
        assert (place.path / "other" / "pins").is_dir()
        """,
        tmp_path,
    )


def test_one_clear_error_when_nothing_can_be_mounted(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        def agent():
            os.setresuid(65534, 65534, 65534)
            try:
                mounts.ensure_bpffs(directory)
            except mounts.MountError as error:
                assert str(error).startswith("no bpffs, and mounting one failed ("), error
                assert "mount it with: mount -t bpf" in str(error), error
                assert "\\n" not in str(error)
            else:
                raise AssertionError("no error")

        as_process_1(agent)
        """,
        tmp_path,
    )


@pytest.mark.parametrize("where", ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/mnt", ""])
def test_cgroup2_is_found_wherever_it_is(where: str, tmp_path: Path) -> None:
    run_in_private_machine(
        f"""
        where = {where!r}
        sh("mount -t tmpfs none /mnt")
        if where.endswith("unified"):
            sh("mount -t tmpfs none /sys/fs/cgroup; mkdir /sys/fs/cgroup/unified")
        if where:
            sh(f"mount -t cgroup2 none {{where}}")

        def mounted():
            # Network namespaces of other tests come and go.
            return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " nsfs " not in line]

        before = mounted()
        fd, found, warning = mounts.open_cgroup2()
        assert not warning
        assert found == (where or "a detached mount"), found
        assert os.path.exists(f"/proc/self/fd/{{fd}}/cgroup.controllers")
        assert os.path.samestat(os.fstat(fd), os.stat("/proc/self/fd/%d" % fd))
        assert mounted() == before
        """,
        tmp_path,
    )


def test_mount_points_of_others_may_have_any_name(tmp_path: Path) -> None:
    """A pod chooses the path of a subPath, and a user that of a FUSE file system: also one that is not UTF-8."""
    run_in_private_machine(
        """
        sh("mount -t tmpfs none /mnt")
        for point, kind in ((b"/mnt/\\xff", b"tmpfs"), (b"/mnt/a b\\xfe", b"cgroup2")):
            os.mkdir(point)
            assert libc.mount(b"none", point, kind, 0, None) == 0
        fd, found, warning = mounts.open_cgroup2()
        assert not warning
        assert os.fsencode(found) == b"/mnt/a b\\xfe", found
        """,
        tmp_path,
    )


def test_cgroup2_of_process_1_is_found_from_a_private_mount_namespace(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        sh("mount -t cgroup2 none /sys/fs/cgroup")

        def agent():
            leave_init()
            fd, found, _ = mounts.open_cgroup2()
            assert found == "/proc/1/root/sys/fs/cgroup", found

        as_process_1(agent)
        """,
        tmp_path,
    )


def test_instances_have_distinct_names() -> None:
    names = [
        mounts.instance_name(Path(p)) for p in ("/run/pyebpf-proxy", "/run/pyebpf-proxy/", "/a/b", "/a-b", "/c/b", "/")
    ]
    assert names[0] == names[1] == "default"
    assert len(set(names)) == 5
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in names)
    assert mounts.table_name(Path("/run/pyebpf-proxy")) == "pyebpf-proxy"
    assert mounts.table_name(Path("/a/b")).startswith("pyebpf-proxy-b-")


def test_another_path_of_a_directory_names_the_same_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /var/run and /run. It has the same lock and record, so it must have the same pins and table."""
    real = tmp_path / "run"
    real.mkdir()
    (tmp_path / "alias").symlink_to(real)
    one, other = real / "agent", tmp_path / "alias" / "agent"
    assert mounts.instance_name(one) == mounts.instance_name(other)
    for default, directory in ((one, other), (other, one)):
        monkeypatch.setattr(mounts, "DEFAULT_DIRECTORY", default)
        assert mounts.table_name(directory) == "pyebpf-proxy"


def test_the_fork_hands_back_the_error(tmp_path: Path) -> None:
    run_in_private_machine(
        """
        def agent():
            leave_init()
            def fails():
                raise FileNotFoundError(2, "")
            try:
                mounts.in_mount_namespace_of_init(fails)
            except FileNotFoundError:
                return
            raise AssertionError("no error")

        as_process_1(agent)
        """,
        tmp_path,
    )


def test_the_hosts_mounts_are_found_even_where_process_1_is_guarded() -> None:
    """Started as `ip netns exec` does, on this machine, whatever root may see of its process 1."""
    script = """
        import os
        from pyebpf_proxy.datapath.node import mounts
        print(os.stat(mounts.root_of_host().parent / "ns" / "mnt").st_ino, mounts.in_namespace_of_init("mnt"))
    """
    inside = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert inside.stdout.split() == [str(os.stat("/proc/self/ns/mnt").st_ino), "False"]
