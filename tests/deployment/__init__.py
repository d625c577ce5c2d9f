# SPDX-License-Identifier: Apache-2.0
"""What the tests of deploy/ share: the manifests as kustomize builds them, and a container as a runtime makes it."""
