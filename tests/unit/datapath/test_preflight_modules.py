# SPDX-License-Identifier: Apache-2.0
"""Kernels whose conntrack is a module: the message about the capability that lookups from BPF need."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath import preflight

NET_ADMIN, SYS_ADMIN, PERFMON, BPF = 1 << 12, 1 << 21, 1 << 38, 1 << 39


def test_a_kernel_without_namespace_cookies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 5.10: it rejects the option as every kernel rejects an unknown one."""
    (need,) = (need for need in preflight.needs() if need.what == "namespace cookies")
    assert need.look() == "SO_NETNS_COOKIE"
    monkeypatch.setattr(preflight, "SO_NETNS_COOKIE", 9999)
    with pytest.raises(FatalError, match=r"^the kernel has no cookies of network namespaces .*; use a newer kernel$"):
        need.look()


@pytest.mark.parametrize(
    ("modules", "rights", "expected"),
    [
        ((), NET_ADMIN | PERFMON | BPF, ""),
        (
            ("nf_conntrack", "nf_nat"),
            NET_ADMIN | PERFMON | BPF,
            "nf_conntrack is a module: lookups from BPF need CAP_SYS_ADMIN",
        ),
        (("nf_nat",), NET_ADMIN, ""),  # No function of it is called.
        (("nf_conntrack", "nf_nat"), NET_ADMIN | SYS_ADMIN, ""),
    ],
)
def test_modules_take_sys_admin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, modules: tuple[str, ...], rights: int, expected: str
) -> None:
    for name in ("vmlinux", *modules):
        (tmp_path / name).touch()
    monkeypatch.setattr(preflight, "_BTF", tmp_path / "vmlinux")
    monkeypatch.setattr(preflight, "effective_capabilities", lambda: rights)
    assert preflight.unreachable_conntrack() == expected
