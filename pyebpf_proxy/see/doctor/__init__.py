# SPDX-License-Identifier: Apache-2.0
"""``doctor``: whether this machine can run pyebpf-proxy."""
