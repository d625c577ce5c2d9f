# SPDX-License-Identifier: Apache-2.0
"""pyebpf-proxy: eBPF replacement for kube-proxy."""

from __future__ import annotations

__version__ = "0.1.0"

#: The reference kube-proxy release for behaviour, flags and messages. Tools compare it with the cluster's version.
KUBERNETES_VERSION = "v1.36.3"
