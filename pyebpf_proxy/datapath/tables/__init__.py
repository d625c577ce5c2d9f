# SPDX-License-Identifier: Apache-2.0
"""The service maps: what stands in them, how a change is written, how they are read back."""
