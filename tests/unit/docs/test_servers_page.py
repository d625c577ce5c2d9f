# SPDX-License-Identifier: Apache-2.0
"""docs/servers.md has every metric of pyebpf-proxy's own, and no other."""

from __future__ import annotations

import re

from pyebpf_proxy.servers import connection, health_checks, serving
from pyebpf_proxy.servers.http import Pool
from tests import ROOT
from tests.unit.repository.files import own_files, relative
from tests.unit.servers.http_client import CONNECTION_BYTES, READ_BYTES

METRIC = re.compile(r"\bpyebpf_proxy_[a-z_]+[a-z]\b")


def test_the_page_has_every_metric() -> None:
    sources = [path for path in own_files(".py") if relative(path).startswith("pyebpf_proxy/servers/")]
    defined = {name for path in sources for name in re.findall(r'"(pyebpf_proxy_[a-z_]+)"', path.read_text())}
    assert len(defined) > 25
    page = (ROOT / "docs" / "servers.md").read_text()
    assert set(METRIC.findall(page)) == defined


def test_t13_the_memory_that_the_page_names_follows_from_the_limits() -> None:
    """The page once promised 4 MiB for everything (finding T13). test_http_bounds.py measures that the bound holds."""
    (row,) = re.findall(r"^\| a request \|.*$", (ROOT / "docs" / "servers.md").read_text(), re.MULTILINE)
    (kept, small, connections, most) = map(
        int,
        re.findall(
            r"hold (\d+) MiB, .* up to (\d+) KiB continue; so (\d+) hostile connections hold less than (\d+) MiB", row
        )[0],
    )
    assert connections == health_checks.CONNECTIONS + 2 * serving.CONNECTIONS
    assert kept << 20 == Pool(1).kept_bytes
    assert small << 10 == connection.SMALL_BYTES
    bound = (kept << 20) + READ_BYTES + connections * ((small << 10) + CONNECTION_BYTES)
    assert most == -(-bound >> 20)
    header, body = re.findall(r"at most (\d+) MiB \+ 4 KiB and .* body (\d+) KiB \(413\)", row)[0]
    assert (int(header) << 20) + (4 << 10) == connection.MAX_HEADER_BYTES
    assert int(body) << 10 == connection.MAX_BODY_BYTES
    assert f" and {connection.MAX_HEADER_LINES} lines (431)" in row
