# SPDX-License-Identifier: Apache-2.0
"""A long run under load: the resources of agent and kernel must not grow."""
