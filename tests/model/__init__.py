# SPDX-License-Identifier: Apache-2.0
"""The whole agent against a slow model: random streams of events; after each event the kernel must match the model."""
