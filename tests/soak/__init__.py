# SPDX-License-Identifier: Apache-2.0
"""A long run under load: what the agent and the kernel hold must stay flat."""
