# SPDX-License-Identifier: Apache-2.0
"""Tests without a kernel's help. The folders mirror the package (repository/test_layout.py checks it)."""
