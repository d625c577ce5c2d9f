# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes cluster on this machine, and upstream's end-to-end tests against it."""
