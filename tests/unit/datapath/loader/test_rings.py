# SPDX-License-Identifier: Apache-2.0
"""The size of a ring of events, in pages."""

from __future__ import annotations

import mmap

import pytest

from pyebpf_proxy.datapath.loader.rings import pages
from pyebpf_proxy.trace import kernel


@pytest.mark.parametrize(
    ("page", "size", "wanted"),
    [(4096, 1, 1), (4096, 4096, 1), (4096, 4097, 2), (4096, 5 * 4096, 8), (4096, 1 << 20, 256), (65536, 1 << 20, 16)],
)
def test_a_ring_has_pages_of_this_kernel(monkeypatch: pytest.MonkeyPatch, page: int, size: int, wanted: int) -> None:
    """Also that of the kernel's events: counted in pages of 4 KiB, it would take 16 times the memory on arm64."""
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    assert pages(size) == wanted
    assert kernel.pages is pages
