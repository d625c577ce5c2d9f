# SPDX-License-Identifier: Apache-2.0
"""Prints docs/commands.schema.json: the schema of the commands' ``-o json`` output.

.venv/bin/python tools/commands_schema.py >docs/commands.schema.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyebpf_proxy.see.model import schema


def text() -> str:
    """The content of the file."""
    return json.dumps(schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
