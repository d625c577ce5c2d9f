# SPDX-License-Identifier: Apache-2.0
"""Helpers that every package uses: logging, errors, safe printing, memory, the run folder."""
