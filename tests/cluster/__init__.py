# SPDX-License-Identifier: Apache-2.0
"""Suites with real Kubernetes programs, built from Go modules into a cache folder (``make test-cluster``)."""
