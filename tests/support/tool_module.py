# SPDX-License-Identifier: Apache-2.0
"""Import programs from folders that are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests import ROOT

TOOLS = ROOT / "tools"


def tool(name: str, folder: Path = TOOLS) -> ModuleType:
    """Import the program NAME.py from a folder."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
