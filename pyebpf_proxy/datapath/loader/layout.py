# SPDX-License-Identifier: Apache-2.0
"""The version of the maps' layout, in a module without other imports."""

from __future__ import annotations

#: Part of the pins' path. Changes with every change of bpf/maps.h that a program of another version cannot read.
LAYOUT_VERSION = 5
