# SPDX-License-Identifier: Apache-2.0
"""The suites under stock Debian kernels, each in a QEMU machine (tests/kernels/README.md)."""
