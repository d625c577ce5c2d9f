# SPDX-License-Identifier: Apache-2.0
"""Measurements, each with its comparison: ``make bench``. docs/performance.md describes them."""
