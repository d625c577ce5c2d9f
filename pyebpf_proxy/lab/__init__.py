# SPDX-License-Identifier: Apache-2.0
"""A cluster made of network namespaces: nodes with their own proxies, pods, an outside client, real servers.

The demo and the tests in ``tests/netns`` are built on it; ``docs/lab.md`` has the picture.
"""

from __future__ import annotations
