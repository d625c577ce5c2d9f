# SPDX-License-Identifier: Apache-2.0
"""The version of the maps' layout, where it can be had without everything else."""

from __future__ import annotations

#: Part of the pins' path. Changes with every change of bpf/maps.h that a program of the other version could not read.
LAYOUT_VERSION = 2
