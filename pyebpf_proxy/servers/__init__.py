# SPDX-License-Identifier: Apache-2.0
"""What the agent serves over HTTP."""
