# SPDX-License-Identifier: Apache-2.0
"""Kernels whose conntrack is a module: which right is missing for the direct lane, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyebpf_proxy.datapath import preflight

NET_ADMIN, SYS_ADMIN, PERFMON, BPF = 1 << 12, 1 << 21, 1 << 38, 1 << 39


@pytest.mark.parametrize(
    ("modules", "rights", "expected"),
    [
        ((), NET_ADMIN | PERFMON | BPF, ""),
        (
            ("nf_conntrack", "nf_nat"),
            NET_ADMIN | PERFMON | BPF,
            "nf_conntrack and nf_nat built as modules: calling them from BPF takes CAP_SYS_ADMIN",
        ),
        (("nf_nat",), NET_ADMIN, "nf_nat built as modules: calling them from BPF takes CAP_SYS_ADMIN"),
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
    assert preflight.unreachable_modules() == expected
