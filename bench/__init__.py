# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each with a comparison: ``make bench``. docs/performance.md describes them."""
