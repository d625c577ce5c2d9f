# SPDX-License-Identifier: Apache-2.0
"""Programs in folders that are no packages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests import ROOT

TOOLS = ROOT / "tools"


def tool(name: str, folder: Path = TOOLS) -> ModuleType:
    """The program NAME.py in a folder, imported."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass finds its module there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
