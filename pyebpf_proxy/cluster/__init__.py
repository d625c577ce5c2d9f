# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster …``: an administrator's commands for all nodes. The agent imports nothing of it."""
