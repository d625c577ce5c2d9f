# SPDX-License-Identifier: Apache-2.0
"""Invalid files as configuration: one clear line, status 1, little time and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEADER = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
MEMORY_MIB = 250.0
SECONDS = 20.0


def big(path: Path) -> None:
    with path.open("w") as file:
        file.write(HEADER)
        for number in range(400_000):
            file.write(f"unknownField{number}: x{number}\n")
    assert path.stat().st_size > 10 << 20


def deep(path: Path) -> None:
    path.write_text(f"{HEADER}a: " + "[" * 500_000 + "\n")


def deep_json(path: Path) -> None:
    path.write_text('{"a": ' + "[" * 500_000 + "\n")


def deep_blocks(path: Path) -> None:
    path.write_text(HEADER + "".join(" " * depth + "a:\n" for depth in range(1400)))


def exploding(path: Path) -> None:
    lines = [f"a{n}: &a{n} [" + ",".join([f"*a{n - 1}"] * 10) + "]\n" for n in range(1, 30)]
    path.write_text(HEADER + "a0: &a0 [x, x]\n" + "".join(lines))


def exploding_merges(path: Path) -> None:
    lines = [f"a{n}: &a{n}\n  <<: *a{n - 1}\n  x{n}: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)]
    path.write_text(HEADER + "a0: &a0 {x: y}\n" + "".join(lines))


def nul(path: Path) -> None:
    path.write_text(HEADER + "mode: \0\n")


def zeroes(path: Path) -> None:
    path.write_bytes(bytes(1 << 19))


def folder(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


#: Between the test and the measured process: the kernel counts a process' memory before its exec, and pytest's may be
#: large.
MEASURE = """
import json, resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, used.ru_maxrss / 1024, used.ru_utime + used.ru_stime]))
"""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (big, r"larger than 1 MiB"),
        (deep, r"exceeded max depth of 1000"),
        (deep_json, r"exceeded max depth"),
        (deep_blocks, r"exceeded max depth of 1000"),
        (exploding, r"excessive aliasing"),
        (exploding_merges, r"excessive aliasing"),
        (nul, r"control characters are not allowed"),
        (zeroes, r"control characters are not allowed"),
        (folder, r"is a directory"),
        (fifo, r"not a regular file"),
        (device, r"not a regular file"),
        (loop, r"too many levels of symbolic links"),
    ],
)
def test_one_line_and_little_time_and_memory(tmp_path: Path, make: Callable[[Path], None], expected: str) -> None:
    path = tmp_path / "config.yaml"
    make(path)
    output = tmp_path / "output"
    command = [sys.executable, "-m", "pyebpf_proxy", "--config", str(path), "--write-config-to", str(tmp_path / "out")]
    with output.open("wb") as errors:
        measured = subprocess.run(
            [sys.executable, "-c", MEASURE, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
    status, mib, seconds = json.loads(measured.stdout.splitlines()[-1])
    text = output.read_text()
    assert status == 1, text
    assert re.fullmatch(rf"\S+Z error failed complete: [^\n]*{expected}[^\n]*\n", text), text[:1000]
    assert f"file={path}" in text
    assert len(text) < 400
    assert mib < MEMORY_MIB
    assert seconds < SECONDS
    assert not (tmp_path / "out").exists()
