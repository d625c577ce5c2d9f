# SPDX-License-Identifier: Apache-2.0
"""What the commands print while they work: a bar below the lines on a terminal, and only there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

WORK = """
from pyebpf_proxy.cluster.output import Output
output = Output({json})
with output.progress("nodes", 2) as step:
    for number in (1, 2):
        output.say(f"[{{number}}/2] a line with [brackets] of n{{number}}")
        step()
output.say("done")
output.end()
"""


def on_terminal(program: str, term: str) -> str:
    """What a program writes to a terminal."""
    leader, follower = os.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", program], stdin=follower, stdout=follower, env=environment)
    os.close(follower)
    written = b""
    try:
        while data := os.read(leader, 65536):
            written += data
    except OSError:
        pass  # the other end is closed
    finally:
        os.close(leader)
    assert process.wait(30) == 0
    return written.decode().replace("\r\n", "\n")


def test_a_bar_without_a_known_end() -> None:
    written = on_terminal(WORK.replace('"nodes", 2', '"parts", None').format(json=False), "xterm-256color")
    assert "2/? parts" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def test_a_bar_on_a_terminal() -> None:
    written = on_terminal(WORK.format(json=False), "xterm-256color")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert "2/2 nodes" in plain
    for line in ("[1/2] a line with [brackets] of n1", "[2/2] a line with [brackets] of n2"):
        assert plain.count(line) == 1
    assert written.endswith("done\n")


@pytest.mark.parametrize(("json", "term"), [(False, "dumb"), (True, "xterm-256color")])
def test_no_bar_without_cursor_or_in_a_document(json: bool, term: str) -> None:
    written = on_terminal(WORK.format(json=json), term)
    assert "\x1b" not in written
    assert "2/2 nodes" not in written


def test_plain_lines_elsewhere() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WORK.format(json=False)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    lines = [f"[{number}/2] a line with [brackets] of n{number}" for number in (1, 2)]
    assert ran.stdout.splitlines() == [*lines, "done"]
