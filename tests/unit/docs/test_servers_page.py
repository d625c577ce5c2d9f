# SPDX-License-Identifier: Apache-2.0
"""docs/servers.md has every metric of pyebpf-proxy's own, and no other."""

from __future__ import annotations

import re

from tests import ROOT
from tests.unit.repository.files import own_files, relative

METRIC = re.compile(r"\bpyebpf_proxy_[a-z_]+[a-z]\b")


def test_the_page_has_every_metric() -> None:
    sources = [path for path in own_files(".py") if relative(path).startswith("pyebpf_proxy/servers/")]
    defined = {name for path in sources for name in re.findall(r'"(pyebpf_proxy_[a-z_]+)"', path.read_text())}
    assert len(defined) > 25
    page = (ROOT / "docs" / "servers.md").read_text()
    assert set(METRIC.findall(page)) == defined
