# SPDX-License-Identifier: Apache-2.0
"""Sources of Kubernetes objects, and the types of these objects."""
