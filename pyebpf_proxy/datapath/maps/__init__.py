# SPDX-License-Identifier: Apache-2.0
"""The service maps: their content, how a change is written, and how they are read back."""
