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


SAYS = (
    "from pyebpf_proxy.cluster.output import Output; import sys\n"
    "output = Output(False)\n"
    "output.say('the webhook says: \\u62d2\\u7edd'); output.say('next'); output.end()\n"
    "print('continued', output.status, file=sys.stderr)"
)


def test_characters_that_the_encoding_lacks() -> None:
    """Of a webhook's refusal, in the middle of a takeover."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, env=environment, check=True)
    assert (ran.stdout, ran.stderr) == ("the webhook says: \\u62d2\\u7edd\nnext\n", "continued 0\n")


def test_a_full_disk_does_not_stop_the_command_halfway() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", SAYS], stdout=full, stderr=subprocess.PIPE, text=True, check=True)
    assert ran.stderr == (
        "Error: stdout cannot be written: No space left on device; the command continues without output\ncontinued 1\n"
    )


def test_a_closed_stdout() -> None:
    """As a service manager's or `>&-`: the error is one line."""
    code = '"$0" -m pyebpf_proxy cluster status --kubeconfig /nonexistent >&-'
    ran = subprocess.run(["sh", "-c", code, sys.executable], capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert ran.stderr.startswith("Error: no kubeconfig: /nonexistent does not exist; ")
    assert ran.stderr.count("\n") == 1
