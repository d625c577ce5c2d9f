# SPDX-License-Identifier: Apache-2.0
"""A cluster of network namespaces: nodes with their own agents, pods, an outside client, real servers.

The demo and the tests in ``tests/netns`` use it; docs/lab.md has a diagram.
"""

from __future__ import annotations
