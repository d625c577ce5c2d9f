# SPDX-License-Identifier: Apache-2.0
"""Faults and floods: what connections notice while one thing after the other fails, ours beside kube-proxy."""
