# SPDX-License-Identifier: Apache-2.0
"""The API server as a source of objects and as the recipient of Events. The entry point is ``connect.api_server``."""
