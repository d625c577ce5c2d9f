# SPDX-License-Identifier: Apache-2.0
"""Pages that name the layout version of the maps name the present one."""

from __future__ import annotations

import re

from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from tests.unit.repository.files import own_files, relative

#: In the path of the pins, or alone as code.
NAMED = re.compile(r"`v(\d+)`|/v(\d+)/(?:maps|xdp)")


def test_pages_name_the_present_layout_version() -> None:
    named = [
        (relative(page), int(match[1] or match[2]))
        for page in own_files(".md")
        if page.name != "CHANGELOG.md"
        for match in NAMED.finditer(page.read_text())
    ]
    assert {page for page, _ in named} >= {"docs/maps.md", "docs/upgrade.md"}
    assert [each for each in named if each[1] != LAYOUT_VERSION] == []
