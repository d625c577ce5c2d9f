# SPDX-License-Identifier: Apache-2.0
"""``python -m pyebpf_proxy`` runs ``pyebpf-proxy``."""

from __future__ import annotations

import sys

from pyebpf_proxy.cli import main

sys.exit(main())
