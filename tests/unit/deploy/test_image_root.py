# SPDX-License-Identifier: Apache-2.0
"""deploy/image/root.py for another architecture than this machine's: which stage is built for which, and how its
programs run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.tool_module import tool

root = tool("root", ROOT / "deploy/image")
OTHER = "arm64" if root.own_architecture() == "amd64" else "amd64"
#: A program of that architecture, of which the kernel reads only the header.
PROGRAM = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + {"amd64": b"\x3e", "arm64": b"\xb7"}[OTHER] + bytes(109)
#: As in elf.h: EM_BPF.
OBJECT = PROGRAM[:18] + b"\xf7" + PROGRAM[19:]


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of QEMU."""
    made = tmp_path / f"qemu-{root.MACHINES[OTHER]}-static"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return made


def test_only_the_last_stage_is_built_for_the_other_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: Path
) -> None:
    """The objects and the wheel are built by programs of this machine."""
    shutil.copy("/bin/true", emulator)
    (tmp_path / "base").mkdir()
    monkeypatch.setattr(root, "base", lambda image, architecture: tmp_path / "base")
    monkeypatch.setattr(root, "copy", lambda stage, words, stages, ignored: None)
    ran: list[tuple[str, str, str | None]] = []

    def run(stage: Any, command: str) -> None:
        ran.append((command.partition("deploy/image/")[2], stage.architecture, stage.arguments.get("TARGETARCH")))

    monkeypatch.setattr(root, "run", run)
    root.build(ROOT / "deploy/Dockerfile", tmp_path, OTHER)
    own = root.own_architecture()
    assert ran == [
        ("stage.sh packages build", own, None),
        ("stage.sh build", own, OTHER),
        ("stage.sh packages run && rm -rf /tmp/build", OTHER, None),
        ("", OTHER, None),  # the check that it starts
    ]


@pytest.mark.parametrize(("wanted", "others"), [(OTHER, ["bin/own"]), (root.own_architecture(), ["lib/other"])])
def test_an_image_with_programs_of_another_architecture_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: Path, wanted: str, others: list[str]
) -> None:
    """BPF objects are the same for each."""
    shutil.copy("/bin/true", emulator)
    base = tmp_path / "base"
    for name in ("bin", "lib"):
        (base / name).mkdir(parents=True)
    shutil.copy("/bin/true", base / "bin/own")
    (base / "lib/other").write_bytes(PROGRAM)
    (base / "lib/program.bpf.o").write_bytes(OBJECT)
    (base / "lib/short").write_bytes(PROGRAM[:3])
    (base / "lib/link").symlink_to("/nowhere")
    monkeypatch.setattr(root, "base", lambda image, architecture: base)
    (tmp_path / "Dockerfile").write_text('FROM debian:bookworm-slim\nENTRYPOINT ["/bin/own"]\n')
    with pytest.raises(root.RecipeError, match=f"^files for another architecture than {wanted}: {', '.join(others)}$"):
        root.build(tmp_path / "Dockerfile", tmp_path, wanted)


def test_without_an_emulator_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        root.RecipeError, match=f"^programs of {OTHER} cannot run here: apt-get install qemu-user-static$"
    ):
        root.build(ROOT / "deploy/Dockerfile", tmp_path, OTHER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs_root
def test_programs_of_the_other_architecture_run_only_in_its_namespaces(
    tmp_path: Path, emulator: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy("/bin/echo", emulator)
    program = tmp_path / "program"
    program.write_bytes(PROGRAM)
    program.chmod(0o755)
    script = f"id -u; touch {tmp_path}/new; chown 1234:5678 {tmp_path}/new; {program} word; exit 7"
    with pytest.raises(subprocess.CalledProcessError) as error:
        root.enter(["/bin/sh", "-c", script], {"PATH": root.STANDARD_PATH}, OTHER)
    assert error.value.returncode == 7
    user, shown = capfd.readouterr().out.splitlines()
    assert user == "0"
    assert shown.split()[0] == str(program)
    assert shown.split()[-1] == "word"
    made = (tmp_path / "new").stat()
    assert (made.st_uid, made.st_gid) == (1234, 5678)
    with pytest.raises(OSError, match="Exec format error"):
        subprocess.run([program], check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["folder", "s390x"], ["folder", "amd64", "arm64"]])
def test_unknown_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert root.main(arguments) == 1
    assert capsys.readouterr().err.endswith(" FOLDER [amd64|arm64]\n")
