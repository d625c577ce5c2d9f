# SPDX-License-Identifier: Apache-2.0
"""``make screenshots``: draws docs/top.svg and docs/explain.svg from the real commands in a lab with traffic."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Node
from pyebpf_proxy.lab.example import EXAMPLES, open_example, populate

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: The console's SVG format without web fonts, so that the pictures load nothing.
FORMAT = re.sub(r"<!-- .*? -->|@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
SECONDS = 6.0
WIDTH, HEIGHT = 100, 22
#: Services of the examples: two served, one only by this node, one without endpoints.
TARGETS = [
    ("203.0.113.10", 80, "tcp"),
    ("203.0.113.10", 53, "udp"),
    ("203.0.113.20", 80, "tcp"),
    ("2001:db8:3::10", 80, "tcp"),
    ("203.0.113.30", 80, "tcp"),
]


def on_terminal(node: Node, words: list[str], width: int, height: int, seconds: float) -> str:
    """The output of a command on a terminal of this size, until it ends or the time is over."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    known |= {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", node.namespace.name, *command(), *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=known,
        start_new_session=True,
    )
    os.close(slave)
    written = b""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            written += os.read(master, 65536)
        except OSError:  # the command has closed the terminal
            break
    process.terminate()
    process.wait()
    os.close(master)
    return written.decode()


def picture(name: str, words: list[str], text: str, width: int) -> None:
    """An SVG of the terminal's final content."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"# pyebpf-proxy {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi(text.replace("\r", "").rstrip()), no_wrap=True, crop=False)
    console.save_svg(str(DOCS / f"{name}.svg"), title="node1", code_format=FORMAT, unique_id=name)


def last_frame(written: str) -> str:
    """The last complete picture on the alternate screen."""
    frames = written.split("\x1b[?1049l")[0].split("\x1b[H")
    return re.sub(r"\x1b\[\?[0-9]+[hl]|\x1b\[2J", "", frames[-1])


def requests(targets: list[tuple[str, int, str]]) -> None:
    """Send requests one after the other, until the lab ends."""
    while True:
        for address, port, protocol in targets:
            ask(address, port, protocol, timeout=1.0, reply_size=2000 if protocol == "tcp" else 200)
            time.sleep(0.002)


def main() -> int:
    """Start the lab, send requests, draw the pictures."""
    with open_example(EXAMPLES) as lab:
        populate(lab)
        node = lab.nodes[0]
        tasks = [lab.client.start(requests, targets) for targets in (TARGETS, TARGETS[:2], [TARGETS[3]])]
        try:
            words = ["top"]
            written = on_terminal(node, words, WIDTH, HEIGHT, SECONDS)
            picture("top", words, last_frame(written), WIDTH)
            words = ["explain", "198.51.100.2", "203.0.113.20:80"]
            picture("explain", words, on_terminal(node, words, WIDTH, HEIGHT, 60.0), WIDTH)
        finally:
            for task in tasks:
                task.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
