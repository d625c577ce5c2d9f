# SPDX-License-Identifier: Apache-2.0
"""Faults and floods: what connections notice during one fault after the other, with the agent and with kube-proxy."""
