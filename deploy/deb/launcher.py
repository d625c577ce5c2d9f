#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""The command of the Debian package. With ``-I``, variables of the caller cannot add modules to a program of root."""

import sys

sys.path.insert(0, "/usr/lib/pyebpf-proxy")

from pyebpf_proxy.cli import main

sys.exit(main())
