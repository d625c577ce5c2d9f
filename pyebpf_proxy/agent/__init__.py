# SPDX-License-Identifier: Apache-2.0
"""The agent: it connects the packages, runs the sync loop, and starts and stops on a node."""
