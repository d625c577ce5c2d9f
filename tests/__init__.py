# SPDX-License-Identifier: Apache-2.0
"""The tests, as one package: modules import each other by their full names. README.md describes the folders."""

import os
from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parents[1]
#: What was built or fetched, never inside the repository.
CACHE = Path(os.environ.get("PYEBPF_PROXY_CACHE", "/var/cache/pyebpf-proxy"))
