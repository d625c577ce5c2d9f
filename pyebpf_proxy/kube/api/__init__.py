# SPDX-License-Identifier: Apache-2.0
"""The API server as a source of objects, and as the place where Events go. ``connect.api_server`` is the way in."""
