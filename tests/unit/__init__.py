# SPDX-License-Identifier: Apache-2.0
"""Tests that need no kernel features. The folders mirror the package (repository/test_layout.py checks it)."""
