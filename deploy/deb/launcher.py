#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""The command of the Debian package. ``-I``: no variable of the caller adds modules to a program that root runs."""

import sys

sys.path.insert(0, "/usr/lib/pyebpf-proxy")

from pyebpf_proxy.cli import main

sys.exit(main())
