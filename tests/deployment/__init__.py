# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of deploy/: the manifests as kustomize builds them, and a container as a runtime creates it."""
