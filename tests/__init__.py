# SPDX-License-Identifier: Apache-2.0
"""The tests, as one package: modules import each other by their full names. README.md describes the folders."""

from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parents[1]
