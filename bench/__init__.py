# SPDX-License-Identifier: Apache-2.0
"""Measurements, each beside what it is compared with: ``make bench``. docs/performance.md tells what is measured."""
