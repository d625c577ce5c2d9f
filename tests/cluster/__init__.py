# SPDX-License-Identifier: Apache-2.0
"""Suites beside real Kubernetes programs, built from Go modules into a cache folder (``make test-cluster``)."""
