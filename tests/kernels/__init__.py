# SPDX-License-Identifier: Apache-2.0
"""The suites under stock Debian kernels, each in a machine of QEMU's (tests/kernels/README.md)."""
