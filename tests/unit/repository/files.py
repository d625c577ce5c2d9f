# SPDX-License-Identifier: Apache-2.0
"""The files of the repository that people write."""

from __future__ import annotations

from pathlib import Path

from tests import ROOT

GENERATED = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def own_files(*suffixes: str) -> list[Path]:
    """Files that people write, by suffix (all for none), without generated folders."""
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not GENERATED.intersection(path.relative_to(ROOT).parts)
        and (not suffixes or path.suffix in suffixes)
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
