# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy and pyebpf-proxy with the same files and command lines: cases, answers, comparison."""
