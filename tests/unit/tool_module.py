# SPDX-License-Identifier: Apache-2.0
"""Programs of tools/, which is no package, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests import ROOT

TOOLS = ROOT / "tools"


def tool(name: str) -> ModuleType:
    """The program tools/NAME.py, imported."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
