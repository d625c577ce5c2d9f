# SPDX-License-Identifier: Apache-2.0
"""pyebpf-proxy: eBPF replacement for kube-proxy."""

from __future__ import annotations

__version__ = "0.1.0"

#: The kube-proxy release whose behaviour, flags and messages are followed; tools compare it with the cluster's.
KUBERNETES_VERSION = "v1.36.3"
