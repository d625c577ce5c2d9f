# SPDX-License-Identifier: Apache-2.0
"""Where Kubernetes objects come from, and what they look like."""
