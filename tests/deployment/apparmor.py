# SPDX-License-Identifier: Apache-2.0
"""containerd's default AppArmor profile: loaded if the kernel has AppArmor; its text can be read anywhere."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

PROFILE = Path(__file__).parent / "containerd" / "apparmor.profile"
#: The name in containerd's CRI plugin.
NAME = "cri-containerd.apparmor.d"
ENABLED = Path("/sys/module/apparmor/parameters/enabled")
_TOKENS = re.compile(r"\*\*|\*|\?|\[\^?[^]]*\]|[{},]|[^*?{},\[]+")
_MEANING = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", ",": "|", "}": ")"}


def enabled() -> bool:
    return ENABLED.exists() and ENABLED.read_text().strip() == "Y"


@cache
def load() -> str:
    """Load the profile into the kernel with Debian's apparmor_parser; returns its name."""
    subprocess.run(["apparmor_parser", "--replace", "--skip-cache", PROFILE], check=True)
    return NAME


@cache
def _denied_writes() -> tuple[re.Pattern[str], ...]:
    found = []
    for line in PROFILE.read_text().splitlines():
        rule = re.match(r" *deny (\S+) ([rwklx]+),", line)
        if rule and "w" in rule[2]:
            pattern = rule[1].replace("@{PROC}", "/proc")
            found.append(re.compile("".join(_MEANING.get(part, part) for part in _as_regex(pattern))))
    return tuple(found)


def _as_regex(pattern: str) -> list[str]:
    parts = _TOKENS.findall(pattern)
    assert "".join(parts) == pattern, pattern
    return [part if part in _MEANING or part.startswith("[") else re.escape(part) for part in parts]


def denies_write(path: str) -> bool:
    """Whether the profile denies writing to this path."""
    return any(pattern.fullmatch(path) for pattern in _denied_writes())
